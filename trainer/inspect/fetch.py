"""`samestep fetch`: gets models, tokenizers and data ahead, for machines without internet."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.building import build
from data_pipeline.building.recipe import load_recipe
from data_pipeline.format.manifest import MANIFEST, Manifest
from data_pipeline.reading.remote import fetch_tokenizer
from data_pipeline.sources import Source, huggingface
from data_pipeline.sources.table import TableConfig
from trainer import storage
from trainer.checkpoint import files, integrity
from trainer.config import decode, read_tree, to_tree
from trainer.errors import ConfigError
from trainer.storage.hub import is_hub_path, model_folder, tokenizer_folder
from trainer.training.experiment import Experiment
from trainer.training.weights import BASE, Weights, load_weights

logger = logging.getLogger(__name__)


def fetch(target: str, overrides: list[str], to: str | None) -> list[str]:
    """Gets what `target` names; what is there already, whole, is not got again.

    Args:
        target: hf://NAME, or the file of an experiment or of a dataset.
        overrides: settings that replace those of the file.
        to: the folder that gets it all. Without it, models and tokenizers go to the cache of the
            Hub, where they are found under their own names, and data to the folder "fetched".

    Returns:
        The settings that make a run use what was fetched, such as "init_from=DIR".

    Raises:
        StorageError: something cannot be downloaded.
        ConfigError: there is nothing remote in the file.
    """
    if is_hub_path(target):
        return [f"init_from={model_folder(target, to)}"]
    if storage.is_url(target):
        raise ConfigError(
            f"{storage.shown(target)} is neither hf://NAME nor a file; to get a dataset or a "
            "checkpoint, name the "
            f"experiment that uses it: samestep fetch EXPERIMENT data.path={storage.shown(target)}"
        )
    tree = read_tree(target, overrides)
    if "source" in tree:
        settings = list(_dataset_inputs(load_recipe(target, overrides), to))
    else:
        settings = list(_experiment_inputs(decode(Experiment, tree), to))
    if not settings:
        raise ConfigError(
            f"{target} names nothing that is not on this machine already; there is nothing to fetch"
        )
    return settings


def _experiment_inputs(experiment: Experiment, to: str | None) -> Iterator[str]:
    teacher = experiment.objective.teacher_path
    models = {
        "init_from": (experiment.init_from, "model"),
        "objective.teacher": (teacher, "teacher"),
    }
    for setting, (start, place) in models.items():
        if start and is_hub_path(start):
            yield f"{setting}={model_folder(start, to and f'{to}/{place}')}"
        elif start and storage.is_url(start):
            weights = load_weights(start)
            run = Path(_local(str(weights.folder), Path(to or "fetched"))).parent
            yield f"{setting}={_checkpoint(weights, run)}"
    here = {
        path: str(_built_dataset(path.rstrip("/"), Path(to or "fetched")))
        for path in experiment.data.paths
        if storage.is_url(path)
    }
    if here and experiment.data.path is not None:
        yield f"data.path={here[experiment.data.path]}"
    elif here:
        sources = [
            {**to_tree(source), "path": here.get(source.path, source.path)}
            for source in experiment.data.sources
        ]
        yield f"data.sources={json.dumps(sources)}"


def _dataset_inputs(config: build.Config, to: str | None) -> Iterator[str]:
    if is_hub_path(config.tokenizer.path):
        yield f"tokenizer.path={tokenizer_folder(config.tokenizer.path, to and f'{to}/tokenizer')}"
    folder = Path(to or "fetched")
    if isinstance(config.source, huggingface.Config):
        if not Path(config.source.path).exists():
            part = (config.source.name, config.source.split, config.source.revision)
            saved = folder / config.source.path / "-".join(filter(None, part))
            if not (saved / "state.json").exists():  # written last
                config.source.open(streaming=False).save_to_disk(saved)
            yield f"source.path={saved}"
        return
    dataset = config.source.dataset if isinstance(config.source, TableConfig) else None
    if dataset is not None and not Path(dataset.path).exists():
        saved = (
            folder
            / dataset.path
            / "-".join(filter(None, (dataset.name, dataset.revision, "splits")))
        )
        if not (saved / "dataset_dict.json").exists():
            dataset.save(saved)
        yield f"source.dataset.path={saved}"
    lists: dict[str, tuple[str, ...]] = {
        k: v for k, v in vars(config.source).items() if k.endswith("paths") or k == "heldout"
    }
    if any(storage.is_url(path) for paths in lists.values() for path in paths):
        source: Source = config.source.build()
        if len({_local(file, folder) for file in source.files}) < len(source.files):
            raise ConfigError(
                "source.paths names files that differ in the query (?...) of their addresses only, "
                "and so would get "
                "the same name; download them by hand under names of their own"
            )
        _source_files(source, config.limit_bytes, folder)
        for name, paths in lists.items():
            yield f"source.{name}={json.dumps([_local(path, folder) for path in paths])}"


def _source_files(source: Source, limit: int | None, folder: Path) -> None:
    """Downloads the files of a source, as far as the limit on their text reaches."""
    left = limit
    for number, file in enumerate(source.files, start=1):
        path = _local(file, folder)
        if storage.is_url(file):
            logger.info("%d of %d: %s", number, len(source.files), storage.shown(file))
            _download(file, Path(path))
        if left is not None:
            left -= sum(
                len(record.data) for record in dataclasses.replace(source, files=(path,)).records()
            )
            if left <= 0:
                return


def _built_dataset(url: str, folder: Path) -> Path:
    """Downloads what `samestep data build` made, the manifest last."""
    manifest = Manifest.parse(storage.read(f"{url}/{MANIFEST}"), url)
    folder = Path(_local(url, folder))
    for number, shard in enumerate(manifest.shards, start=1):
        logger.info("%d of %d: %s", number, len(manifest.shards), shard.name)
        _download(f"{url}/{shard.name}", folder / shard.name, shard.sha256)
    fetch_tokenizer(url, folder)
    manifest.save(folder)
    return folder


def _checkpoint(weights: Weights, run: Path) -> Path:
    """Downloads a checkpoint, its tokenizer and its frozen weights, as far as they are not on this
    machine anyway.
    """
    assert weights.step is not None
    step, base = run / integrity.step_folder(run, weights.step).name, weights.base
    if base is not None:
        if isinstance(base.folder, files.Url):
            _checkpoint(base, run / BASE)
        elif base.hub is not None:
            shutil.copytree(base.folder, run / BASE, dirs_exist_ok=True)
    for source, target in ((weights.tokenizer, run / "tokenizer"), (weights.folder, step)):
        for name in files.names(source):
            logger.info("%s", storage.shown(f"{source}/{name}"))
            _download(f"{source}/{name}", target / name)
    return step


def _local(path: str, folder: Path) -> str:
    """Where a file, or a pattern of files, is on this machine when it has been downloaded into
    `folder`.
    """
    return str(folder / storage.shown(path).partition("://")[2]) if storage.is_url(path) else path


def _download(url: str, path: Path, sha256: str | None = None) -> None:
    if path.exists() and path.stat().st_size == storage.size(url):
        return
    with storage.atomic_write(path) as file:
        storage.download(url, file, sha256=sha256)
