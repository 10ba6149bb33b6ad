"""Checks whether a run could start, without starting it: no process, no memory, no GPU."""

from __future__ import annotations

import itertools
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from data_pipeline.reading.batches import check_batch
from data_pipeline.reading.concat_dataset import AnyDataset
from samestep.errors import CheckpointError, fix_of
from samestep.storage import is_url
from samestep.storage.urls import is_hub_path
from trainer.checkpoint import files, integrity
from trainer.strategies import Replica
from trainer.training import starting
from trainer.training.compose import checkpoint_folder, open_loader
from trainer.training.experiment import Experiment
from trainer.training.model import build_model, build_objectives
from trainer.training.observers.probe_rows import build_probes
from trainer.training.observers.retrieval import read as read_retrieval
from trainer.training.weights.loading import check_weights, load_config
from trainer.training.weights.teacher import build_teacher
from trainer.vectors.folder import check as check_vectors


def check(experiment: Experiment, devices: Sequence[int], elsewhere: bool = False) -> None:
    """Rejects settings that the run itself would reject, before anybody waits for its start.

    Args:
        devices: each number of devices that the run may get.
        elsewhere: the run's folders are on other machines, so only addresses can be checked.

    Raises:
        ConfigError: batch, strategy, model, objective and dataset are not compatible with each
            other or with the number of devices.
        DataError: the dataset cannot be read.
        CheckpointError: the output folder or the checkpoint folder is not writable, or there are no
            weights to start from.
    """

    def readable(path: str) -> bool:
        return is_url(path) or not elsewhere

    for number in devices:
        for phase in experiment.resolved_phases():
            check_batch(phase.global_batch_size, number)
        experiment.strategy.check_devices(number)
    if not elsewhere:
        _check_writable(Path(experiment.output), "output")
        _check_checkpoints(experiment)
    start, teacher = experiment.init_from, experiment.objective.teacher_path
    if start and readable(start) and not is_hub_path(start) and not _has_all_weights(experiment):
        check_weights(files.location(start))
    vectors = experiment.init_embeddings
    if vectors is not None and not elsewhere and not _has_all_weights(experiment):
        check_vectors(vectors)
    if isinstance(experiment.model, starting.Config):
        return  # the model is described by an `init_from` on another machine
    if teacher and readable(teacher) and not is_hub_path(teacher):
        build_teacher(experiment, load_config(teacher))
    if all(map(readable, experiment.data.paths)):
        probes = {name: each for name, each in experiment.probes.items() if readable(each.path)}
        here = replace(experiment, probes=probes)
        check_data(here, here.data.open(), sorted({min(devices), max(devices)}))


def _has_all_weights(experiment: Experiment) -> bool:
    """Whether the run has begun: it resumes from its own checkpoints, unless they lack weights."""
    if experiment.freezes:
        return False
    return bool(integrity.committed_steps(checkpoint_folder(experiment)))


def check_data(experiment: Experiment, dataset: AnyDataset, devices: Sequence[int]) -> None:
    """Checks that model, objective and batches are compatible with a dataset.

    Raises:
        ConfigError: they are not.
        DataError: the dataset cannot be read.
    """
    objectives = build_objectives(experiment, dataset)
    # This machine need not have the packages of a GPU's.
    training = replace(experiment.training, fp8=False)
    build_model(replace(experiment, training=training), dataset, objectives)
    splits = ["train"] + ["heldout"] * (experiment.training.evaluate_every is not None)
    for number, phase, split in itertools.product(devices, experiment.resolved_phases(), splits):
        open_loader(experiment, dataset, Replica(0, number), phase, split).close()
    for number in devices:
        build_probes(experiment, dataset, Replica(0, number))
    if experiment.training.retrieval is not None:
        read_retrieval(experiment, dataset)


def nearest_existing(folder: Path) -> Path:
    """Returns the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _check_writable(folder: Path, name: str) -> None:
    existing = nearest_existing(folder)
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise CheckpointError(
            f"cannot write in {existing}, which {name}={folder} needs: {error.strerror}; "
            f"{fix_of(error, 'make it writable')}, or choose another {name}"
        ) from error


def _check_checkpoints(experiment: Experiment) -> None:
    folder = checkpoint_folder(experiment)
    if isinstance(folder, Path):
        _check_writable(folder, "checkpoint.folder")
    else:
        probe = folder / f"preflight-{uuid.uuid4().hex}"
        files.write(probe, b"")
        files.remove(probe)
