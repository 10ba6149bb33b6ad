"""Digests of tensors: each element counts, wherever it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.partition import Segment, SegmentParameter
from trainer.partition.digest import digests

FACTOR = 0x9E3779B97F4A7C15


def by_definition(values: np.ndarray) -> str:
    bits = values.view(f"i{values.itemsize}").ravel()
    total = sum(int(bit) * ((i * FACTOR) % 2**64 | 1) for i, bit in enumerate(bits))
    return f"{total % 2**64:016x}"


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.uint8])
def test_is_the_sum_by_definition(dtype: type) -> None:
    values = (np.random.default_rng(1).normal(size=(7, 11)) * 50).astype(dtype)
    assert digests({"x": torch.from_numpy(values)}) == {"x": by_definition(values)}


def test_blocks_add_up() -> None:
    """More elements than a block has."""
    values = np.random.default_rng(2).normal(size=150_000).astype(np.float32)
    assert digests({"x": torch.from_numpy(values)}) == {"x": by_definition(values)}


def test_every_bit_and_place_counts() -> None:
    values = torch.zeros(3, 4)
    found = {digests({"x": values})["x"]}
    for place in range(12):
        for bit in range(31):
            changed = values.clone()
            changed.view(torch.int32).view(-1)[place] ^= 1 << bit
            found.add(digests({"x": changed})["x"])
    assert len(found) == 1 + 12 * 31


def test_nothing() -> None:
    assert digests({}) == {}
    assert digests({"x": torch.zeros(0), "y": torch.ones(())})["x"] == "0" * 16


def test_segments_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, of which the first ends in the middle of a row."""
    whole, sums = torch.randn(5, 3), []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda part, group: sums.append(part[0]))
    for start, stop in ((0, 8), (8, 15)):
        segment = Segment((5, 3), start, group="both")  # type: ignore[arg-type]
        digests({"x": SegmentParameter(whole.view(-1)[start:stop], segment)})
    assert f"{int(sum(sums)) % 2**64:016x}" == digests({"x": whole})["x"]
