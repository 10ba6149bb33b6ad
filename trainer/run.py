"""The composition root: an experiment becomes objects, and a Trainer that drives them."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_pipeline.dataset import Dataset
from data_pipeline.loader import StreamingLoader
from data_pipeline.tokenization import Tokenizer
from trainer import accelerators
from trainer.checkpoint import files, integrity
from trainer.checkpoint.manager import Checkpointer
from trainer.config import dump, to_tree
from trainer.errors import CheckpointError, ConfigError, SamestepError
from trainer.experiment import Experiment
from trainer.loop import Trainer, score
from trainer.monitoring import Tracker
from trainer.monitoring.jsonl import JsonlTracker
from trainer.monitoring.progress import ProgressTracker
from trainer.monitoring.throughput import Throughput
from trainer.objectives import Objective
from trainer.strategies import InitialValues, Replica, Strategy
from trainer.strategies.world import World
from trainer.weights import Weights, load_weights

logger = logging.getLogger(__name__)

_LOCK_SECONDS = 10.0


def train(experiment: Experiment) -> None:
    """Runs an experiment to its end, from its newest checkpoint if it has one."""
    with _meeting(experiment) as strategy, _only_writer(Path(experiment.output), strategy.world.rank):
        dataset = Dataset.open(experiment.data.path)
        if experiment.training.evaluate_every is not None:
            dataset.shards("heldout")  # refuses an empty split now rather than after hours
        checkpointer = open_checkpointer(experiment, strategy.world)
        step = checkpointer.latest()
        if step is not None and step >= experiment.training.steps:
            logger.info("nothing to do: %s is at step %d; raise training.steps to train on", experiment.output, step)
            return
        weights = experiment.init_from if step is None else None
        trainer = build_trainer(experiment, dataset, strategy, checkpointer, weights)
        try:
            if step is not None:
                trainer.restore(step)
            trackers, ledger = _open_records(experiment, dataset, trainer)
            trainer.fit(trackers, ledger, _throughput(experiment, trainer))
            for tracker in trackers:
                tracker.close()
        except torch.OutOfMemoryError as error:
            raise SamestepError(
                f"the memory of {trainer.strategy.accelerator.description} is used up: {error}; lower "
                f"training.micro_batch_size (it is {experiment.training.micro_batch_size}; it changes memory and speed "
                "only), set training.activation_checkpointing=true, or use more devices"
            ) from error
        finally:
            trainer.loader.close()


def evaluate(experiment: Experiment, step: int | None) -> dict[str, float]:
    """Scores a checkpoint of a run (the newest by default) on the held-out documents.

    Raises:
        CheckpointError: the run has no checkpoint.
    """
    with _meeting(experiment) as strategy:
        dataset = Dataset.open(experiment.data.path)
        objective = experiment.objective.build(dataset.tokenizer.vocabulary)
        run = Path(experiment.output)
        source = run if step is None else integrity.step_folder(run / "checkpoints", step)
        weights = load_weights(source, strategy.world.rank, strategy.world.size)
        model = _build_model(experiment, dataset)
        # The optimizer that comes with it has no state yet, and so takes no memory.
        model, _ = strategy.prepare(model, experiment.optimizer.build, _stored_values(weights, model, dataset))
        heldout = open_loader(experiment, dataset, objective, strategy.replica, split="heldout")
        scores = score(model, objective, strategy, heldout, experiment.training.evaluate_batches)
        assert weights.step is not None
        return {"step": weights.step, **scores}


@contextmanager
def _meeting(experiment: Experiment) -> Iterator[Strategy]:
    """Meets the other processes; leaves them in an orderly way, or tells them why this one fails."""
    world = World.start(experiment.training.collective_timeout)
    try:
        accelerator = experiment.accelerator.build() if experiment.accelerator else accelerators.detect()
        world.connect(accelerator.collective_backend)
        strategy: Strategy = experiment.strategy.build(accelerator, world, experiment.training.precision)
        yield strategy
        world.close()
    except BaseException as error:
        world.failed(error)
        raise


@contextmanager
def _only_writer(folder: Path, rank: int) -> Iterator[None]:
    """Keeps other trainings out of the run's folder. The lock goes with this process, however that ends.

    Raises:
        CheckpointError: the folder cannot be written in.
        ConfigError: another training writes in it, and has not ended within some seconds, as killed processes would.
    """
    if rank != 0:
        yield
        return
    files.make_folder(folder)
    deadline = time.monotonic() + _LOCK_SECONDS
    with (folder / ".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another training is running in {folder}; wait for it to end or stop it, or choose another "
                        "output folder"
                    ) from None
                time.sleep(0.2)
            except OSError as error:  # some network file systems have no locks
                logger.warning("%s cannot be locked (%s): let no other training write in it", folder, error)
                break
        yield


def build_trainer(
    experiment: Experiment,
    dataset: Dataset,
    strategy: Strategy,
    checkpointer: Checkpointer,
    weights: str | Path | None = None,
) -> Trainer:
    """Makes every part of a run and hands them to a Trainer that stands at step 0.

    Args:
        experiment: what to make.
        dataset: that of the experiment.
        strategy: that of the experiment.
        checkpointer: that of the run.
        weights: what parameters start from, as `load_weights` takes it; None draws them by the seed.

    Raises:
        ConfigError: the parts do not fit each other.
        CheckpointError: the weights are of another model.
    """
    objective = experiment.objective.build(dataset.tokenizer.vocabulary)
    model = _build_model(experiment, dataset)
    loader = open_loader(experiment, dataset, objective, strategy.replica)
    initial: InitialValues = partial(model.initial_values, seed=experiment.seed)
    if weights is not None:
        initial = _stored_values(load_weights(weights, strategy.world.rank, strategy.world.size), model, dataset)
    wrapped, optimizer = strategy.prepare(model, experiment.optimizer.build, initial)
    return Trainer(
        experiment.training,
        model=wrapped,
        optimizer=optimizer,
        objective=objective,
        strategy=strategy,
        schedule=experiment.schedule,
        loader=loader,
        heldout=lambda: open_loader(experiment, dataset, objective, strategy.replica, split="heldout"),
        checkpointer=checkpointer,
        description={"config": to_tree(experiment)},
    )


def _build_model(experiment: Experiment, dataset: Dataset) -> Any:
    """The model on the meta device: it fits the dataset, and its parameters have no values yet."""
    with torch.device("meta"):
        model: Any = experiment.model.build()
    _check_fit(experiment, dataset, model)
    model.activation_checkpointing = experiment.training.activation_checkpointing
    if experiment.training.compile:
        for unit in model.sharding_units():
            unit.compile()
    return model


def open_checkpointer(experiment: Experiment, world: World) -> Checkpointer:
    """The checkpoints of a run that is to be trained, for all ranks together; its folder must be shared by them."""
    checkpointer = Checkpointer(
        Path(experiment.output) / "checkpoints",
        experiment.checkpoint,
        rank=world.rank,
        world_size=world.size,
        peer_timeout=experiment.training.collective_timeout / 2,
    )
    checkpointer.check_shared()
    return checkpointer


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


def _stored_values(weights: Weights, model: Any, dataset: Dataset) -> InitialValues:
    """The parameters of a trained model, refused unless they fit this model and the dataset's tokens."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stored = {name: weights.tensors.shape(name) for name in weights.tensors}
    wrong = [name for name, shape in shapes.items() if stored.get(name) != shape]
    extra = [name for name in stored if name not in shapes]
    if wrong or extra:
        raise CheckpointError(
            f"{weights.folder} holds another model than the experiment's: {len(wrong)} parameters are missing or of "
            f"another shape and {len(extra)} are unknown, first {(wrong + extra)[0]}; make the model section match it"
        )
    if Tokenizer.load(weights.tokenizer).fingerprint != dataset.tokenizer.fingerprint:
        raise ConfigError(
            f"{weights.folder} was trained with another tokenizer than {dataset.path} was built with, so its tokens "
            f"mean other words; build a dataset with tokenizer.path={weights.tokenizer} and set data.path to it"
        )
    return lambda name, start, stop: weights.tensors.elements(name, start, stop).float()


def _open_records(
    experiment: Experiment, dataset: Dataset, trainer: Trainer
) -> tuple[list[Tracker], JsonlTracker | None]:
    """Makes the run's folder self-contained and opens what is written into it, on rank 0; the others write nothing."""
    if trainer.strategy.replica.index > 0:
        return [], None
    folder, step = Path(experiment.output), trainer.state.step
    (folder / "config.yaml").write_text(dump(experiment), encoding="utf-8")
    dataset.tokenizer.save(folder / "tokenizer")
    _report(experiment, trainer)
    trackers: list[Tracker] = [JsonlTracker(folder / "metrics.jsonl", resume_step=step)]
    if experiment.tracking.wandb is not None:
        trackers.append(experiment.tracking.wandb.build(folder, to_tree(experiment)))
    trackers.append(ProgressTracker(step, experiment.training.steps))
    return trackers, JsonlTracker(folder / "ledger.jsonl", resume_step=step)


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
    estimate = f", {timedelta(seconds=round(flops / speed / count))} or more" if speed else ""
    kind = type(experiment.strategy).__module__.rpartition(".")[2]
    logger.info("device       %d x %s, strategy %s, %s", count, accelerator.description, kind, settings.precision)
    logger.info("model        %s parameters", f"{parameters:,}")
    logger.info(
        "batch        %d examples x %d = %s tokens a step, in micro-batches of at most %d",
        settings.global_batch_size,
        experiment.data.sequence_length,
        f"{tokens:,}",
        settings.micro_batch_size,
    )
    logger.info("work         steps %d to %d, %.3g FLOPs%s", trainer.state.step + 1, settings.steps, flops, estimate)
    logger.info("output       %s", experiment.output)
