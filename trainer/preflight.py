"""Whether a run could start, found out without starting it: no process, no memory, no GPU."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from data_pipeline.loader import check_batch
from data_pipeline.mixed import AnyDataset
from trainer.errors import CheckpointError
from trainer.experiment import Experiment
from trainer.run import build_model, open_loader
from trainer.storage import is_url
from trainer.strategies import Replica


def check(experiment: Experiment, devices: int, elsewhere: bool = False) -> None:
    """Refuses what the run itself would refuse on so many devices, before anybody waits for them.

    Args:
        experiment: the run.
        devices: all that it would be spread over.
        elsewhere: whether its folders are those of other machines, so that only addresses can be looked at here.

    Raises:
        ConfigError: batch, strategy, model, objective and dataset do not fit each other or the devices.
        DataError: the dataset cannot be read.
        CheckpointError: the output folder cannot be written in.
    """
    for phase in experiment.resolved_phases():
        check_batch(phase.global_batch_size, devices)
    if hasattr(experiment.strategy, "check_devices"):
        experiment.strategy.check_devices(devices)
    if not elsewhere:
        _check_output(Path(experiment.output))
    if not elsewhere or all(map(is_url, experiment.data.paths)):
        _check_data(experiment, experiment.data.open(), Replica(0, devices))


def _check_data(experiment: Experiment, dataset: AnyDataset, replica: Replica) -> None:
    objective = experiment.objective.build(dataset.tokenizer.vocabulary)
    build_model(replace(experiment, training=replace(experiment.training, compile=False)), dataset, objective)
    splits = ["train"] + ["heldout"] * (experiment.training.evaluate_every is not None)
    for phase in experiment.resolved_phases():
        for split in splits:
            open_loader(experiment, dataset, objective, replica, phase, split).close()


def _check_output(folder: Path) -> None:
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise CheckpointError(
            f"cannot write in {existing}, where output={folder} is to lie: {error.strerror}; choose another output"
        ) from error
