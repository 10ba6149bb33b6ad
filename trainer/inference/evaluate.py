"""`samestep evaluate RUN`: scores and predictions of a checkpoint on the held-out split.

Also of a checkpoint with the encoder of another one, and of an ensemble of runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from data_pipeline.reading.concat_dataset import AnyDataset, sources_of
from samestep.errors import ConfigError, SamestepError
from samestep.progress import Progress
from samestep.storage import json_lines
from trainer.checkpoint import integrity
from trainer.metrics import check_installed
from trainer.metrics.per_class import ClassReport
from trainer.objectives import Objective, Predictions, Task
from trainer.strategies import Strategy
from trainer.training import run_folder
from trainer.training.compose import checkpoint_folder, open_loader, open_strategy
from trainer.training.compute.fused_attention import fuse_attention
from trainer.training.evaluation import Evaluation, score
from trainer.training.experiment import Experiment
from trainer.training.model import build_model, build_objectives
from trainer.training.passes import evaluation_batches
from trainer.training.phases import phase_of
from trainer.training.weights.initial import stored_values, with_encoder
from trainer.training.weights.loading import Weights, load_weights
from trainer.training.weights.teacher import attach_teacher

Step: TypeAlias = int | Literal["best"] | None


@dataclass(frozen=True)
class Member:
    """A checkpoint to score.

    Attributes:
        experiment: its run.
        step: step of the checkpoint; None is the newest, "best" the best by `training.best`.
    """

    experiment: Experiment
    step: Step = None

    def load(self, rank: int = 0, world_size: int = 1) -> Weights:
        """Opens the checkpoint; of several ranks, collectively."""
        # A run's folder may hold a best checkpoint too; the newest is meant unless a step is named.
        folder = checkpoint_folder(self.experiment)
        if self.step == "best":
            folder = folder / "best"
        elif self.step is not None:
            folder = integrity.step_folder(folder, self.step)
        return load_weights(folder, rank, world_size)


@dataclass(frozen=True)
class _Scored:
    """A member's scores, and the predictions behind them."""

    step: int
    dataset: AnyDataset
    objective: Objective
    evaluation: Evaluation


def evaluate(
    experiment: Experiment,
    step: Step,
    predictions: Path | None = None,
    encoder: str | None = None,
    ensemble: Sequence[Member] = (),
) -> dict[str, float]:
    """Scores a checkpoint of a run; see `evaluate_in_detail`."""
    return evaluate_in_detail(experiment, step, predictions, encoder, ensemble).scores


class Evaluated(NamedTuple):
    """The result of `samestep evaluate`.

    Attributes:
        scores: by name, `step` among them.
        classes: scores of each class; None for tasks without any.
    """

    scores: dict[str, float]
    classes: ClassReport | None


def evaluate_in_detail(
    experiment: Experiment,
    step: Step,
    predictions: Path | None = None,
    encoder: str | None = None,
    ensemble: Sequence[Member] = (),
) -> Evaluated:
    """Scores a checkpoint of a run, or an ensemble of several, on the held-out split.

    The scores of a checkpoint as it is are also appended to RUN/scores.jsonl, and the scores of
    each class written to RUN/classes.json.

    Args:
        experiment: the run.
        step: step of the checkpoint; None is the newest, "best" the best by `training.best`.
        predictions: a new JSON Lines file for the predictions of each row of a task; None writes
            none.
        encoder: other trained weights, as `load_weights` opens them, that replace all parameters
            outside of the heads; None keeps them.
        ensemble: checkpoints of other runs of the same task. Scores are of the combined outputs of
            all; see `Task.combined`.

    Raises:
        CheckpointError: a run has no checkpoint, or the encoder is of another architecture.
        ConfigError: the file cannot be written, the objective has no predictions for rows, or the
            runs of the ensemble are of different tasks.
        StorageError: writing the file failed; the scores are kept.
        SamestepError: the device ran out of memory.
    """
    members = [
        replace(member, experiment=_in_bf16(member.experiment))
        for member in (Member(experiment, step), *ensemble)
    ]
    experiment = members[0].experiment
    with open_strategy(experiment) as strategy:
        try:
            return _evaluate(members, predictions, encoder, strategy)
        except torch.OutOfMemoryError as error:
            raise SamestepError(
                f"{strategy.accelerator.description} ran out of memory: {error}; use smaller "
                "micro-batches, as with training.micro_batch_size=1 (with phases, "
                "phases.0.micro_batch_size=1), or more devices"
            ) from error


def _in_bf16(experiment: Experiment) -> Experiment:
    """The same run without 8-bit products, so that every device can evaluate it."""
    return replace(experiment, training=replace(experiment.training, fp8=False))


def _evaluate(
    members: Sequence[Member], file: Path | None, encoder: str | None, strategy: Strategy
) -> Evaluated:
    is_writer = strategy.world.rank == 0
    for member in members:
        _check(member.experiment, file is not None, ensemble=len(members) > 1)
    if file is not None and is_writer:
        json_lines.check_new(file, "--predictions")
    # One after the other: only one model is in memory.
    found = [_score(member, encoder, strategy) for member in members]
    first, scores = found[0], found[0].evaluation.scores
    predictions = first.evaluation.predictions
    if len(found) > 1:
        assert isinstance(first.objective, Task)
        predictions = _combined(members, first.objective, [each.evaluation for each in found])
        scores = first.objective.scores(predictions)
    classes = None
    if isinstance(first.objective, Task) and predictions is not None:
        classes = first.objective.class_report(predictions)
    # All ranks have the same scores; one of them writes.
    if is_writer:
        # The run's own file has no scores of other weights.
        if len(members) == 1 and encoder is None:
            stored = {f"heldout/{name}": value for name, value in scores.items()}
            name = first.dataset.name
            run_folder.append_scores(members[0].experiment, first.step, name, stored)
            if classes is not None:
                run_folder.write_classes(members[0].experiment, first.step, name, classes.tree())
        if file is not None and isinstance(first.objective, Task) and predictions is not None:
            places = _places(first.dataset)
            json_lines.write(file, _lines(first.objective, predictions, places))
    return Evaluated({"step": first.step, **scores}, classes)


def _check(experiment: Experiment, predicts: bool, ensemble: bool) -> None:
    """Fails before any work if a metric's package, or the task that an option needs, is missing."""
    for phase in experiment.resolved_phases():
        check_installed(phase.objective.task.metrics)
    if not predicts and not ensemble:
        return
    objectives = build_objectives(experiment, experiment.data.open())
    if not any(isinstance(objective, Task) for objective in objectives):
        option = "--predictions needs" if predicts else "--ensemble needs"
        raise ConfigError(
            f"{option} a run of a task, whose head predicts something for each row, and "
            f"{experiment.output} is none; leave it out (samestep generate writes texts, samestep "
            "fill fills masks)"
        )


def _score(member: Member, encoder: str | None, strategy: Strategy) -> _Scored:
    """Scores a checkpoint. Collective."""
    experiment = member.experiment
    dataset = experiment.data.open()
    objectives = build_objectives(experiment, dataset)
    world = strategy.world
    weights = member.load(world.rank, world.size)
    step = weights.step
    assert step is not None
    if encoder is not None:
        weights = with_encoder(weights, load_weights(encoder, world.rank, world.size))
    model = build_model(experiment, dataset, objectives, strategy.accelerator)
    fuse_attention(model, strategy.accelerator, experiment.training.precision, world.size)
    # The optimizer allocates its state at its first step, so it takes no memory here.
    with strategy.accelerator.graph("start"):
        values = stored_values(weights, model, dataset)
        wrapped, _ = strategy.prepare(model, experiment.optimizer.build, values)
    if (name := experiment.objective.teacher_path) is not None:
        attach_teacher(name, experiment, dataset, objectives, strategy)
    # Length and objective of the last step before the checkpoint.
    phase = phase_of(experiment.resolved_phases(), step - 1)
    objective = objectives[phase.index]
    heldout = open_loader(
        experiment,
        dataset,
        strategy.replica,
        phase,
        split="heldout",
        world=strategy.world,
    )
    # As many batches as in training, so that the scores can be compared with its own.
    batches = experiment.training.evaluate_batches
    total = evaluation_batches(heldout, phase.global_batch_size, batches)
    # All ranks do the same work, so one of them shows it.
    with Progress("evaluating", total if world.rank == 0 else None) as progress:
        evaluation = score(wrapped, objective, strategy, heldout, batches, progress=progress)
    return _Scored(step, dataset, objective, evaluation)


def _combined(
    members: Sequence[Member], objective: Task, evaluations: Sequence[Evaluation]
) -> Predictions:
    """The predictions of an ensemble.

    Raises:
        ConfigError: the members have not predicted the same for the same rows.
    """
    found = [each.predictions for each in evaluations]
    assert found[0] is not None
    first, outputs = _in_order(found[0]), []
    for member, predictions in zip(members, found, strict=True):
        each = None if predictions is None else _in_order(predictions)
        if each is None or not _comparable(each, first):
            raise ConfigError(
                f"{member.experiment.output} predicts other labels or rows than "
                f"{members[0].experiment.output}. An ensemble needs runs of one task, with the "
                "same tokenizer, sequence_length and held-out rows; with "
                "training.evaluate_batches=null, all rows are scored"
            )
        outputs.append(each.outputs)
    return replace(first, outputs=objective.combined(outputs))


def _in_order(found: Predictions) -> Predictions:
    """The examples in the order of the rows; runs of other seeds have them in other orders."""
    order = np.lexsort((found.begin, found.number[found.document]))
    return replace(
        found,
        outputs=found.outputs[order],
        document=found.document[order],
        begin=found.begin[order],
        column=found.column[order],
        length=found.length[order],
    )


def _comparable(one: Predictions, other: Predictions) -> bool:
    """Whether outputs at the same place are of the same tokens of the same row."""
    return (
        one.labels == other.labels
        and one.outputs.shape == other.outputs.shape
        and np.array_equal(one.document, other.document)
        and np.array_equal(one.begin, other.begin)
        and np.array_equal(one.column, other.column)
        and np.array_equal(one.length, other.length)
        and [row.texts for row in one.rows] == [row.texts for row in other.rows]
    )


def _places(dataset: AnyDataset) -> list[tuple[str, int]]:
    """File and line of each held-out row, in the order of `Predictions.number`."""
    # Shards store the origin of each row, so rows that a build has rejected leave no trace here.
    found: list[tuple[str, int]] = []
    for source in sources_of(dataset, "heldout", single_pass=True).values():
        for info in source.shards("heldout"):
            origin = source.read_index(info).origin.tolist()
            found += [(source.manifest.files[file], line) for file, line in origin]
    return found


def _lines(
    objective: Task, predictions: Predictions, places: Sequence[tuple[str, int]]
) -> Iterator[dict[str, object]]:
    """A line for each row: its number in the split, where it is from, its texts, its label and its
    prediction.
    """
    numbers, found = predictions.number.tolist(), objective.row_predictions(predictions)
    for number, row, prediction in zip(numbers, predictions.rows, found, strict=True):
        file, line = places[number]
        yield {"row": number, "file": file, "line": line, "texts": row.texts, **prediction}
