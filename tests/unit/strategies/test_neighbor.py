"""Ranks that watch each other."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from trainer.strategies.neighbor import Neighbor, own_address


def test_the_end_of_a_rank_is_noticed_by_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    store = HashStore()
    first = Neighbor(store, 0, 3)
    assert not first.dies_within(0.01)  # it has not come yet
    second, third = Neighbor(store, 1, 3), Neighbor(store, 2, 3)
    assert not any(rank.dies_within(0.05) for rank in (first, second, third))
    third.close()
    assert second.dies_within(5)
    assert second.rank == 2
    assert not first.dies_within(0.05)
    first.close()
    second.close()


def test_the_address_for_others() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"
    assert own_address("localhost", 1) == "localhost"
    assert own_address("127.0.1.1", 1) == "127.0.1.1"  # as a machine's own name may lead to


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert not Neighbor(HashStore(), 0, 1).dies_within(0.01)
