"""A run's checkpoints: where, after which steps, what is in them, and what may have changed since.

They are durable checkpoints and in-memory snapshots. A snapshot is a checkpoint in the memory of
two machines, taken every few steps between the durable ones. The agents of an elastic run keep it
outside of the workers (`samestep.storage.keeper`), so restarted workers find it; it is lost when
both machines are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data_pipeline.order.exclusions import merged
from samestep.config import Tree, decode, differences, to_tree
from samestep.config.tree import of_kinds
from samestep.errors import CheckpointError, ConfigError
from samestep.examples import LoaderState
from samestep.storage.urls import KEEPER
from trainer.checkpoint.collective import gather
from trainer.checkpoint.manager import Checkpointer, Config
from trainer.checkpoint.meta import OpenedStep
from trainer.optim import groups
from trainer.strategies import Strategy
from trainer.strategies.world import World
from trainer.training.experiment import Experiment
from trainer.training.start_record import alters_model
from trainer.training.state import Meta, state_tensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint of this run, as its folder was read once, and the holder of it.

    Attributes:
        source: reads its tensors.
        opened: its description and the paths of its files.
    """

    source: Checkpointer
    opened: OpenedStep


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run.

    Attributes:
        durable: on disk or in an object store.
        snapshots: in the memory of the machines; None takes none.
    """

    durable: Checkpointer
    snapshots: Checkpointer | None = None

    def due(self, step: int, is_best: bool, ending: bool) -> list[Checkpointer]:
        """Where to save after a step, if anywhere.

        Args:
            is_best: whether the step has the best evaluation; that needs a durable checkpoint.
            ending: whether the run ends with this step. Snapshots are lost when the machines are
                given back, so it then needs a durable checkpoint, and no snapshot.
        """
        is_durable = ending or is_best or step % self.durable.config.every == 0
        due = [self.durable] if is_durable else []
        if self.snapshots is not None and not ending and step % self.snapshots.config.every == 0:
            due.append(self.snapshots)
        return due

    def _all(self) -> list[Checkpointer]:
        return [self.durable] if self.snapshots is None else [self.durable, self.snapshots]

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Reserves the host memory for saving these tensors."""
        for each in self._all():
            each.reserve(tensors)

    def copied(self) -> None:
        """Waits until tensors that are being saved have been copied, and may change."""
        for each in self._all():
            each.copied()

    @property
    def keeps_each_step(self) -> bool:
        """Whether there is a snapshot of each step."""
        return self.snapshots is not None and self.snapshots.config.every == 1

    def wait_for_snapshot(self) -> None:
        """Waits until the snapshot of the last step is written, if there is one of each step.

        To be called before an update. Rank 0 waits for the commit, the others for their own files:
        they can take the update before rank 0 does, but not get past its next collective. So a
        failure costs the step that is being taken and at most one finished step. Does not raise if
        the snapshot failed.
        """
        if self.snapshots is not None and self.keeps_each_step:
            self.snapshots.join()

    def discard_after(self, step: int) -> None:
        """Removes what was saved after a step, so a restart also continues from that step."""
        for each in self._all():
            each.discard_after(step)

    def newest(self) -> Found | None:
        """Finds the newest valid checkpoint, if there is one. Collective.

        A snapshot wins over a durable checkpoint of the same step, as memory is faster.

        Raises:
            CheckpointError: there are checkpoints, but no valid one and no valid snapshot.
        """
        # This verifies checksums, newest step first. On disk that takes long, so it looks only at
        # steps after the snapshot's.
        snapshot = None if self.snapshots is None else self.snapshots.open_latest(least=0)
        least = None if snapshot is None else snapshot.step + 1
        on_disk = self.durable.open_latest(least=least)
        if on_disk is not None:
            return Found(self.durable, on_disk)
        if self.snapshots is None or snapshot is None:
            return None
        return Found(self.snapshots, snapshot)


def open_snapshots(experiment: Experiment, world: World) -> Checkpointer | None:
    """Opens the snapshots of a run, or None if it takes none. Collective."""
    every = experiment.checkpoint.snapshot_every
    if every is None:
        return None
    addresses = gather(os.environ.get(KEEPER, ""), world.size)
    if "" in addresses:
        if world.rank == 0:
            logger.warning(
                "no snapshots are taken: only `samestep train --elastic` has a place to keep them"
            )
        return None
    from samestep.storage import keeper
    from trainer.checkpoint.urls import Url

    # One address per rank, one keeper per machine: ranks of a machine share theirs. With 2 + 2
    # ranks, addresses is [a, a, b, b] and the ring is [a, b].
    ring = list(dict.fromkeys(addresses))
    return Checkpointer(
        Url(keeper.use(ring, ring.index(addresses[world.rank]), keeper.own_secret())),
        Config(every=every, asynchronous=experiment.checkpoint.asynchronous),
        rank=world.rank,
        world_size=world.size,
        peer_timeout=experiment.training.collective_timeout / 2,
    )


def capture(
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    description: Meta,
    order: int,
    data: LoaderState,
) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Returns the tensors that steps change, and the meta that every checkpoint has. Collective.

    Args:
        description: how the run is configured.
        order: number of the data order that the last step consumed.
        data: state of its loader.
    """
    # The description is of the start; what steps change is added to it.
    meta = {**description, "order": order, "data": data}
    if strategy.loss_scale is not None:
        meta["loss_scale"] = strategy.loss_scale.state_dict()
    return strategy.to_host(state_tensors(strategy.parameters, optimizer)), meta


def restore(
    found: Found,
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    description: Meta,
) -> str:
    """Restores what `capture` returned, at any world size and under any strategy. Collective.

    Args:
        optimizer: with its state, see `groups.prime`.
        description: how the run is configured now.

    Returns:
        The settings that have changed since the checkpoint, as text.

    Raises:
        CheckpointError: it is damaged, or it belongs to another run.
    """
    meta = found.opened.meta
    # Settings first: of another model they explain more than tensors that do not fit.
    changes = changes_since(meta, description)
    tensors = state_tensors(strategy.parameters, optimizer)
    # Values are written in place. On devices that the host cannot write to, `host` has buffers
    # instead, and `from_host` copies them.
    host = strategy.to_host(tensors, copy=False)
    found.source.fill(host, found.opened)
    strategy.from_host(tensors)
    strategy.refresh()
    # Bias corrections count steps, and some optimizers keep the count outside of tensors.
    groups.set_step(optimizer, meta["step"])
    if strategy.loss_scale is not None and "loss_scale" in meta:
        strategy.loss_scale.load_state_dict(meta["loss_scale"])
    return changes


def stored_config(meta: Meta) -> Tree:
    """The configuration in a checkpoint; settings that did not exist then have their defaults."""
    stored: Tree = meta["config"]
    try:
        return to_tree(decode(Experiment, stored))
    except ConfigError:  # it has a setting that no longer exists
        return stored


def changes_since(meta: Meta, description: Meta) -> str:
    """Lists the settings that have changed since a checkpoint, as "key: old -> new".

    The model (except its dropout and its initial weights), the teacher, the weights of frozen
    parameters, gradual unfreezing and the steps of phases that have begun must not change: the run
    would no longer be one experiment.

    Args:
        description: the keys config, base and teacher as they are now.

    Raises:
        ConfigError: the model, gradual unfreezing or a phase that has begun has changed;
            `data.exclude` has, but its data order has ended; or what the bits of an exact run
            depend on has changed.
        CheckpointError: the teacher or the frozen weights have changed.
    """
    # By identity, not by path: the same weights may have been moved.
    before, now = meta.get("base"), description.get("base")
    if before is not None and now is not None and before["identity"] != now["identity"]:
        raise CheckpointError(
            f"the run began with the frozen weights of {before['path']}, and init_from, "
            f"{now['path']}, has others; set init_from={before['path']}, and restore what it held "
            "if that has changed"
        )
    teacher, new_teacher = meta.get("teacher"), description["teacher"]
    if teacher is not None and new_teacher is None:
        raise CheckpointError(
            f"the run has learned from a teacher until step {meta['step']}, and the objective has "
            "none now. Put it back, or start a new run with init_from"
        )
    if teacher != new_teacher:
        guides = description["config"]["objective"].get("guide") is not None
        raise CheckpointError(
            f"objective.{'guide.path' if guides else 'teacher'} names other weights than the run "
            f"has learned from until step {meta['step']}. Name those weights (by their own "
            "checkpoint if the teacher's run has continued), or start a new run with init_from"
        )
    stored, config = stored_config(meta), description["config"]
    changes = differences(stored, config)
    shown = of_kinds(changes)
    texts = {key: f"{key}: {old} -> {new}" for key, (old, new) in shown.items()}
    of_model = [
        text for key, text in texts.items() if key.startswith("model.") and alters_model(key)
    ]
    if of_model:
        raise ConfigError(
            f"the checkpoint is of another model ({', '.join(of_model)}). Use its settings, or "
            "another output"
        )
    if unfreezing := texts.get("optimizer.unfreeze_every"):
        raise ConfigError(
            f"layers have begun to train by another setting ({unfreezing}), and their moments "
            "depend on it. Use the former one, or start a new run with init_from"
        )
    _check_phases(meta["step"], stored, config)
    excluded = merged(stored["data"].get("exclude", ()))
    added = [each for each in config["data"]["exclude"] if merged([*excluded, each]) != excluded]
    if meta.get("order", 0) > 0 and added:
        raise ConfigError(
            f"data.exclude has new examples, {added}. Its numbers are of the first data order, and "
            f"the checkpoint of step {meta['step']} is in a later one: restore the setting"
        )
    if config["training"]["exact"] == "bitwise":
        _check_bitwise(meta, description, texts)
    return ", ".join(texts.values())


def _check_phases(step: int, stored: Tree, config: Tree) -> None:
    """Rejects other steps of the phases that have begun: past steps would be of other phases."""
    before, now = (
        [phase["steps"] for phase in settings.get("phases", ())] for settings in (stored, config)
    )
    # Without phases, the steps were one phase: the first one must have all of them.
    if not before and now and now[0] < step:
        raise ConfigError(
            f"phases.0.steps is {now[0]}, and the run has taken {step} steps without phases. "
            f"Set phases.0.steps to {step} or more."
        )
    first = 0
    for index, steps in enumerate(before):
        if first >= step:
            return
        if index >= len(now) or now[index] != steps:
            is_now = f"has {now[index]}" if index < len(now) else "is gone"
            raise ConfigError(
                f"phases.{index} had {steps} steps and {is_now}, and it has begun: the checkpoint "
                f"is of step {step}. Restore phases.{index}.steps={steps}; later phases may "
                "change, and be added."
            )
        first += steps


def _check_bitwise(meta: Meta, description: Meta, changes: Mapping[str, str]) -> None:
    """Rejects changes that would change the bits of a run that sums exactly."""
    if "training.exact" in changes:
        return  # the run becomes exact at this step
    if precision := changes.get("training.precision"):
        raise ConfigError(
            f"training.exact is bitwise, and another precision gives other bits ({precision}). Use "
            "the former one, or start a new run with init_from."
        )
    # Phases that were added since have no former size.
    old, new = meta.get("micro_batch_sizes", []), description.get("micro_batch_sizes", [])
    for index, (size, other) in enumerate(zip(old, new, strict=False)):
        if size != other:
            raise ConfigError(
                "training.exact is bitwise, and the size of its units has changed "
                f"(micro_batch_size of phase {index}: {size} -> {other}). Use the former size, or "
                "start a new run."
            )
    before, now = meta.get("arithmetic", {}), description["arithmetic"]
    others = [f"{before[key]} -> {now[key]}" for key in before if before[key] != now[key]]
    if others:
        raise ConfigError(
            f"training.exact is bitwise, and other hardware or software would give other bits "
            f"({', '.join(others)}). Continue where the run began, with as many threads "
            "(accelerator.threads), or set training.exact=tolerance."
        )
