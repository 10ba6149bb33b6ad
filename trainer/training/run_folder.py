"""The files that a run writes into its folder besides checkpoints, and the services beside them."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from samestep import __version__
from samestep.config import Tree, kind_name, to_tree
from samestep.errors import MissingExtra, SamestepError
from samestep.storage import write_text
from trainer.checkpoint import integrity
from trainer.checkpoint.files import Location
from trainer.monitoring import Tracker
from trainer.monitoring.jsonl import CLASSES, JsonlTracker, read_rows
from trainer.monitoring.progress import ProgressTracker
from trainer.training.experiment import Experiment
from trainer.training.loop import Trainer

logger = logging.getLogger(__name__)

_START = ("job", "nodes", "restarts")
"""Columns of starts.jsonl in the summary of a W&B run."""


@contextmanager
def alert_on_failure(trackers: Sequence[Tracker]) -> Iterator[None]:
    """Alerts users when the run fails, through the trackers that are open by then.

    Use it while the ranks are still connected: if all of them fail alike, any one may be the first
    to end the others, and rank 0 must have sent its alert by then.
    """
    try:
        yield
    except Exception as error:
        prefix = "" if isinstance(error, SamestepError) else f"{type(error).__name__}: "
        for tracker in trackers:
            tracker.alert("ERROR", "The run has failed", f"{prefix}{error}")
        raise


def open_trackers(experiment: Experiment, driver: Trainer, fault: str | None) -> list[Tracker]:
    """Opens the run's metrics, cut back to the current step, and all that is made from them.

    Also adds this start to starts.jsonl, and alerts users to a restart or a rewind.

    Args:
        fault: reason for a rewind; None at the start of the process.
    """
    folder, step = Path(experiment.output), driver.state.step
    start = _record_start(folder, experiment, driver)
    tracking, description = experiment.tracking, to_tree(experiment)
    trackers: list[Tracker] = [JsonlTracker(folder / "metrics.jsonl", resume_step=step)]
    # Rows that a checkpoint held back may have been written before the process ended.
    driver.recorder.drop_written(read_rows(folder / "metrics.jsonl"))
    scores = folder / "scores.jsonl"
    if scores.exists():  # removes the scores of checkpoints that will be written again
        JsonlTracker(scores, resume_step=step).close()
    if tracking.tensorboard is not None:
        from trainer.monitoring.tensorboard import TensorBoardTracker

        trackers.append(TensorBoardTracker(folder, description))
    if tracking.wandb is not None:
        from trainer.monitoring.wandb import WandbTracker

        listed = partial(_checkpoints, driver.checkpoints.durable.folder)
        try:
            trackers.append(WandbTracker(tracking.wandb, folder, description, listed, start))
        except MissingExtra as error:
            if tracking.wandb.required:
                raise
            logger.warning(
                "%s. The run goes on without W&B: metrics.jsonl has every metric, and samestep "
                "sync %s sends them later. tracking.wandb=null silences this.",
                error,
                folder,
            )
    # Last, so a line on the terminal says that the row is stored.
    trackers.append(ProgressTracker(step, experiment.training.steps))
    for tracker in trackers:
        if fault is not None:
            text = (
                f"{fault}; the run continues from step {step}, without the examples around the "
                "fault"
            )
            tracker.alert("WARN", "The run has gone back", text)
        elif start["restarts"]:
            place = ", ".join(f"{name}: {value}" for name, value in start.items())
            tracker.alert("INFO", "The run was started again", f"from step {step}; {place}")
    return trackers


def _checkpoints(root: Location) -> list[str]:
    steps = integrity.committed_steps(root)
    return [str(integrity.step_folder(root, step)) for step in steps]


def sync(experiment: Experiment, root: Location) -> bool:
    """Sends the rows of metrics.jsonl that TensorBoard and W&B lack, after a run has ended.

    Args:
        root: folder of the run's checkpoints.

    Returns:
        Whether they have all of it now.
    """
    folder, tracking = Path(experiment.output), experiment.tracking
    trackers: list[Tracker] = []
    if tracking.tensorboard is not None:
        from trainer.monitoring import tensorboard

        if not tensorboard.holds(folder):
            trackers.append(tensorboard.TensorBoardTracker(folder, to_tree(experiment)))
    if tracking.wandb is not None:
        from trainer.monitoring import wandb

        steps = sorted({row["step"] for row in read_rows(folder / "metrics.jsonl")})
        saved = integrity.committed_steps(root)
        # A run that was killed may lack rows of its last step, to which W&B cannot add any.
        is_whole = not steps or (saved and steps[-1] <= saved[-1])
        most = math.inf if is_whole else max(steps[:-1], default=-1)
        if not wandb.holds(tracking.wandb, folder, most):
            start = list(read_rows(folder / "starts.jsonl"))[-1:]
            summary = {key: row[key] for row in start for key in _START if key in row}
            listed = partial(_checkpoints, root)
            trackers.append(
                wandb.WandbTracker(
                    tracking.wandb, folder, to_tree(experiment), listed, summary, most
                )
            )
    for tracker in trackers:
        tracker.close()
    sent = [tracker.complete() for tracker in trackers]
    return all(sent)


def _record_start(folder: Path, experiment: Experiment, driver: Trainer) -> dict[str, str | int]:
    """Appends this start to starts.jsonl; a rewind removes none of the earlier ones.

    Returns:
        The job and the nodes, as far as the environment names them, and the number of restarts.
    """
    start: dict[str, str | int] = {}
    if job := os.environ.get("SAMESTEP_JOB"):
        start["job"] = job
    start["nodes"] = os.environ.get("SAMESTEP_NODES") or platform.node()
    start["restarts"] = sum(1 for _ in read_rows(folder / "starts.jsonl"))
    strategy = driver.strategy
    # No row is cut off: also a start whose steps are repeated has happened.
    starts = JsonlTracker(folder / "starts.jsonl", resume_step=sys.maxsize)
    starts.log(
        driver.state.step,
        {
            "devices": f"{strategy.replica.count} x {strategy.accelerator.description}",
            "strategy": kind_name(experiment.strategy),
            "precision": experiment.training.precision,
            "micro_batch": ", ".join(str(phase.micro_batch_size) for phase in driver.phases),
            "samestep": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **start,
        },
    )
    starts.close()
    return start


def append_scores(experiment: Experiment, step: int, of: str, scores: Mapping[str, float]) -> None:
    """Appends an evaluation to scores.jsonl in the run's folder, if that is writable.

    Args:
        step: of the checkpoint.
        of: data that the checkpoint was scored on.
    """
    try:
        tracker = JsonlTracker(Path(experiment.output) / "scores.jsonl", resume_step=None)
        tracker.log(step, {"of": of, **scores})
        tracker.close()
    except SamestepError as error:  # as in the folder of somebody else's run
        logger.warning("the scores are not kept: %s", error)


def write_classes(experiment: Experiment, step: int, of: str, classes: Tree) -> None:
    """Writes the scores of each class to classes.json in the run's folder, if that is writable.

    Args:
        step, of: as for `append_scores`.
        classes: `ClassReport.tree`.
    """
    try:
        text = json.dumps({"step": step, "of": of, **classes}, indent=1)
        write_text(Path(experiment.output) / CLASSES, text + "\n")
    except SamestepError as error:
        logger.warning("the scores of classes are not kept: %s", error)
