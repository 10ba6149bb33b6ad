"""`samestep evaluate RUN`: a checkpoint's scores and predictions on the held-out split."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import integrity
from trainer.errors import ConfigError, SamestepError
from trainer.metrics import check_installed
from trainer.objectives import Predictions, Task
from trainer.progress import Progress
from trainer.storage import json_lines
from trainer.strategies import Strategy
from trainer.training import run_folder
from trainer.training.experiment import Experiment
from trainer.training.initial_weights import stored_values
from trainer.training.passes import evaluation_batches, score
from trainer.training.phases import phase_of
from trainer.training.run import (
    build_model,
    build_objectives,
    checkpoint_folder,
    open_loader,
    open_strategy,
)
from trainer.training.teacher import attach_teacher
from trainer.training.weights import load_weights


def evaluate(
    experiment: Experiment, step: int | None, predictions: Path | None = None
) -> dict[str, float]:
    """Scores a checkpoint of a run on the held-out split, and appends to RUN/scores.jsonl.

    Args:
        experiment: the run.
        step: step of the checkpoint; None is the newest.
        predictions: a new JSON Lines file for the predictions of each row of a task; None writes
            none.

    Raises:
        CheckpointError: the run has no checkpoint.
        ConfigError: the file cannot be written, or the objective has no predictions for rows.
        StorageError: writing the file failed; the scores are kept.
        SamestepError: the device ran out of memory.
    """
    with open_strategy(experiment) as strategy:
        try:
            return _evaluate(experiment, step, predictions, strategy)
        except torch.OutOfMemoryError as error:
            raise SamestepError(
                f"{strategy.accelerator.description} ran out of memory: {error}; use smaller "
                "micro-batches, as with training.micro_batch_size=1 (with phases, "
                "phases.0.micro_batch_size=1), or more devices"
            ) from error


def _evaluate(
    experiment: Experiment, step: int | None, file: Path | None, strategy: Strategy
) -> dict[str, float]:
    # What can fail early comes first: metrics need packages, and the file a writable place.
    for phase in experiment.resolved_phases():
        check_installed(phase.objective.task.metrics)
    is_writer = strategy.world.rank == 0
    dataset = experiment.data.open()
    objectives = build_objectives(experiment, dataset)
    if file is not None and is_writer:
        if not any(isinstance(objective, Task) for objective in objectives):
            raise ConfigError(
                "--predictions needs a run of a task, whose head predicts something for each row; "
                "leave it out (samestep generate writes texts, samestep fill fills masks)"
            )
        json_lines.check_new(file, "--predictions")
    checkpoints = checkpoint_folder(experiment)
    source = checkpoints if step is None else integrity.step_folder(checkpoints, step)
    weights = load_weights(source, strategy.world.rank, strategy.world.size)
    assert weights.step is not None
    model = build_model(experiment, dataset, objectives)
    # The optimizer allocates its state at its first step, so it takes no memory here.
    with strategy.accelerator.graph("start"):
        values = stored_values(weights, model, dataset)
        wrapped, _ = strategy.prepare(model, experiment.optimizer.build, values)
    attach_teacher(experiment, dataset, objectives, strategy)
    # Length and objective are those of the last step before the checkpoint.
    phase = phase_of(experiment.resolved_phases(), weights.step - 1)
    objective = objectives[phase.index]
    heldout = open_loader(
        experiment,
        dataset,
        strategy.replica,
        phase,
        split="heldout",
        largest=strategy.largest,
    )
    # As many batches as in training, so that the scores can be compared with its own.
    batches = experiment.training.evaluate_batches
    total = evaluation_batches(heldout, phase.global_batch_size, batches)
    # All ranks do the same work, so one of them shows it.
    with Progress("evaluating", total if is_writer else None) as progress:
        scores, predictions = score(
            wrapped, objective, strategy, heldout, batches, progress=progress
        )
    # All ranks have the same scores; one of them writes.
    if is_writer:
        stored = {f"heldout/{name}": value for name, value in scores.items()}
        run_folder.append_scores(experiment, weights.step, dataset.name, stored)
        if file is not None and isinstance(objective, Task) and predictions is not None:
            json_lines.write(file, _lines(objective, predictions))
    return {"step": weights.step, **scores}


def _lines(objective: Task, predictions: Predictions) -> Iterator[dict[str, Any]]:
    """A line for each row: its number in the split, its texts, its label and its prediction."""
    numbers, found = predictions.number.tolist(), objective.row_predictions(predictions)
    for number, row, prediction in zip(numbers, predictions.rows, found, strict=True):
        yield {"row": number, "texts": row.texts, **prediction}
