"""Whether a run could start, found out without starting it: no process, no memory, no GPU."""

from __future__ import annotations

import itertools
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from data_pipeline.reading.batches import check_batch
from data_pipeline.reading.mixed_dataset import AnyDataset
from trainer.checkpoint import files, integrity
from trainer.errors import CheckpointError
from trainer.storage import is_url
from trainer.storage.hub import is_hub_path
from trainer.strategies import Replica
from trainer.training import starting
from trainer.training.experiment import Experiment
from trainer.training.run import build_model, checkpoint_folder, open_loader
from trainer.training.teacher import build_teacher
from trainer.training.weights import check_weights, load_config


def check(experiment: Experiment, devices: Sequence[int], elsewhere: bool = False) -> None:
    """Refuses what the run itself would refuse, before anybody waits for it to start.

    Args:
        experiment: the run.
        devices: each number of them that it may be spread over.
        elsewhere: whether its folders are those of other machines, so that only addresses can be
            looked at here.

    Raises:
        ConfigError: batch, strategy, model, objective and dataset do not fit each other or the
            devices.
        DataError: the dataset cannot be read.
        CheckpointError: the output folder or that of checkpoints cannot be written in, or there are
            no weights to start from.
    """
    for number in devices:
        for phase in experiment.resolved_phases():
            check_batch(phase.global_batch_size, number)
        experiment.strategy.check_devices(number)
    if not elsewhere:
        _check_output(Path(experiment.output), "output")
        _check_checkpoints(experiment)
    start = experiment.init_from
    seen = start is not None and not is_hub_path(start) and (not elsewhere or is_url(start))
    # A run that has begun goes on from its own checkpoints, which leave out what is frozen.
    if (
        start
        and seen
        and (experiment.freezes or not integrity.committed_steps(checkpoint_folder(experiment)))
    ):
        check_weights(files.location(start))
    told, teacher = (
        not isinstance(experiment.model, starting.Config),
        experiment.objective.teacher_path,
    )
    if (
        told
        and teacher is not None
        and not is_hub_path(teacher)
        and (not elsewhere or is_url(teacher))
    ):
        build_teacher(experiment, load_config(teacher))
    if told and (not elsewhere or all(map(is_url, experiment.data.paths))):
        _check_data(experiment, experiment.data.open(), sorted({min(devices), max(devices)}))


def _check_data(experiment: Experiment, dataset: AnyDataset, devices: Sequence[int]) -> None:
    objective = experiment.objective.build(dataset.tokenizer.vocabulary)
    build_model(
        replace(experiment, training=replace(experiment.training, compile=False)),
        dataset,
        objective,
    )
    splits = ["train"] + ["heldout"] * (experiment.training.evaluate_every is not None)
    for number, phase, split in itertools.product(devices, experiment.resolved_phases(), splits):
        open_loader(experiment, dataset, objective, Replica(0, number), phase, split).close()


def _check_output(folder: Path, name: str) -> None:
    existing = next(
        place for place in (folder.absolute(), *folder.absolute().parents) if place.exists()
    )
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise CheckpointError(
            f"cannot write in {existing}, where {name}={folder} is to lie: {error.strerror}; "
            f"choose another {name}"
        ) from error


def _check_checkpoints(experiment: Experiment) -> None:
    folder = checkpoint_folder(experiment)
    if isinstance(folder, Path):
        _check_output(folder, "checkpoint.folder")
    else:
        probe = folder / f"preflight-{uuid.uuid4().hex}"
        files.write(probe, b"")
        files.remove(probe)
