"""The composition root: builds the parts of an experiment, and a Trainer that drives them.

A part that only some experiments need is imported where it is built.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from data_pipeline.reading.batches import BatchLayout
from data_pipeline.reading.concat_dataset import AnyDataset
from data_pipeline.reading.loader import SplitOrder, StreamingLoader
from samestep import storage
from samestep.config import dump, to_tree
from samestep.environment import number
from samestep.errors import ConfigError
from samestep.untrusted import MOST_STORED_BYTES
from trainer.accelerators.detect import detect
from trainer.checkpoint import files
from trainer.checkpoint.lease import Lease
from trainer.checkpoint.lock import only_writer
from trainer.checkpoint.manager import Checkpointer
from trainer.models import Model
from trainer.objectives import Objective
from trainer.optim import Structure, groups
from trainer.strategies import BuildOptimizer, InitialValues, Replica, Strategy
from trainer.strategies.world import World
from trainer.training.checkpoints import Checkpoints
from trainer.training.compatibility import check_accelerator, check_exact, check_precision
from trainer.training.experiment import Experiment
from trainer.training.loop import Trainer
from trainer.training.model import build_model, build_objectives
from trainer.training.observers import Observer
from trainer.training.observers.settings import DIGESTS
from trainer.training.passes import Loader
from trainer.training.phase_loaders import PhaseLoaders
from trainer.training.phases import Phase, examples_after, without_probe
from trainer.training.start_record import start_of

logger = logging.getLogger(__name__)


@contextmanager
def open_strategy(experiment: Experiment) -> Iterator[Strategy]:
    """Connects to the other ranks, which must train the same, and builds the strategy.

    On success the ranks leave in order. If this one fails, it tells the others why.
    """
    # The world exists before the accelerator, so an error there reaches the other ranks.
    world = World.start(experiment.training.collective_timeout)
    try:
        accelerator = experiment.accelerator.build() if experiment.accelerator else detect()
        check_precision(experiment, accelerator)
        # One rank of each machine is enough: reading the facts of weights costs requests.
        if world.store is not None and number("LOCAL_RANK", 0) == 0:
            from trainer.training.shared_facts import facts_of

            world.agree(facts_of(experiment, checkpoint_folder(experiment)))
        world.connect(accelerator.collective_backend, accelerator.collective_device)
        yield experiment.strategy.build(accelerator, world, experiment.training.precision)
        world.close()
    except BaseException as error:
        world.failed(error)
        raise


@contextmanager
def only_writer_of(experiment: Experiment, rank: int) -> Iterator[Lease | None]:
    """Locks the folders that a run writes: its checkpoints, and its output if that is elsewhere.

    Yields:
        The lease on the checkpoints, on rank 0.

    Raises:
        CheckpointError: a folder is not writable.
        ConfigError: another training writes there.
    """
    lease = None
    with ExitStack() as locks:
        # Rank 0 represents the run; the other ranks write into folders that it has locked.
        if rank == 0:
            checkpoints, output = checkpoint_folder(experiment), Path(experiment.output)
            needed_by = chosen = f"output={experiment.output}"
            if experiment.checkpoint.folder is not None:
                needed_by = f"checkpoint.folder={experiment.checkpoint.folder}"
            lease = locks.enter_context(only_writer(checkpoints, needed_by))
            same = isinstance(checkpoints, Path) and checkpoints.resolve() == output.resolve()
            if experiment.checkpoint.folder is not None and not same:
                locks.enter_context(only_writer(output, chosen))
        yield lease


def build_trainer(
    experiment: Experiment,
    dataset: AnyDataset,
    strategy: Strategy,
    checkpointer: Checkpointer,
    weights: str | Path | None = None,
    snapshots: Checkpointer | None = None,
    to_restore: bool = False,
) -> Trainer:
    """Builds every part of a run, and a Trainer at step 0.

    Args:
        weights: that parameters start from, as `load_weights` takes it; None initializes them by
            the run's seed.
        snapshots: None takes none.
        to_restore: a checkpoint will replace all values except frozen ones, so none
            are initialized, which would take seconds.

    Raises:
        ConfigError: the parts are not compatible.
        CheckpointError: the weights are of another model.
    """
    check_accelerator(experiment, strategy.accelerator)
    objectives, model, optimizer, description = prepare(
        experiment, dataset, strategy, weights, to_restore
    )

    def opener(experiment: Experiment) -> Callable[..., Loader]:
        return partial(open_loader, experiment, dataset, strategy.replica, world=strategy.world)

    # The memory must be enough for the widest batch. Without grouping, all are that wide.
    open_widest = opener(replace(experiment, data=replace(experiment.data, group_by_length=None)))
    phases = tuple(
        _sized(phase, experiment, model, optimizer, objective, strategy, open_widest)
        for phase, objective in zip(experiment.resolved_phases(), objectives, strict=True)
    )
    description["micro_batch_sizes"] = [phase.micro_batch_size for phase in phases]
    # Where devices run behind, all ranks know of an error ahead a step later: see `StopRequest`.
    late = strategy.accelerator.runs_behind and strategy.world.size > 1
    data = replace(experiment.data, prefetch=experiment.data.prefetch + late)
    trainer = Trainer(
        experiment.training,
        model=model,
        optimizer=optimizer,
        objectives=objectives,
        strategy=strategy,
        loaders=PhaseLoaders(phases, opener(replace(experiment, data=data))),
        checkpoints=Checkpoints(checkpointer, snapshots),
        description=description,
    )
    trainer.observers = tuple(_observers(experiment, trainer))
    return trainer


def _sized(
    phase: Phase,
    experiment: Experiment,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    strategy: Strategy,
    open_split: Callable[[Phase], Loader],
) -> Phase:
    """Resolves a phase's micro-batch size: as set, or what fits into the devices' memory."""
    if (memory := strategy.accelerator.memory()) is not None:
        from trainer.training.compute.micro_batch import with_micro_batch

        return with_micro_batch(
            phase, experiment, model, optimizer, objective, strategy, open_split, memory
        )
    if phase.micro_batch_size != "auto":
        return phase
    positions = objective.pack_spec(phase.sequence_length).positions
    return replace(phase, micro_batch_size=_without_probe(phase, strategy.replica, positions))


def _without_probe(phase: Phase, replica: Replica, positions: int) -> int:
    return without_probe(
        -(-phase.global_batch_size // (replica.count * replica.devices)), positions
    )


def _observers(experiment: Experiment, trainer: Trainer) -> Iterator[Observer]:
    """Yields the observers that the settings ask for, in the order in which they are called.

    Before a save, the best evaluation learns first which checkpoint has failed; then the state is
    checked. After an update, the state is checked before its digests are written.
    """
    from trainer.training.observers.heartbeat import Heartbeat
    from trainer.training.observers.profiler import Profiler

    config, strategy, folder = experiment.training, trainer.strategy, Path(experiment.output)
    alert = partial(trainer.recorder.alert, "ERROR", "The run hangs")
    yield Heartbeat(strategy.world, config.hang_timeout, folder / "stacks", alert)
    yield Profiler(experiment.tracking.profile, folder, strategy.world.rank)
    if config.best is not None:
        from trainer.training.observers.best import BestEvaluation

        yield BestEvaluation(config.best, strategy.all_reduce, trainer.checkpoints.durable.holds)
    # Reading the state in the middle of a compiled step would split its graph in two.
    if config.verify_state_every is not None and not strategy.accelerator.compiles:
        from trainer.training.observers.state_check import StateCheck

        yield StateCheck(strategy, partial(trainer.tensors, frozen=True), config.verify_state_every)
    if config.digest_every is not None or (folder / DIGESTS).exists():
        from trainer.training.observers.digests import Digests

        yield Digests(strategy, config.digest_every, trainer.recorder.ledger, trainer.tensors)


class Prepared(NamedTuple):
    """The model of a run and all that trains it.

    Attributes:
        objectives: of each phase.
        model: as `Strategy.prepare` returns it, with its initial values.
        optimizer: of the model's parameters.
        description: how the run is configured, as the meta.json of every checkpoint stores it.
    """

    objectives: list[Objective]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    description: dict[str, object]


def prepare(
    experiment: Experiment,
    dataset: AnyDataset,
    strategy: Strategy,
    weights: str | Path | None = None,
    to_restore: bool = False,
    build_optimizer: BuildOptimizer | None = None,
) -> Prepared:
    """Builds the objectives, the model and the optimizer. Collective.

    Args:
        weights, to_restore: see `build_trainer`.
        build_optimizer: None builds the experiment's optimizer, with its state. The state of others
            is left to their first step, as it may depend on its learning rate.

    Raises:
        ConfigError, CheckpointError: see `build_trainer`.
    """
    objectives = build_objectives(experiment, dataset)
    # On the meta device: parameters get memory when the strategy has partitioned them.
    model = build_model(experiment, dataset, objectives, strategy.accelerator)
    if strategy.accelerator.fuses_attention:
        from trainer.training.compute.fused_attention import fuse_attention

        precision, world_size = experiment.training.precision, strategy.world.size
        fuse_attention(model, strategy.accelerator, precision, world_size)
    # A copy for the initial values: of the model's own parameters, the strategy may leave nothing
    # but their names.
    whole = copy.deepcopy(model)
    initial, origin, terms = _initial_values(experiment, dataset, whole, strategy, weights)
    embeddings = None
    if weights is None and to_restore:
        initial = _zeros
    elif experiment.init_embeddings is not None:
        from trainer.training.weights.embeddings import with_embeddings
        from trainer.vectors.folder import WordVectors

        vectors = WordVectors.load(experiment.init_embeddings)
        initial = with_embeddings(initial, whole, vectors, dataset)
        embeddings = vectors.origin
    own = partial(
        experiment.optimizer.build, structure=Structure.of(model, experiment.training.is_bitwise)
    )
    strategy.exact = experiment.training.is_bitwise
    strategy.compiles_layers = experiment.training.compile
    check_exact(experiment, objectives, own_optimizer=build_optimizer is not None)
    with strategy.accelerator.graph("start"):
        wrapped, optimizer = strategy.prepare(model, build_optimizer or own, initial)
        if build_optimizer is None:
            groups.check_begins(optimizer, experiment.training.steps)
            # Moments exist from the start, so that a restore has tensors to fill.
            groups.prime(optimizer)
    if strategy.loss_scale is not None:
        strategy.loss_scale.check(optimizer)
    teacher = None
    if (name := experiment.objective.teacher_path) is not None:
        from trainer.training.weights.teacher import attach_teacher

        teacher = attach_teacher(name, experiment, dataset, objectives, strategy)
    description: dict[str, object] = {
        "config": to_tree(experiment),
        "teacher": teacher,
        "start": None if to_restore else start_of(experiment, dataset, origin, embeddings, terms),
    }
    if experiment.training.is_bitwise:
        from trainer.training.compute.arithmetic import arithmetic

        description["arithmetic"] = arithmetic(strategy, model)
    if origin is not None and experiment.freezes:
        logger.info("frozen       weights stay in %s: keep it as long as this run", origin["path"])
        description["base"] = origin
    return Prepared(objectives, wrapped, optimizer, description)


def _initial_values(
    experiment: Experiment,
    dataset: AnyDataset,
    model: Model,
    strategy: Strategy,
    weights: str | Path | None,
) -> tuple[InitialValues, dict[str, str] | None, Mapping[str, object]]:
    """Returns the initial values, and `base_of` and `terms_of` their weights. Collective."""
    seed = experiment.seed
    if weights is None:
        return partial(model.initial_values, seed=seed), None, {}
    from trainer.training.weights.initial import (
        choose_layers,
        reinitialize_layers,
        stored_values,
    )
    from trainer.training.weights.loading import base_of, load_weights
    from trainer.training.weights.terms import shared_terms

    rank, world_size = strategy.world.rank, strategy.world.size
    trained = load_weights(weights, rank, world_size)
    if experiment.init_layers:
        trained = choose_layers(trained, experiment.init_layers)
    values = stored_values(trained, model, dataset, seed=seed)
    if experiment.redraw_layers:
        values = reinitialize_layers(values, model, experiment.redraw_layers, seed)
    return values, base_of(trained, rank, world_size), shared_terms(trained, rank, world_size)


def _zeros(_name: str, start: int, stop: int) -> torch.Tensor:
    return torch.zeros(()).expand(stop - start)


def checkpoint_folder(experiment: Experiment) -> files.Location:
    """The folder or address of a run's checkpoints."""
    folder = experiment.checkpoint.folder
    return Path(experiment.output) / "checkpoints" if folder is None else files.location(folder)


def open_checkpointer(
    experiment: Experiment, world: World, lease: Lease | None = None
) -> Checkpointer:
    """Opens the checkpoints of a run for training; all ranks must see the folder. Collective."""
    checkpointer = Checkpointer(
        checkpoint_folder(experiment),
        experiment.checkpoint,
        rank=world.rank,
        world_size=world.size,
        peer_timeout=experiment.training.collective_timeout / 2,
        lease=lease,
    )
    checkpointer.check_shared()
    return checkpointer


def open_loader(
    experiment: Experiment,
    dataset: AnyDataset,
    replica: Replica,
    phase: Phase,
    split: str = "train",
    world: World | None = None,
) -> StreamingLoader:
    """Opens the batches of a split: endless for training, a single pass for held-out documents.

    Phases with different data orders have different masks and dropout. Evaluation has the same
    masks in all of them. All ranks of a `world` skip the same corrupt shards.
    """
    size = phase.micro_batch_size
    objective = phase.objective.build(dataset.tokenizer.vocabulary)
    spec = objective.pack_spec(phase.sequence_length)
    if size == "auto":
        size = _without_probe(phase, replica, spec.positions)
    order = SplitOrder(
        phase.seed(experiment.seed) if split == "train" else experiment.seed,
        split,
        finite=split == "heldout",
        example_after=partial(examples_after, experiment.resolved_phases(), phase.order),
    )
    return StreamingLoader(
        dataset,
        # data.exclude has example numbers of the first data order.
        experiment.data if phase.order == 0 else replace(experiment.data, exclude=()),
        order,
        BatchLayout(phase.global_batch_size, size, replica, experiment.training.is_bitwise),
        pack_spec=spec,
        collate=objective.collate,
        announcements=world.announcements(experiment.data) if world else None,
    )


def write_description(experiment: Experiment, dataset: AnyDataset) -> None:
    """Writes the settings and the tokenizer into the run's folder, so it is self-contained.

    The tokenizer also goes to where the checkpoints are: they can be used without the run's folder.
    """
    folder, text = Path(experiment.output), dump(experiment)
    if len(text.encode()) > MOST_STORED_BYTES:  # it could not be read when the run continues
        raise ConfigError(
            f"the settings have {len(text.encode())} bytes, more than the {MOST_STORED_BYTES} of "
            "a config.yaml. Shorten data.exclude or data.sources"
        )
    storage.write_text(folder / "config.yaml", text)
    dataset.tokenizer.save(folder / "tokenizer")
    if experiment.checkpoint.folder is not None:
        files.copy_folder(folder / "tokenizer", checkpoint_folder(experiment) / "tokenizer")
