"""Announcements: the largest of all ranks' numbers for a block, through the run's store."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore

from data_pipeline.reading.config import Config
from tests.processes import run_ranks
from trainer.strategies.announcements import Announcements
from trainer.strategies.world import World

BLOCKS = 12
AHEAD = 2


def number(rank: int, block: int) -> int:
    return {(1, 5): 3, (2, 5): 7, (0, 9): 1}.get((rank, block), 0)


def test_all_ranks_read_the_largest_number_and_begin_no_collective() -> None:
    for first, second, groups in run_ranks(3, announcing_rank):
        assert first == [7 if block == 5 else int(block == 9) for block in range(BLOCKS)]
        assert second == 4
        assert groups == 1


def announcing_rank() -> tuple[list[int], int, int]:
    world = World.start(60)
    world.connect("gloo")
    # The blocks of two loaders have equal numbers.
    data = Config(path="unused", on_corrupt="skip", prefetch=AHEAD)
    loader, other = (world.announcements(data) for _ in range(2))
    assert loader is not None
    assert other is not None
    other.announce(0, 4 if world.rank == 2 else 1)
    found = []
    for block in range(BLOCKS + AHEAD):
        loader.announce(block, number(world.rank, block))
        if block >= AHEAD:
            found.append(loader.largest(block - AHEAD))
    groups = len(dist.distributed_c10d._world.pg_map)
    second = other.largest(0)
    world.close()
    return found, second, groups


def test_the_store_keeps_a_few_blocks_only() -> None:
    """A run has millions of blocks, and the store of rank 0 holds all keys in memory."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    before = store.num_keys()
    each = [Announcements(store, store.clone(), "loader 1", 2, AHEAD) for _ in range(2)]
    for block in range(100):
        for rank, announcements in enumerate(each):
            announcements.announce(block, 5 * rank)
        assert [announcements.largest(block) for announcements in each] == [5, 5]
    assert store.num_keys() - before <= 3 * (AHEAD + 1)


def test_one_rank_announces_nothing() -> None:
    assert World.start(60).announcements(Config(path="unused", on_corrupt="skip")) is None
