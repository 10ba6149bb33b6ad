"""The facts that decide a run's numbers and must be equal on all of its machines.

Settings that may differ between machines are left out: folders, caches, threads, time limits and
reports. Of data and weights, the content is compared instead of the path.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from data_pipeline.order.example_order import ORDER_VERSION
from data_pipeline.packing import PACKING_VERSION
from data_pipeline.reading.dataset import load_manifest
from samestep import __version__
from samestep.config import to_tree
from samestep.errors import SamestepError, UnreachableError
from samestep.untrusted import regular
from trainer.checkpoint import integrity
from trainer.checkpoint.files import Location
from trainer.checkpoint.meta import newest_meta
from trainer.training.experiment import Experiment
from trainer.training.weights.places import checkpoints_of, is_step, resolve

logger = logging.getLogger(__name__)

_MAY_DIFFER = re.compile(
    r"output|tracking\..*|checkpoint\.folder|accelerator\.threads"
    r"|data\.(path|sources\.\d+\.path|cache|cache_size|threads|prefetch)"
    r"|(probes\.[^.]+|training\.retrieval)\.path|init_from|init_embeddings"
    r"|objective\.(teacher|guide\.path)"
    r"|training\.(collective_timeout|hang_timeout|preemption\..*)"
)
# With data.on_corrupt=skip, ranks number the blocks that their threads make ahead.
_OF_BLOCKS = ("data.threads", "data.prefetch")
_DESCRIPTIONS = ("config.json", "adapter_config.json")
_MOST_SHOWN = 80  # characters of a value
_SAMPLES, _SAMPLE_BYTES = 16, 2**16  # of each file of weights


def facts_of(experiment: Experiment, checkpoints: Location) -> dict[str, str | None]:
    """Returns the facts of this machine, by name.

    Args:
        checkpoints: of the run. Once there is one, the weights that it began with do not matter.
    """
    facts: dict[str, str | None] = {
        "samestep": __version__,
        "torch": torch.__version__,
        "version of the data order": str(ORDER_VERSION),
        "version of packing": str(PACKING_VERSION),
    }
    for name, value in _settings("", to_tree(experiment)):
        is_shared = name in _OF_BLOCKS and experiment.data.on_corrupt == "skip"
        if is_shared or not _MAY_DIFFER.fullmatch(name):
            facts[name] = _shown(value)
        # Code outside this package has no version, so its file is compared.
        if name.rpartition(".")[2] == "kind" and "." in str(value):
            facts[f"code of {value}"] = _sampled(Path(str(sys.modules[str(value)].__file__)))
    for name, digest, path in _contents(experiment, checkpoints):
        try:
            facts[f"content of {name}"] = digest(path)
        except UnreachableError:  # the store may answer when the run reads it
            facts[f"content of {name}"] = None
        except (SamestepError, OSError) as error:
            # Without its text, which names a path: if no machine can read it, the run says why.
            logger.warning("content of %s: %s", name, error)
            facts[f"content of {name}"] = "unreadable"
    return facts


def _settings(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields the values of a tree by dotted name; sections in lists are numbered from 0."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        value = {str(number): item for number, item in enumerate(value)}
    if not isinstance(value, dict):
        yield prefix, value
        return
    for key, item in value.items():
        yield from _settings(f"{prefix}.{key}" if prefix else str(key), item)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[:_MOST_SHOWN]}... ({_hash(text)})"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _contents(
    experiment: Experiment, checkpoints: Location
) -> Iterator[tuple[str, Callable[[str], str | None], str]]:
    """Yields settings that locate data or weights, each with a function for its digest."""
    data = experiment.data
    if data.path is not None:
        yield "data.path", _dataset, data.path
    for number, source in enumerate(data.sources):
        yield f"data.sources.{number}.path", _dataset, source.path
    for name, probe in experiment.probes.items():
        yield f"probes.{name}.path", _dataset, probe.path
    if (retrieval := experiment.training.retrieval) is not None:
        judged = partial(_collection, retrieval.split)
        yield "training.retrieval.path", judged, retrieval.path
    if (teacher := experiment.objective.teacher_path) is not None:
        yield f"objective.{experiment.objective.teacher_setting}", _weights, teacher
    starts = {"init_from": experiment.init_from, "init_embeddings": experiment.init_embeddings}
    for name, path in starts.items():
        if path is None:
            continue
        digest = _weights if name == "init_from" else _tensor_files
        yield name, digest if experiment.freezes else partial(_at_start, digest, checkpoints), path


def _at_start(digest: Callable[[str], str], checkpoints: Location, path: str) -> str | None:
    """The digest of initial weights, unless the run has a checkpoint and no longer needs them."""
    return None if integrity.committed_steps(checkpoints) else digest(path)


def _dataset(location: str) -> str:
    """A digest of the shards, the tokenizer and the labels of a dataset, from its manifest."""
    manifest = load_manifest(location.rstrip("/"))
    labels = None if manifest.task is None else manifest.task.labels
    return _hash(json.dumps([manifest.digest, labels]))


def _collection(split: str, folder: str) -> str:
    """A digest of documents, queries and judgments."""
    from trainer.training.retrieval.collection import files_of

    return _sampled(*files_of(Path(folder), split))


def _weights(location: str) -> str:
    """A digest that tells weights from others without reading all of them.

    A run may have newer checkpoints a moment later, and rank 0 decides which one counts. So the
    record of its start identifies a run.
    """
    folder = resolve(location)
    if isinstance(folder, Path) and any((folder / name).is_file() for name in _DESCRIPTIONS):
        return _tensor_files(str(folder))
    if is_step(folder) and Path(location).name != "best":
        return integrity.identity(folder)[:12]
    root = folder.parent if is_step(folder) else checkpoints_of(folder)
    return _hash(json.dumps(newest_meta(root).get("start")))


def _tensor_files(folder: str) -> str:
    names = {*_DESCRIPTIONS, "*.safetensors", "*.bin"}
    paths = sorted(path for name in names for path in Path(folder).glob(name))
    if not paths:
        raise FileNotFoundError(f"{folder} has no weights")
    return _sampled(*paths)


def _sampled(*paths: Path) -> str:
    """A digest of the sizes of files and of samples of each: fast for gigabytes."""
    digest = hashlib.sha256()
    for path in paths:
        size = regular(path).stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                # The samples of a small file overlap, and together cover it.
                file.seek(number * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]
