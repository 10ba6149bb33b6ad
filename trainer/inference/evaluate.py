"""`samestep evaluate RUN`: a checkpoint's scores on the held-out split, and what it predicts there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import integrity
from trainer.errors import ConfigError, SamestepError
from trainer.metrics import check_installed
from trainer.objectives import Objective, Predictions, Task
from trainer.storage import json_lines
from trainer.strategies import Strategy
from trainer.training import run_folder
from trainer.training.experiment import Experiment
from trainer.training.initial_weights import stored_values
from trainer.training.passes import score
from trainer.training.phases import phase_of
from trainer.training.run import build_model, checkpoint_folder, open_loader, open_strategy
from trainer.training.teacher import attach_teacher
from trainer.training.weights import load_weights


def evaluate(
    experiment: Experiment, step: int | None, predictions: Path | None = None
) -> dict[str, float]:
    """Scores a checkpoint of a run on the held-out documents; see `run_folder.append_scores`.

    Args:
        experiment: of the run.
        step: that of the checkpoint; None means the newest.
        predictions: a new file for what is predicted of each row of a task; None writes none.

    Raises:
        CheckpointError: the run has no checkpoint.
        ConfigError: the file's name will not do, or the objective predicts nothing of whole rows.
        StorageError: the file cannot be written; the scores are kept.
        SamestepError: a device's memory ran out.
    """
    with open_strategy(experiment) as strategy:
        try:
            return _evaluate(experiment, step, predictions, strategy)
        except torch.OutOfMemoryError as error:
            raise SamestepError(
                f"the memory of {strategy.accelerator.description} is used up: {error}; evaluate in smaller "
                "micro-batches, as with training.micro_batch_size=1 (phases.0.micro_batch_size=1 where there are "
                "phases), or on more devices"
            ) from error


def _evaluate(
    experiment: Experiment, step: int | None, file: Path | None, strategy: Strategy
) -> dict[str, float]:
    check_installed(experiment.objective.task.metrics)
    dataset = experiment.data.open()
    objective = experiment.objective.build(dataset.tokenizer.vocabulary)
    if (
        file is not None and strategy.world.rank == 0
    ):  # the one that writes it, perhaps on a disk of its own
        _check_predictions(objective, file)
    checkpoints = checkpoint_folder(experiment)
    source = checkpoints if step is None else integrity.step_folder(checkpoints, step)
    weights = load_weights(source, strategy.world.rank, strategy.world.size)
    model = build_model(experiment, dataset, objective)
    # The optimizer that comes with it has no state yet, and so takes no memory.
    with strategy.accelerator.graph("start"):
        values = stored_values(weights, model, dataset)
        wrapped, _ = strategy.prepare(model, experiment.optimizer.build, values)
    attach_teacher(experiment, dataset, objective, strategy)
    assert weights.step is not None
    phase = phase_of(experiment.resolved_phases(), weights.step - 1)
    heldout = open_loader(
        experiment,
        dataset,
        objective,
        strategy.replica,
        phase,
        split="heldout",
        largest=strategy.largest,
    )
    scores, predictions = score(
        wrapped, objective, strategy, heldout, experiment.training.evaluate_batches
    )
    if strategy.world.rank == 0:
        run_folder.append_scores(
            experiment, weights.step, dataset.name, {f"heldout/{k}": v for k, v in scores.items()}
        )
        if file is not None and isinstance(objective, Task) and predictions is not None:
            json_lines.write(file, _rows(objective, predictions))
    return {"step": weights.step, **scores}


def _check_predictions(objective: Objective, file: Path) -> None:
    if not isinstance(objective, Task):
        raise ConfigError(
            "--predictions writes what a head predicts of each row of a task, and this run's objective has none; leave "
            "it out: samestep generate writes texts, samestep fill fills masks"
        )
    json_lines.check_new(file, "--predictions")


def _rows(objective: Task, predictions: Predictions) -> Iterator[dict[str, Any]]:
    """A line for each row: its number in the split, its texts, what is right and what is predicted."""
    of_rows = objective.row_predictions(predictions)
    for number, row, found in zip(
        predictions.number.tolist(), predictions.rows, of_rows, strict=True
    ):
        yield {"row": number, "texts": row.texts, **found}
