"""`samestep fetch`: downloads models, tokenizers and data for machines without internet."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.building.config import Config as BuildConfig
from data_pipeline.building.recipe import load_recipe
from data_pipeline.format.manifest import MANIFEST, Manifest
from data_pipeline.reading.remote import fetch_tokenizer
from data_pipeline.sources import Source
from data_pipeline.sources.kinds import huggingface
from data_pipeline.sources.table import TableConfig
from samestep import storage
from samestep.config import decode, read_tree, to_tree
from samestep.errors import ConfigError, DataError
from samestep.storage import Digest, objects
from samestep.storage.hub import model_folder, tokenizer_folder
from samestep.storage.urls import is_hub_path
from samestep.untrusted import inside
from trainer.checkpoint import files, integrity
from trainer.training.experiment import Experiment
from trainer.training.weights.loading import BASE, Weights, load_weights

logger = logging.getLogger(__name__)


def fetch(target: str, overrides: list[str], to: str | None) -> list[str]:
    """Downloads all that `target` names, except files that are there with the same content.

    Args:
        target: hf://NAME, or the file of an experiment or of a dataset.
        overrides: settings that override the file's.
        to: the folder for everything. Without it, models and tokenizers go to the Hub's cache,
            where they are found under their own names, and data goes to the folder "fetched".

    Returns:
        Settings that make a run use the downloads, such as "init_from=DIR".

    Raises:
        StorageError: something cannot be downloaded.
        ConfigError: the file names nothing remote.
    """
    if is_hub_path(target):
        return [f"init_from={model_folder(target, to)}"]
    if storage.is_url(target):
        raise ConfigError(
            f"{storage.shown(target)} is neither hf://NAME nor a file. To download a dataset or a "
            "checkpoint, name the experiment that uses it: samestep fetch EXPERIMENT "
            f"data.path={storage.shown(target)}"
        )
    tree = read_tree(target, overrides)
    if "source" in tree:
        settings = list(_dataset_inputs(load_recipe(target, overrides), to))
    else:
        settings = list(_experiment_inputs(decode(Experiment, tree), to))
    if not settings:
        raise ConfigError(
            f"everything that {target} names is on this machine already. There is nothing to fetch"
        )
    return settings


def _experiment_inputs(experiment: Experiment, to: str | None) -> Iterator[str]:
    """Downloads an experiment's weights, teacher and datasets; yields the settings."""
    folder = Path(to or "fetched")
    objective = experiment.objective
    models = [
        ("init_from", experiment.init_from, "model"),
        (f"objective.{objective.teacher_setting}", objective.teacher_path, "teacher"),
    ]
    for setting, start, place in models:
        if start and is_hub_path(start):
            yield f"{setting}={model_folder(start, to and f'{to}/{place}')}"
        elif start and storage.is_url(start):
            weights = load_weights(start)
            # Kept in the layout of a run, so every command takes the copy like the original.
            run = Path(_local(str(weights.folder), folder)).parent
            yield f"{setting}={_checkpoint(weights, run)}"
    data = experiment.data
    for name, probe in experiment.probes.items():
        if storage.is_url(probe.path):
            yield f"probes.{name}.path={_dataset(probe.path, folder)}"
    # Sources of a mixture are settings in one list, so local ones are listed again.
    here = {path: str(_dataset(path, folder)) for path in data.paths if storage.is_url(path)}
    if here and data.path is not None:
        yield f"data.path={here[data.path]}"
    elif here:
        sources = [
            {**to_tree(source), "path": here.get(source.path, source.path)}
            for source in data.sources
        ]
        yield f"data.sources={json.dumps(sources)}"


def _dataset_inputs(config: BuildConfig, to: str | None) -> Iterator[str]:
    """Downloads a dataset's tokenizer and source texts; yields the settings."""
    folder, tokenizer, source = Path(to or "fetched"), config.tokenizer.path, config.source
    if is_hub_path(tokenizer):
        yield f"tokenizer.path={tokenizer_folder(tokenizer, to and f'{to}/tokenizer')}"
    # `save_to_disk` writes state.json, or dataset_dict.json, last: with it the copy is complete.
    if isinstance(source, huggingface.Config):
        if not Path(source.path).exists():
            saved = _saved(folder, source.path, source.name, source.split, source.revision)
            if not (saved / "state.json").exists():
                source.open(streaming=False).save_to_disk(saved)
            yield f"source.path={saved}"
        return
    dataset = source.dataset if isinstance(source, TableConfig) else None
    if dataset is not None and not Path(dataset.path).exists():
        saved = _saved(folder, dataset.path, dataset.name, dataset.revision, "splits")
        if not (saved / "dataset_dict.json").exists():
            dataset.save(saved)
        yield f"source.dataset.path={saved}"
    # The settings with files: paths, source_paths and target_paths of parallel text, heldout.
    lists: dict[str, tuple[str, ...]] = {
        key: value
        for key, value in vars(source).items()
        if key.endswith("paths") or key == "heldout"
    }
    if any(storage.is_url(path) for paths in lists.values() for path in paths):
        built: Source = source.build()
        # Local names have no query, in which a signature may be.
        if len({_local(file, folder) for file in built.files}) < len(built.files):
            raise ConfigError(
                "source.paths names files whose addresses differ only in the query (?...), so they "
                "would get the same name. Download them by hand under names of their own"
            )
        _source_files(built, config.limit_bytes, folder)
        for name, paths in lists.items():
            yield f"source.{name}={json.dumps([_local(path, folder) for path in paths])}"


def _saved(folder: Path, path: str, *parts: str | None) -> Path:
    """Returns where a dataset of the Hub is saved; each part of it has its folder."""
    return folder / path / "-".join(filter(None, parts))


def _source_files(source: Source, limit: int | None, folder: Path) -> None:
    """Downloads the files of a source until their texts reach the limit, in bytes."""
    for number, file in enumerate(source.files, start=1):
        path = _local(file, folder)
        if storage.is_url(file):
            logger.info("%d of %d: %s", number, len(source.files), storage.shown(file))
            _source_file(file, Path(path))
        if limit is not None:
            # A limit counts text, not bytes of (compressed) files, so the file has to be read.
            records = dataclasses.replace(source, files=(path,)).records()
            limit -= sum(len(record.data) for record in records)
            if limit <= 0:
                return


def _source_file(url: str, path: Path) -> None:
    # Their hashes are unknown, and a corpus may take days, so the size has to be enough.
    if not path.exists() or path.stat().st_size != objects.size(url):
        _download(url, path)


def _dataset(url: str, folder: Path) -> Path:
    """Downloads a dataset of `samestep data build`; the manifest last, which makes it complete."""
    url = url.rstrip("/")
    manifest = Manifest.parse(objects.read(f"{url}/{MANIFEST}"), url)
    folder = Path(_local(url, folder))
    if not _is_of(folder, manifest):  # it was built again since the last download
        (folder / MANIFEST).unlink(missing_ok=True)
    for number, shard in enumerate(manifest.shards, start=1):
        logger.info("%d of %d: %s", number, len(manifest.shards), shard.name)
        _download(f"{url}/{shard.name}", inside(folder, shard.name), shard.digest)
    # Without a hash, a file that is there could be of another dataset.
    shutil.rmtree(folder / "tokenizer", ignore_errors=True)
    if manifest.small_files is None:
        fetch_tokenizer(url, folder)
    for name, digest in (manifest.small_files or {}).items():
        _download(f"{url}/{name}", inside(folder, name), digest)
    manifest.save(folder)
    return folder


def _is_of(folder: Path, manifest: Manifest) -> bool:
    try:
        return Manifest.load(folder) == manifest
    except DataError:
        return False


def _checkpoint(weights: Weights, run: Path) -> Path:
    """Downloads a checkpoint with its tokenizer and, if they are remote, its frozen weights."""
    assert weights.step is not None
    step, base = integrity.step_folder(run, weights.step), weights.base
    assert isinstance(step, Path)
    if base is not None:
        if not isinstance(base.folder, Path):
            _checkpoint(base, run / BASE)
        elif base.hub is not None:
            shutil.copytree(base.folder, run / BASE, dirs_exist_ok=True)
    shutil.rmtree(run / "tokenizer", ignore_errors=True)
    for name in files.names(weights.tokenizer):
        _download(f"{weights.tokenizer}/{name}", inside(run / "tokenizer", name))
    _step(weights.folder, step)
    return step


def _step(source: files.Location, folder: Path) -> None:
    """Downloads a step's folder; COMMITTED last, which makes it complete."""
    digests, last = integrity.read_checksums(source), integrity.COMMITTED
    # Another run may have saved this step there since the last download.
    if files.read_if_there(folder / last) != files.read(source / last):
        (folder / last).unlink(missing_ok=True)
    # False sorts before True, so this name comes last.
    for name in sorted(files.names(source), key=lambda name: name == last):
        logger.info("%s", storage.shown(f"{source}/{name}"))
        _download(f"{source}/{name}", inside(folder, name), digests.get(name))


def _local(path: str, folder: Path) -> str:
    """Returns where a file, or a pattern of files, is after its download into `folder`.

    Raises:
        CorruptError: the key of an object would lead out of `folder`.
    """
    if not storage.is_url(path):
        return path
    return str(inside(folder, storage.shown(path).partition("://")[2].rstrip("/")))


def _download(url: str, path: Path, digest: Digest | None = None) -> None:
    """Downloads a file, unless it is there.

    Args:
        digest: of its content; without it, nobody knows whether the file that is there is outdated.
    """
    if digest is None:
        with storage.atomic_write(path) as file:
            objects.download(url, file)
    # A call that was interrupted goes on where it was.
    elif not path.exists() or files.digest(path) != digest:
        with storage.atomic_write(path) as file:
            objects.download(url, file, digest.bytes, digest.sha256)
