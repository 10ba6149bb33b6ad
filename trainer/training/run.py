"""The composition root: an experiment becomes objects, and a Trainer that drives them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from data_pipeline.reading.batches import BatchLayout
from data_pipeline.reading.loader import SplitOrder, StreamingLoader
from data_pipeline.reading.mixed_dataset import AnyDataset
from trainer import storage
from trainer.accelerators.detect import detect
from trainer.checkpoint import files, integrity
from trainer.checkpoint.lock import only_writer
from trainer.checkpoint.manager import Checkpointer
from trainer.config import dump, to_tree
from trainer.errors import EXIT_DONE, ConfigError, SamestepError
from trainer.metrics import check_installed
from trainer.models import Model
from trainer.monitoring import Tracker
from trainer.objectives import Objective
from trainer.optim import Structure, groups
from trainer.strategies import InitialValues, Replica, Strategy
from trainer.strategies.world import World
from trainer.training import forecast, run_folder
from trainer.training.best import Best
from trainer.training.checkpoints import Checkpoints, newest, open_snapshots
from trainer.training.compatibility import (
    check_best,
    check_compatibility,
)
from trainer.training.experiment import Experiment
from trainer.training.initial_weights import choose_layers, reinitialize_layers, stored_values
from trainer.training.loop import Trainer
from trainer.training.micro_batch import probe, without_probe
from trainer.training.passes import Loader
from trainer.training.phase_loaders import PhaseLoaders
from trainer.training.phases import Phase, examples_after
from trainer.training.preemption import StopRequest
from trainer.training.resuming import Description
from trainer.training.rewind import rewind
from trainer.training.teacher import attach_teacher
from trainer.training.weights import base_of, load_weights, shared_identity

logger = logging.getLogger(__name__)


def train(experiment: Experiment) -> int:
    """Runs an experiment to its end, from its newest checkpoint if it has one; or until it is asked to stop.

    Returns:
        The exit code: 0 at the end; else 75 or 76, see `trainer.training.preemption`.
    """
    trackers: list[Tracker] = []
    with (
        StopRequest(experiment.training.preemption) as stop,
        open_strategy(experiment) as strategy,
        run_folder.failures_told(trackers),
        _only_writer(experiment, strategy.world.rank),
    ):
        if experiment.tracking.wandb is not None and strategy.world.rank == 0:
            experiment.tracking.wandb.claim(Path(experiment.output))
        stop.join(strategy.world.size)
        dataset = experiment.data.open()
        checkpointer = open_checkpointer(experiment, strategy.world)
        snapshots = open_snapshots(experiment, strategy.world)
        source, step = newest(checkpointer, snapshots)
        if step is not None and (said := _finished(experiment, source, step)):
            logger.info("nothing to do: %s %s", experiment.output, said)
            return EXIT_DONE
        weights = experiment.init_from if step is None or experiment.freezes else None
        trainer: Trainer | None = None
        try:
            trainer = build_trainer(
                experiment, dataset, strategy, checkpointer, weights, snapshots, step is not None
            )
            if experiment.training.evaluate_every is not None:
                # Refuses a split without examples now rather than after hours.
                trainer.loaders.heldout(trainer.phase).close()
                check_installed(experiment.objective.task.metrics)
                check_best(experiment, trainer.objective)
            if step is not None:
                changes = trainer.restore(step, source)
                logger.info(
                    "continuing   at step %d%s", step, f" with {changes}" if changes else ""
                )
            strategy.world.tell_progress(trainer.state.step)
            profiler = experiment.tracking.profile.build(
                Path(experiment.output), strategy.world.rank
            )
            fault: str | None = None
            while True:
                trackers[:], ledger = _open_records(experiment, dataset, trainer, fault)
                fault = trainer.fit(
                    trackers, ledger, forecast.throughput(experiment, trainer), profiler, stop
                )
                for tracker in trackers:
                    tracker.close()
                if fault is None:
                    break
                rewind(trainer, fault)
            stop.finish()
            if trainer.over:
                if experiment.training.best is not None:
                    early = (
                        f"stopped early at step {trainer.state.step}: " if trainer.best.over else ""
                    )
                    logger.info(
                        "finished     %s%s; its checkpoint is %s/best",
                        early,
                        trainer.best,
                        experiment.output,
                    )
                return EXIT_DONE
            logger.info(
                "stopped      at step %d, with a checkpoint to go on from", trainer.state.step
            )
            return stop.exit_code
        except torch.OutOfMemoryError as error:
            phase = None if trainer is None else trainer.phase
            raise _out_of_memory(experiment, strategy, phase, error) from error
        finally:
            if trainer is not None:
                trainer.close()


def _finished(experiment: Experiment, source: Checkpointer, step: int) -> str | None:
    """Why there is nothing left to do after a step, and what to change; None if there is."""
    if step >= experiment.training.steps:
        return f"is at step {step}; raise training.steps to train on"
    best = Best(experiment.training.best)
    if experiment.training.best is not None:
        best.load_state_dict(
            integrity.read_meta(integrity.step_folder(source.folder, step)), lambda step: True
        )
    return (
        f"was stopped early at step {step}; raise training.best.patience to train on"
        if best.over
        else None
    )


@contextmanager
def open_strategy(experiment: Experiment) -> Iterator[Strategy]:
    """Meets the other processes; leaves them in an orderly way, or tells them why this one fails."""
    world = World.start(experiment.training.collective_timeout)
    try:
        accelerator = experiment.accelerator.build() if experiment.accelerator else detect()
        world.connect(accelerator.collective_backend)
        strategy: Strategy = experiment.strategy.build(
            accelerator, world, experiment.training.precision
        )
        yield strategy
        world.close()
    except BaseException as error:
        world.failed(error)
        raise


@contextmanager
def _only_writer(experiment: Experiment, rank: int) -> Iterator[None]:
    """Keeps other trainings out of where the run writes: its checkpoints, and its output folder if they lie elsewhere.

    Raises:
        CheckpointError: a folder cannot be written in.
        ConfigError: another training writes there.
    """
    with ExitStack() as locks:
        if rank == 0:
            checkpoints, output = checkpoint_folder(experiment), Path(experiment.output)
            locks.enter_context(only_writer(checkpoints))
            in_output = isinstance(checkpoints, Path) and checkpoints.resolve() == output.resolve()
            if experiment.checkpoint.folder is not None and not in_output:
                locks.enter_context(only_writer(output))
        yield


def build_trainer(
    experiment: Experiment,
    dataset: AnyDataset,
    strategy: Strategy,
    checkpointer: Checkpointer,
    weights: str | Path | None = None,
    snapshots: Checkpointer | None = None,
    to_restore: bool = False,
) -> Trainer:
    """Makes every part of a run and hands them to a Trainer that stands at step 0.

    Args:
        experiment: what to make.
        dataset: that of the experiment.
        strategy: that of the experiment.
        checkpointer: that of the run.
        weights: what parameters start from, as `load_weights` takes it; None draws them by the seed.
        snapshots: those of the run; None takes none.
        to_restore: whether a checkpoint is to give all values but those of frozen parameters; none are drawn then,
            which takes seconds.

    Raises:
        ConfigError: the parts do not fit each other.
        CheckpointError: the weights are of another model.
    """
    if experiment.data.group_by_length is not None and strategy.accelerator.compiles:
        raise ConfigError(
            f"{strategy.accelerator.description} compiles for each width of a batch, and data.group_by_length gives "
            "many; set it to null"
        )
    objective = experiment.objective.build(dataset.tokenizer.vocabulary)
    model = build_model(experiment, dataset, objective)
    shapes = copy.deepcopy(model)  # of its own parameters the strategy may leave nothing but names
    initial: InitialValues = partial(shapes.initial_values, seed=experiment.seed)
    base: dict[str, str] | None = None
    if weights is not None:
        trained = load_weights(weights, strategy.world.rank, strategy.world.size)
        if experiment.init_layers:
            trained = choose_layers(trained, experiment.init_layers)
        initial = stored_values(trained, shapes, dataset, seed=experiment.seed)
        if experiment.redraw_layers:
            initial = reinitialize_layers(
                initial, shapes, experiment.redraw_layers, experiment.seed
            )
        if experiment.freezes:
            base = base_of(trained, strategy.world.rank, strategy.world.size)
            logger.info(
                "frozen       weights stay in %s: keep it as long as this run", base["path"]
            )
    elif to_restore:
        initial = _zeros
    build_optimizer = partial(experiment.optimizer.build, structure=Structure.of(model))
    with strategy.accelerator.graph("start"):
        wrapped, optimizer = strategy.prepare(model, build_optimizer, initial)
        groups.prime(optimizer)
    teacher = attach_teacher(experiment, dataset, objective, strategy)
    open_split = partial(
        open_loader, experiment, dataset, objective, strategy.replica, largest=strategy.largest
    )
    # What memory has to be enough for is the widest of the batches.
    widest = replace(experiment, data=replace(experiment.data, group_by_length=None))
    open_widest = partial(
        open_loader, widest, dataset, objective, strategy.replica, largest=strategy.largest
    )
    phases = tuple(
        _sized(
            phase,
            strategy,
            objective,
            open_widest,
            partial(probe, wrapped, optimizer, objective, strategy),
        )
        for phase in experiment.resolved_phases()
    )
    description = Description(
        to_tree(experiment),
        tuple(phase.micro_batch_size for phase in phases),
        None
        if teacher is None
        else shared_identity(teacher, strategy.world.rank, strategy.world.size),
        base,
    )
    return Trainer(
        experiment.training,
        model=wrapped,
        optimizer=optimizer,
        objective=objective,
        strategy=strategy,
        loaders=PhaseLoaders(phases, open_split),
        checkpoints=Checkpoints(checkpointer, snapshots),
        description=description,
    )


def _zeros(_name: str, start: int, stop: int) -> torch.Tensor:
    return torch.zeros(()).expand(stop - start)


def _sized(
    phase: Phase,
    strategy: Strategy,
    objective: Objective,
    open_split: Callable[[Phase], Loader],
    measure: Callable[[Callable[[int], Loader], int], int | None],
) -> Phase:
    """The phase with its micro-batch as a number: as it was set, or what fits into the memory of the devices."""
    replicas, wanted = strategy.replica.count * strategy.replica.devices, phase.micro_batch_size
    most = -(-phase.global_batch_size // replicas)
    most = most if wanted == "auto" else min(wanted, most)

    def open_sized(rows: int) -> Loader:
        # A second micro-batch, where a step has several, meets the gradients of the first, which FSDP2 keeps whole.
        each = rows * replicas
        examples = each if each >= phase.global_batch_size else 2 * each
        return open_split(replace(phase, micro_batch_size=rows, global_batch_size=examples))

    fits = measure(open_sized, most)
    if wanted != "auto":
        return replace(phase, fits=fits)
    size = (
        without_probe(most, objective.pack_spec(phase.sequence_length).positions)
        if fits is None
        else fits
    )
    return replace(phase, micro_batch_size=size, fits=fits)


def build_model(experiment: Experiment, dataset: AnyDataset, objective: Objective) -> Model:
    """The model on the meta device: its parameters have no values yet.

    Raises:
        ConfigError: it does not fit the dataset or the objective.
    """
    with torch.device("meta"):
        model = experiment.build_model()
    own = [
        parameter for module in model.modules() for parameter in module.parameters(recurse=False)
    ]
    # Getting memory, each module would make a parameter of its own.
    if len(own) > len(set(own)):
        raise ConfigError(
            "two modules of the model share a parameter; let them share the module that has it"
        )
    check_compatibility(experiment, dataset, objective, model)
    model.activation_checkpointing = experiment.training.activation_checkpointing
    if experiment.training.activation_checkpointing and not model.activation_checkpointing:
        raise ConfigError(
            "training.activation_checkpointing is true, and this model has no layers that can recompute; set it to "
            "false"
        )
    if experiment.training.compile:
        for unit in model.sharding_units():
            unit.compile()
    return model


def checkpoint_folder(experiment: Experiment) -> files.Location:
    """Where the checkpoints of a run lie."""
    folder = experiment.checkpoint.folder
    return Path(experiment.output) / "checkpoints" if folder is None else files.location(folder)


def open_checkpointer(experiment: Experiment, world: World) -> Checkpointer:
    """The checkpoints of a run that is to be trained, for all ranks together; its folder must be shared by them."""
    checkpointer = Checkpointer(
        checkpoint_folder(experiment),
        experiment.checkpoint,
        rank=world.rank,
        world_size=world.size,
        peer_timeout=experiment.training.collective_timeout / 2,
    )
    checkpointer.check_shared()
    return checkpointer


def open_loader(
    experiment: Experiment,
    dataset: AnyDataset,
    objective: Objective,
    replica: Replica,
    phase: Phase,
    split: str = "train",
    largest: Callable[[int], int] = int,
) -> StreamingLoader:
    """The batches of a split: endless ones for training, a single pass over the held-out documents.

    Each phase has an order, masks and dropout of its own; evaluation has the same masks in all of them.
    """
    size = phase.micro_batch_size
    most = -(-phase.global_batch_size // (replica.count * replica.devices))
    spec = objective.pack_spec(phase.sequence_length)
    order = SplitOrder(
        phase.seed(experiment.seed) if split == "train" else experiment.seed,
        split,
        finite=split == "heldout",
        example_after=partial(examples_after, experiment.resolved_phases(), phase.order),
    )
    rows = without_probe(most, spec.positions) if size == "auto" else size
    return StreamingLoader(
        dataset,
        experiment.data if phase.order == 0 else replace(experiment.data, exclude=()),
        order,
        BatchLayout(phase.global_batch_size, rows, replica),
        pack_spec=spec,
        collate=objective.collate,
        largest=largest,
    )


def write_description(experiment: Experiment, dataset: AnyDataset) -> None:
    """Writes the settings and the tokenizer into the run's folder; the latter also to where its checkpoints are."""
    folder = Path(experiment.output)
    storage.write_text(folder / "config.yaml", dump(experiment))
    dataset.tokenizer.save(folder / "tokenizer")
    if experiment.checkpoint.folder is not None:
        files.copy_folder(folder / "tokenizer", checkpoint_folder(experiment) / "tokenizer")


def _open_records(
    experiment: Experiment, dataset: AnyDataset, trainer: Trainer, fault: str | None
) -> tuple[list[Tracker], Path | None]:
    """Makes the run's folder self-contained and opens what is written into it, on rank 0; the others write nothing."""
    if trainer.strategy.replica.index > 0:
        return [], None
    write_description(experiment, dataset)
    forecast.report(experiment, trainer)
    return run_folder.open_records(experiment, trainer, fault), Path(
        experiment.output
    ) / "ledger.jsonl"


def _out_of_memory(
    experiment: Experiment, strategy: Strategy, phase: Phase | None, error: Exception
) -> SamestepError:
    """What to do when a device's memory runs out, in a phase or (None) even before the first step."""
    lower = ""
    if phase is not None and isinstance(size := phase.micro_batch_size, int) and size > 1:
        smaller = phase.fits if phase.fits is not None and phase.fits < size else size // 2
        section = f"phases.{phase.index}" if experiment.phases else "training"
        lower = f"set {section}.micro_batch_size={smaller} (it is {size}; it changes memory and speed only), "
    return SamestepError(
        f"the memory of {strategy.accelerator.description} is used up: {error}; {lower}set "
        "training.activation_checkpointing=true, or use more devices"
    )
