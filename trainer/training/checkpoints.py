"""Where a run saves its state and after which steps: durable checkpoints and in-memory snapshots.

A snapshot is a checkpoint in the memory of two machines, taken every few steps between the durable
ones. The agents of an elastic run keep it outside of the workers (`trainer.storage.keeper`), so
restarted workers find it; it is lost when both machines are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from trainer.checkpoint.collective import gather
from trainer.checkpoint.files import Url
from trainer.checkpoint.manager import Checkpointer, Config
from trainer.storage import keeper
from trainer.strategies.world import World
from trainer.training.experiment import Experiment

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run.

    Attributes:
        durable: on disk or in an object store.
        snapshots: in the memory of the machines; None takes none.
    """

    durable: Checkpointer
    snapshots: Checkpointer | None = None

    def due(self, step: int, ending: bool) -> list[Checkpointer]:
        """Where to save after a step, if anywhere; a run ends with a durable checkpoint only."""
        # Snapshots are lost when the machines are given back, so the end needs no snapshot.
        due = [self.durable] if ending or step % self.durable.config.every == 0 else []
        if self.snapshots is not None and not ending and step % self.snapshots.config.every == 0:
            due.append(self.snapshots)
        return due

    def _all(self) -> list[Checkpointer]:
        return [self.durable] if self.snapshots is None else [self.durable, self.snapshots]

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Reserves the host memory for saving these tensors."""
        for each in self._all():
            each.reserve(tensors)

    def discard_after(self, step: int) -> None:
        """Removes what was saved after a step, so a restart also continues from that step."""
        for each in self._all():
            each.discard_after(step)

    def newest(self) -> tuple[Checkpointer, int | None]:
        """Finds the newest valid checkpoint: its holder and its step, if there is one. Collective.

        A snapshot wins over a durable checkpoint of the same step, as memory is faster.

        Raises:
            CheckpointError: there are checkpoints, but no valid one and no valid snapshot.
        """
        # `latest` verifies checksums, newest step first. On disk that takes long, so it looks only
        # at steps after the snapshot's.
        step = None if self.snapshots is None else self.snapshots.latest(least=0)
        if self.snapshots is None or step is None:
            return self.durable, self.durable.latest()
        on_disk = self.durable.latest(least=step + 1)
        return (self.snapshots, step) if on_disk is None else (self.durable, on_disk)


def open_snapshots(experiment: Experiment, world: World) -> Checkpointer | None:
    """Opens the snapshots of a run, or None if it takes none. Collective."""
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
    # One address per rank, one keeper per machine: ranks of a machine share theirs. With 2 + 2
    # ranks, addresses is [a, a, b, b] and the ring is [a, b].
    ring = list(dict.fromkeys(addresses))
    return Checkpointer(
        Url(keeper.use(ring, ring.index(addresses[world.rank]))),
        Config(every=every, asynchronous=experiment.checkpoint.asynchronous),
        rank=world.rank,
        world_size=world.size,
        peer_timeout=experiment.training.collective_timeout / 2,
    )
