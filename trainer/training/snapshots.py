"""Checkpoints in memory: taken every few steps, kept outside the workers on two machines, and lost with both.

They are checkpoints in every respect but where they lie: in the keepers (`trainer.storage.keeper`) that the agents of
an elastic run serve. Workers that are started again find there what is newer than the newest checkpoint on disk.
"""

from __future__ import annotations

import logging
import os

from trainer.checkpoint.files import Url
from trainer.checkpoint.manager import Checkpointer, Config
from trainer.checkpoint.together import gather
from trainer.storage import keeper, kept
from trainer.strategies.world import World
from trainer.training.experiment import Experiment

logger = logging.getLogger(__name__)


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
