"""What a run writes down as it goes: the files of its folder, and the services that show what is in them."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

import trainer
from trainer.checkpoint import integrity
from trainer.config import to_tree
from trainer.errors import SamestepError
from trainer.monitoring import Tracker
from trainer.monitoring.jsonl import JsonlTracker, read_rows
from trainer.monitoring.progress import ProgressTracker
from trainer.training.experiment import Experiment
from trainer.training.loop import Trainer

logger = logging.getLogger(__name__)


@contextmanager
def failures_told(trackers: Sequence[Tracker]) -> Iterator[None]:
    """Tells people why a run fails, through the trackers that are open by then.

    Inside the meeting of the ranks: where all fail alike, any of them may be the one that ends the others.
    """
    try:
        yield
    except Exception as error:
        text = (
            str(error) if isinstance(error, SamestepError) else f"{type(error).__name__}: {error}"
        )
        for tracker in trackers:
            tracker.alert("ERROR", "The run has failed", text)
        raise


def open_records(experiment: Experiment, driver: Trainer, fault: str | None) -> list[Tracker]:
    """Opens the run's metrics with all that is made from them; notes this start in starts.jsonl, and tells people.

    Args:
        experiment: the run's.
        driver: stands where training continues.
        fault: what it has just gone back for; None at the start of the process.
    """
    folder, step = Path(experiment.output), driver.state.step
    start = _note_start(folder, experiment, driver)
    tracking, description = experiment.tracking, to_tree(experiment)
    trackers: list[Tracker] = [JsonlTracker(folder / "metrics.jsonl", resume_step=step)]
    if (scores := folder / "scores.jsonl").exists():  # those of checkpoints that will be made again
        JsonlTracker(scores, resume_step=step).close()
    if tracking.tensorboard is not None:
        trackers.append(tracking.tensorboard.build(folder, description))
    if tracking.wandb is not None:
        trackers.append(
            tracking.wandb.build(folder, description, lambda: _checkpoints(driver), start)
        )
    trackers.append(ProgressTracker(step, experiment.training.steps))
    for tracker in trackers:
        if fault is not None:
            text = (
                f"{fault}; the run goes on from step {step}, without the examples around the fault"
            )
            tracker.alert("WARN", "The run has gone back", text)
        elif start["restarts"]:
            said = ", ".join(f"{name}: {value}" for name, value in start.items())
            tracker.alert("INFO", "The run was started again", f"from step {step}; {said}")
    return trackers


def _checkpoints(driver: Trainer) -> list[str]:
    checkpointer = driver.checkpoints.durable
    return [str(integrity.step_folder(checkpointer.folder, step)) for step in checkpointer.steps()]


def _note_start(folder: Path, experiment: Experiment, driver: Trainer) -> dict[str, str | int]:
    """Adds what this start runs on to those before it, none of which is ever taken back.

    Returns:
        Where it runs, as far as the environment says, and the number of starts before it.
    """
    start: dict[str, str | int] = {"job": job} if (job := os.environ.get("SAMESTEP_JOB")) else {}
    start["nodes"] = os.environ.get("SAMESTEP_NODES") or platform.node()
    start["restarts"] = sum(1 for _ in read_rows(folder / "starts.jsonl"))
    starts = JsonlTracker(folder / "starts.jsonl", resume_step=sys.maxsize)
    starts.log(
        driver.state.step,
        {
            "devices": f"{driver.strategy.replica.count} x {driver.strategy.accelerator.description}",
            "strategy": type(experiment.strategy).__module__.rpartition(".")[2],
            "precision": experiment.training.precision,
            "micro_batch": ", ".join(str(phase.micro_batch_size) for phase in driver.phases),
            "samestep": trainer.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **start,
        },
    )
    starts.close()
    return start


def append_scores(experiment: Experiment, step: int, of: str, scores: Mapping[str, float]) -> None:
    """Appends the scores of an evaluation to scores.jsonl in the folder of the run, if that can be written.

    Args:
        experiment: of the run.
        step: of the checkpoint.
        of: what it was scored on.
        scores: by name.
    """
    try:
        tracker = JsonlTracker(Path(experiment.output) / "scores.jsonl", resume_step=None)
        tracker.log(step, {"of": of, **scores})
        tracker.close()
    except SamestepError as error:  # as in the folder of somebody else's run
        logger.warning("the scores are not kept: %s", error)
