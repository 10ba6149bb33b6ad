"""What a run writes down as it goes: the files of its folder, and the services that show what is in them."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

import trainer
from trainer.checkpoint import integrity
from trainer.config import to_tree
from trainer.experiment import Experiment
from trainer.loop import Trainer
from trainer.monitoring import Tracker
from trainer.monitoring.jsonl import JsonlTracker
from trainer.monitoring.progress import ProgressTracker


def open_records(experiment: Experiment, driver: Trainer) -> list[Tracker]:
    """Opens the run's metrics with all that is made from them; notes this start in starts.jsonl."""
    folder, step = Path(experiment.output), driver.state.step
    _note_start(folder, experiment, driver)
    tracking, description = experiment.tracking, to_tree(experiment)
    trackers: list[Tracker] = [JsonlTracker(folder / "metrics.jsonl", resume_step=step)]
    if tracking.tensorboard is not None:
        trackers.append(tracking.tensorboard.build(folder, description))
    if tracking.wandb is not None:
        trackers.append(tracking.wandb.build(folder, description, lambda: _checkpoints(driver)))
    trackers.append(ProgressTracker(step, experiment.training.steps))
    return trackers


def _checkpoints(driver: Trainer) -> list[str]:
    checkpointer = driver.checkpointer
    return [str(integrity.step_folder(checkpointer.folder, step)) for step in checkpointer.steps()]


def _note_start(folder: Path, experiment: Experiment, driver: Trainer) -> None:
    """Adds what this start runs on to those before it, none of which is ever taken back."""
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
        },
    )
    starts.close()
