"""Where the state of a run is saved, and after which steps."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from trainer.checkpoint.files import Url
from trainer.checkpoint.manager import Checkpointer, Config
from trainer.checkpoint.together import gather
from trainer.storage import keeper, kept
from trainer.strategies.world import World
from trainer.training.experiment import Experiment

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run.

    Attributes:
        durable: those on disk or in an object store.
        snapshots: those in the memory of the machines, taken between the others; None takes none.
    """

    durable: Checkpointer
    snapshots: Checkpointer | None = None

    def due(self, step: int, ending: bool) -> list[Checkpointer]:
        """Where to save after a step, if anywhere; a run ends with a durable checkpoint only."""
        due = [self.durable] if ending or step % self.durable.config.every == 0 else []
        if self.snapshots is not None and not ending and step % self.snapshots.config.every == 0:
            due.append(self.snapshots)
        return due

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Reserves the host memory for saves of such tensors."""
        self.durable.reserve(tensors)
        if self.snapshots is not None:
            self.snapshots.reserve(tensors)

    def discard_after(self, step: int) -> None:
        """Removes what was saved after a step, so that a restart goes on from there, too."""
        self.durable.discard_after(step)
        if self.snapshots is not None:
            self.snapshots.discard_after(step)


def open_snapshots(experiment: Experiment, world: World) -> Checkpointer | None:
    """The snapshots of a run, for all ranks together; None if it takes none. Collective."""
    every = experiment.checkpoint.snapshot_every
    if every is None:
        return None
    addresses = gather(os.environ.get(keeper.ENVIRONMENT, ""), world.size)
    if "" in addresses:
        if world.rank == 0:
            logger.warning(
                "no snapshots are taken: only `samestep train --elastic` has a place to keep them"
            )
        return None
    ring = list(dict.fromkeys(addresses))
    return Checkpointer(
        Url(kept.store(ring, ring.index(addresses[world.rank]))),
        Config(every=every, asynchronous=experiment.checkpoint.asynchronous),
        rank=world.rank,
        world_size=world.size,
        peer_timeout=experiment.training.collective_timeout / 2,
    )


def newest(
    checkpointer: Checkpointer, snapshots: Checkpointer | None
) -> tuple[Checkpointer, int | None]:
    """Where a run goes on from, and at which step: a sound snapshot, unless a sound checkpoint is newer. Collective.

    Raises:
        CheckpointError: there are checkpoints, but no sound one and no sound snapshot.
    """
    step = None if snapshots is None else snapshots.latest(least=0)
    if snapshots is None or step is None:
        return checkpointer, checkpointer.latest()
    on_disk = checkpointer.latest(least=step + 1)
    return (snapshots, step) if on_disk is None else (checkpointer, on_disk)
