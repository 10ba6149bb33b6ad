"""The parts of a run, for a custom training loop.

    with open_parts(experiment) as parts:
        for micro_batches in parts.batches:
            metrics = accumulate_gradients(
                parts.model, parts.batches.objective, parts.strategy, micro_batches
            )
            norm = parts.strategy.clip_grad_norm(1.0)
            parts.strategy.step(parts.optimizer, norm)
            parts.optimizer.zero_grad()
            parts.checkpoints.save()

The parts are those that `trainer.training.compose` gives to the `Trainer`, so such a loop takes the
same steps at any world size, and resumes from its checkpoints.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from data_pipeline.reading.concat_dataset import AnyDataset
from samestep.errors import ConfigError, SamestepError
from samestep.examples import LoaderState
from trainer.checkpoint.manager import Checkpointer
from trainer.checkpoint.meta import OpenedStep
from trainer.objectives import Objective
from trainer.optim import groups
from trainer.partition import whole_norms
from trainer.strategies import BuildOptimizer, Replica, Strategy
from trainer.training.checkpoints import Found, capture, restore
from trainer.training.compose import (
    only_writer_of,
    open_checkpointer,
    open_loader,
    open_strategy,
    prepare,
    write_description,
)
from trainer.training.experiment import Experiment
from trainer.training.model import build_objectives
from trainer.training.passes import Loader, MicroBatches
from trainer.training.phase_loaders import PhaseLoaders
from trainer.training.phases import Phase, phase_of
from trainer.training.state import Meta

logger = logging.getLogger(__name__)


class Batches:
    """The training batches of an experiment for one rank: an iterator over optimizer steps.

    Each step is a list of micro-batches, dictionaries of CPU tensors [B, ...] whose columns
    `StreamingLoader` and the objective's `collate` describe. It ends after `training.steps`.

    Attributes:
        step: number of steps taken, those before the start included.
    """

    def __init__(self, loaders: PhaseLoaders, objectives: Sequence[Objective]) -> None:
        self.step = 0
        self._loaders, self._objectives = loaders, objectives

    @property
    def objective(self) -> Objective:
        """The objective of the step taken last; before the first, of the first."""
        return self._objectives[phase_of(self._loaders.phases, max(self.step - 1, 0)).index]

    @property
    def phase(self) -> Phase:
        """The phase of the next step; after the end, the last one."""
        return phase_of(self._loaders.phases, self.step)

    def __iter__(self) -> Iterator[MicroBatches]:
        return self

    def __next__(self) -> MicroBatches:
        phase = self.phase
        if self.step >= phase.end:  # beyond it, where training.steps was lowered since the save
            raise StopIteration
        # A training loader is endless, and `iter` does not restart it.
        micro_batches = next(iter(self._loaders.train(phase)))
        self._objectives[phase.index].step = self.step - phase.first_step
        self.step += 1
        if self.step == phase.end:
            self._loaders.end(phase)
        return micro_batches

    def start_at(self, step: int) -> None:
        """Moves to the batch that follows `step` steps; for new batches only.

        Raises:
            ConfigError: the experiment has fewer steps.
        """
        last = self._loaders.phases[-1].end
        if not 0 <= step <= last:
            raise ConfigError(
                f"start_step is {step}, and training.steps is {last}; use 0 to {last}"
            )
        self._loaders.start_at(step)
        self.step = step

    def heldout(self) -> Loader:
        """Opens the held-out documents: a single pass, which `score` closes."""
        return self._loaders.heldout(self.phase)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data order, for a checkpoint."""
        order, data = self._loaders.state(self.step)
        return {"step": self.step, "order": order, "data": data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where other batches were saved; ranks and micro-batches may differ.

        Raises:
            CheckpointError, DataError: the data or its order has changed.
        """
        # The position is of one data order; a phase of another length begins another one.
        data: LoaderState = state["data"]
        self._loaders.resume(state["step"], state["order"], data)
        self.step = state["step"]

    def close(self) -> None:
        """Stops the background threads."""
        self._loaders.close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_batches(
    experiment: Experiment, rank: int = 0, world_size: int = 1, start_step: int = 0
) -> Batches:
    """Opens the training batches of an experiment as one rank of a run gets them.

    No process group is needed: each rank reads its own examples of each global batch.

    Args:
        rank, world_size: this process gets part `rank` of `world_size` of each global batch.
        start_step: number of steps to skip, which takes no time.

    Raises:
        ConfigError: there is no such rank or step, or the dataset does not fit the objective.
        DataError: the dataset cannot be read.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank} and world_size is {world_size}; use 0 to world_size - 1")
    if experiment.data.on_corrupt == "skip" and world_size > 1:
        raise ConfigError(
            "data.on_corrupt is skip, and ranks must agree on what they skip; set it to stop, or "
            "use the batches of open_parts, whose ranks are connected"
        )
    dataset = experiment.data.open()
    batches = Batches(
        _loaders(experiment, dataset, Replica(rank, world_size)),
        build_objectives(experiment, dataset),
    )
    batches.start_at(start_step)
    return batches


def _loaders(
    experiment: Experiment, dataset: AnyDataset, replica: Replica, **options: Any
) -> PhaseLoaders:
    open_split = partial(open_loader, experiment, dataset, replica, **options)
    return PhaseLoaders(experiment.resolved_phases(), open_split)


class LoopCheckpoints:
    """Checkpoints of a loop: parameters, optimizer state and the position in the data.

    `samestep export`, `fill`, `evaluate` and others read them like a run's. `samestep train` does
    not continue them.

    Attributes:
        notes: what the loop saved with the checkpoint that it resumed from; empty at the start.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        description: Meta,
    ) -> None:
        self._checkpointer, self._strategy, self._optimizer = checkpointer, strategy, optimizer
        self._batches, self._description = batches, description
        self.notes: Mapping[str, Any] = {}
        # The step that was saved or restored last, and its notes as JSON.
        self._last: tuple[int, str] | None = None
        # State that is created in the first step, from its gradient or learning rate.
        self._lazy = groups.stateless(optimizer)

    def save(self, notes: Mapping[str, Any] | None = None) -> None:
        """Starts a checkpoint of the state after this step. Collective.

        Each step is saved once. Saving the step that was saved or restored last does nothing.

        Args:
            notes: what else the loop needs to resume, as JSON; the same on all ranks.

        Raises:
            SamestepError: a parameter is not finite, or the step is saved with other notes.
        """
        position = self._batches.state_dict()
        step, order, data = position["step"], position["order"], position["data"]
        if self._is_saved(step, notes):
            return
        # Before the state is copied: a useless checkpoint would push out a valid one.
        self._require_finite(step)
        # A checkpoint has the whole state, which some optimizers create in their first step.
        groups.prime(self._optimizer)
        tensors, meta = capture(self._strategy, self._optimizer, self._description, order, data)
        self._checkpointer.save(step, tensors, {**meta, "notes": dict(notes or {})})
        self._last = (step, _as_json(notes))
        self._forget_primed()

    def _is_saved(self, step: int, notes: Mapping[str, Any] | None) -> bool:
        """Whether a step is saved already; its checkpoint is complete then, and stays as it is.

        Raises:
            SamestepError: it is saved with other notes.
        """
        if self._last is None or self._last[0] != step:
            return False
        # Its save may still be running, and only a complete one counts.
        self._checkpointer.settle()
        if self._checkpointer.failed is not None:
            return False
        if notes is not None and _as_json(notes) != self._last[1]:
            raise SamestepError(
                f"step {step} is saved already, with the notes {self._last[1]}, and its notes "
                f"would be {_as_json(notes)} now. Save a step once, when its notes are complete"
            )
        return True

    def restore(self, step: int | None = None) -> None:
        """Goes back to a checkpoint, the newest by default, of any world size. Collective.

        The checkpoints after a `step` are removed, so that a restart continues from it, too.

        Raises:
            CheckpointError: there is none, or it belongs to another model or data order.
        """
        # Read first: if it is damaged, the later checkpoints stay.
        self._load(self._checkpointer.open_step(step))
        if step is not None:
            self._checkpointer.discard_after(step)

    def _load(self, opened: OpenedStep) -> None:
        meta = opened.meta
        # Tensors are filled in place, so the state must exist, also before the first step.
        groups.prime(self._optimizer)
        try:
            found = Found(self._checkpointer, opened)
            changes = restore(found, self._strategy, self._optimizer, self._description)
            self._batches.load_state_dict(meta)
            self._description = {**self._description, "start": meta.get("start")}
            self._last = (meta["step"], _as_json(meta.get("notes")))
        finally:
            self._forget_primed()
        if changes:
            logger.info("continuing with %s", changes)
        self.notes = meta.get("notes", {})

    def wait(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
            CheckpointError: saving it failed.
        """
        self._checkpointer.wait()

    def _forget_primed(self) -> None:
        """Leaves the optimizer's state to its first step again, if that is the next one."""
        if self._batches.step == 0:
            for parameter in self._lazy:
                self._optimizer.state.pop(parameter, None)

    def _require_finite(self, step: int) -> None:
        """Stops a loop before valid checkpoints are replaced by useless ones."""
        parameters = self._strategy.parameters.items()
        trained = {name: each for name, each in parameters if each.requires_grad}
        # One collective for all of them; the ranks decide alike.
        norms = whole_norms(trained.values(), next(iter(trained.values()))).tolist()
        for name, norm in zip(trained, norms, strict=True):
            if not math.isfinite(norm):
                raise SamestepError(
                    f"the parameter {name} is not finite after step {step}, so it is not saved. "
                    "The checkpoints before it are valid: lower the learning rate or the maximum "
                    "gradient norm, and start again"
                )


def _as_json(notes: Mapping[str, Any] | None) -> str:
    return json.dumps(dict(notes or {}), sort_keys=True)


@dataclass(frozen=True)
class Parts:
    """The parts of a run.

    Attributes:
        strategy: partitions parameters and gradients; its `world` has the rank and the world size.
        model: in train mode.
        optimizer: of the parameters in `strategy.parameters`.
        batches: this rank's, from where the newest checkpoint left off.
        checkpoints: saves and restores the parts above.
    """

    strategy: Strategy
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    checkpoints: LoopCheckpoints


@contextmanager
def open_parts(
    experiment: Experiment, build_optimizer: BuildOptimizer | None = None
) -> Iterator[Parts]:
    """Opens the parts of a run, from its newest checkpoint if there is one. Collective.

    In one process, or in each process that torchrun starts. The output folder is locked, and the
    last checkpoint is complete when the context ends, also by an error.

    Args:
        build_optimizer: takes (name, parameter) pairs and returns a `torch.optim.Optimizer` that is
            stepped once for each batch; None builds the experiment's. The learning rate is left to
            the loop.

    Raises:
        ConfigError, DataError, CheckpointError: as `samestep train` raises them.
    """
    with (
        open_strategy(experiment) as strategy,
        only_writer_of(experiment, strategy.world.rank) as lease,
    ):
        if strategy.accelerator.compiles:
            raise ConfigError(
                f"{strategy.accelerator.description} compiles whole steps, which a custom "
                "loop does not mark; use samestep.train, or accelerator=cpu"
            )
        sizes = [phase.micro_batch_size for phase in experiment.resolved_phases()]
        if "auto" in sizes and strategy.accelerator.memory() and strategy.world.rank == 0:
            logger.warning(
                "micro_batch_size is auto, which open_parts does not measure: it takes small "
                "micro-batches. Set training.micro_batch_size to the number that a run logs"
            )
        dataset = experiment.data.open()
        checkpointer = open_checkpointer(experiment, strategy.world, lease)
        newest = checkpointer.open_latest()
        checkpointer.continue_from(None if newest is None else newest.step)
        weights = experiment.init_from if newest is None or experiment.freezes else None
        prepared = prepare(
            experiment, dataset, strategy, weights, newest is not None, build_optimizer
        )
        if any(group.get("begins") for group in prepared.optimizer.param_groups):
            raise ConfigError(
                "optimizer.unfreeze_every is set, and your own loop takes the steps. "
                "Set it to null, or use samestep.train."
            )
        loaders = _loaders(experiment, dataset, strategy.replica, world=strategy.world)
        with Batches(loaders, prepared.objectives) as batches:
            checkpoints = LoopCheckpoints(
                checkpointer, strategy, prepared.optimizer, batches, prepared.description
            )
            if strategy.world.rank == 0:
                write_description(experiment, dataset)
            if newest is not None:
                checkpoints._load(newest)
            prepared.model.train()
            try:
                yield Parts(strategy, prepared.model, prepared.optimizer, batches, checkpoints)
                checkpoints.wait()
            finally:
                # While the folder is locked. After an error, ranks agree on nothing anymore.
                checkpointer.join()
