"""The composition root: an experiment becomes objects, and a Trainer that drives them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from data_pipeline.dataset import Dataset
from data_pipeline.loader import StreamingLoader
from trainer import accelerators
from trainer.checkpoint.manager import Checkpointer
from trainer.config import dump, to_tree
from trainer.errors import CheckpointError, ConfigError
from trainer.experiment import Experiment
from trainer.loop import Trainer
from trainer.monitoring import Tracker
from trainer.monitoring.jsonl import JsonlTracker
from trainer.monitoring.progress import ProgressTracker
from trainer.monitoring.throughput import Throughput
from trainer.objectives import Objective
from trainer.strategies import InitialValues, Replica, Strategy
from trainer.strategies.world import World
from trainer.weights import load_weights

logger = logging.getLogger(__name__)


def train(experiment: Experiment) -> None:
    """Runs an experiment to its end, from its newest checkpoint if it has one."""
    with _meeting(experiment) as strategy:
        dataset = Dataset.open(experiment.data.path)
        trainer = build_trainer(experiment, dataset, strategy)
        try:
            step = trainer.checkpointer.latest()
            if step is not None:
                trainer.restore(step)
            if strategy.replica.index == 0:
                _prepare_folder(experiment, dataset)
                _report(experiment, trainer)
                trainer.trackers = _open_trackers(experiment, trainer.state.step)
                trainer.ledger = JsonlTracker(Path(experiment.output) / "ledger.jsonl", trainer.state.step)
            trainer.throughput = _throughput(experiment, trainer)
            trainer.fit()
        finally:
            trainer.loader.close()
            for tracker in trainer.trackers:
                tracker.close()


def evaluate(experiment: Experiment, step: int | None) -> dict[str, float]:
    """Scores a checkpoint of a run (the newest by default) on the held-out documents.

    Raises:
        CheckpointError: the run has no checkpoint.
    """
    with _meeting(experiment) as strategy:
        trainer = build_trainer(experiment, Dataset.open(experiment.data.path), strategy)
        step = trainer.checkpointer.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"{experiment.output} has no checkpoint to evaluate; train it first")
        trainer.restore(step)
        trainer.loader.close()
        return {"step": step, **trainer.evaluate()}


@contextmanager
def _meeting(experiment: Experiment) -> Iterator[Strategy]:
    """Meets the other processes; leaves them in an orderly way, or tells them why this one fails."""
    accelerator = experiment.accelerator.build() if experiment.accelerator else accelerators.detect()
    world = World.start(accelerator.collective_backend, experiment.training.collective_timeout)
    try:
        strategy: Strategy = experiment.strategy.build(accelerator, world)
        yield strategy
        world.close()
    except BaseException as error:
        world.failed(error)
        raise


def build_trainer(experiment: Experiment, dataset: Dataset, strategy: Strategy) -> Trainer:
    """Makes every part of a run and hands them to a Trainer that stands at step 0.

    Raises:
        ConfigError: the parts do not fit each other.
    """
    settings = experiment.training
    objective = experiment.objective.build(dataset.tokenizer.vocabulary)
    with torch.device("meta"):
        model: Any = experiment.model.build()
    _check_fit(experiment, dataset, model)
    model.activation_checkpointing = settings.activation_checkpointing
    if settings.compile:
        for unit in model.sharding_units():
            unit.compile()
    initial = _initial_values(experiment, model)
    wrapped, optimizer = strategy.prepare(model, experiment.optimizer.build, initial)
    return Trainer(
        settings,
        model=wrapped,
        optimizer=optimizer,
        objective=objective,
        strategy=strategy,
        lr=experiment.optimizer.lr,
        schedule=experiment.schedule,
        loader=open_loader(experiment, dataset, objective, strategy.replica),
        heldout=lambda: open_loader(experiment, dataset, objective, strategy.replica, split="heldout"),
        checkpointer=Checkpointer(
            Path(experiment.output) / "checkpoints",
            experiment.checkpoint,
            rank=strategy.world.rank,
            world_size=strategy.world.size,
        ),
        checkpoint_every=experiment.checkpoint.every,
        description={"config": to_tree(experiment)},
    )


def open_loader(
    experiment: Experiment, dataset: Dataset, objective: Objective, replica: Replica, split: str = "train"
) -> StreamingLoader:
    """The batches of a split: endless ones for training, a single pass over the held-out documents."""
    return StreamingLoader(
        dataset,
        experiment.data,
        split=split,
        pack_spec=objective.pack_spec(experiment.data.sequence_length),
        collate=objective.collate,
        seed=experiment.seed,
        global_batch_size=experiment.training.global_batch_size,
        micro_batch_size=experiment.training.micro_batch_size,
        replica=replica,
        finite=split == "heldout",
    )


def _check_fit(experiment: Experiment, dataset: Dataset, model: Any) -> None:
    vocabulary, length = dataset.tokenizer.vocabulary.size, experiment.data.sequence_length
    if vocabulary > experiment.model.vocab_size:
        raise ConfigError(
            f"the dataset {experiment.data.path} has a vocabulary of {vocabulary} and model.vocab_size is "
            f"{experiment.model.vocab_size}; set model.vocab_size to {vocabulary} or more"
        )
    if length > model.max_sequence_length:
        raise ConfigError(
            f"data.sequence_length {length} is over the model's position table of {model.max_sequence_length}; "
            f"use a shorter sequence, or set model.max_positions to {length} or more"
        )


def _initial_values(experiment: Experiment, model: Any) -> InitialValues:
    """Where parameters get their first values: drawn by the seed, or read from `init_from`.

    Raises:
        CheckpointError: `init_from` holds another model.
    """
    if experiment.init_from is None:
        return lambda name, start, stop: model.initial_values(name, start, stop, experiment.seed)
    tensors = load_weights(experiment.init_from).tensors
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    wrong = [name for name, shape in shapes.items() if name not in tensors or tuple(tensors[name].shape) != shape]
    if wrong or len(tensors) != len(shapes):
        extra = [name for name in tensors if name not in shapes]
        raise CheckpointError(
            f"init_from {experiment.init_from} holds another model than the experiment's: "
            f"{len(wrong)} parameters are missing or of another shape and {len(extra)} are unknown, first "
            f"{(wrong + extra)[0]}; make the model section match it"
        )
    return lambda name, start, stop: tensors[name].flatten()[start:stop].float()


def _prepare_folder(experiment: Experiment, dataset: Dataset) -> None:
    """Makes the run's folder self-contained: its resolved configuration and its tokenizer."""
    folder = Path(experiment.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump(experiment), encoding="utf-8")
    dataset.tokenizer.save(folder / "tokenizer")


def _open_trackers(experiment: Experiment, step: int) -> list[Tracker]:
    folder = Path(experiment.output)
    trackers: list[Tracker] = [JsonlTracker(folder / "metrics.jsonl", resume_step=step)]
    if experiment.tracking.wandb is not None:
        trackers.append(experiment.tracking.wandb.build(folder, to_tree(experiment)))
    return [*trackers, ProgressTracker(step, experiment.training.steps)]


def _flops_per_token(experiment: Experiment, trainer: Trainer) -> float:
    length = experiment.data.sequence_length
    with torch.device("meta"):
        model = experiment.model.build()
    flops: float = model.flops_per_token(length, trainer.objective.predictions(length) / length)
    return flops


def _throughput(experiment: Experiment, trainer: Trainer) -> Throughput:
    accelerator = trainer.strategy.accelerator
    peak = accelerator.peak_flops(experiment.training.precision)
    return Throughput(
        trainer.state.step,
        experiment.training.steps,
        time.perf_counter(),
        flops_per_token=_flops_per_token(experiment, trainer),
        peak_flops=peak * trainer.strategy.replica.count if peak else None,
    )


def _report(experiment: Experiment, trainer: Trainer) -> None:
    """Says before the first step what is about to run, how much work it is and how long it may take."""
    settings, count = experiment.training, trainer.strategy.replica.count
    accelerator = trainer.strategy.accelerator
    parameters = sum(parameter.numel() for parameter in trainer.strategy.parameters.values())
    tokens = settings.global_batch_size * experiment.data.sequence_length
    flops = _flops_per_token(experiment, trainer) * tokens * (settings.steps - trainer.state.step)
    speed = accelerator.expected_flops(settings.precision)
    estimate = f", about {timedelta(seconds=round(flops / speed / count))}" if speed else ""
    kind = type(experiment.strategy).__module__.rpartition(".")[2]
    logger.info("device       %d x %s, strategy %s, %s", count, accelerator.description, kind, settings.precision)
    logger.info("model        %s parameters", f"{parameters:,}")
    logger.info(
        "batch        %d examples x %d = %s tokens a step, in micro-batches of %d",
        settings.global_batch_size,
        experiment.data.sequence_length,
        f"{tokens:,}",
        settings.micro_batch_size,
    )
    logger.info("work         steps %d to %d, %.3g FLOPs%s", trainer.state.step + 1, settings.steps, flops, estimate)
    logger.info("output       %s", experiment.output)
