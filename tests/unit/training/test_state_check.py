"""Hashes of the bits of tensors, and who is in the minority."""

from __future__ import annotations

import pytest
import torch

from trainer.training.observers.state_check import fingerprint, odd_ones_out


@pytest.mark.parametrize("shape", [(1,), (127,), (128, 3), (1000, 7)])
def test_every_flipped_bit_changes_the_hash(shape: tuple[int, ...]):
    tensor = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)
    before = fingerprint([tensor])
    bits = tensor.view(-1).view(torch.int32)
    for element in (0, bits.numel() // 2, bits.numel() - 1):
        for bit in range(32):
            flip = torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
            bits[element] ^= flip
            assert fingerprint([tensor]) != before
            bits[element] ^= flip
    assert fingerprint([tensor]) == before


def test_swapped_elements_and_rows_of_other_tensors_change_it():
    a, b = torch.arange(300.0), torch.arange(300.0)
    b[7], b[8] = 8.0, 7.0
    hashes = fingerprint([a, b, torch.empty(0), torch.zeros(300)])
    assert len(set(hashes[:3].tolist())) == 3
    assert hashes[2] == hashes[3] == 0


@pytest.mark.parametrize(
    ("values", "partitions", "odd"),
    [
        ([5, 5, 5], 1, []),
        ([5, 6, 5], 1, [1]),
        ([5, 6], 1, [0, 1]),
        ([5, 6, 5, 6], 1, [0, 1, 2, 3]),
        ([5, 6, 5, 6], 2, []),
        ([5, 6, 5, 7], 2, [1, 3]),
        ([5, 6, 5, 6, 5, 7], 2, [5]),
    ],
)
def test_the_minority_is_odd(values: list[int], partitions: int, odd: list[int]):
    assert odd_ones_out(values, partitions) == odd
