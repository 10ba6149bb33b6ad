"""GloVe's cost and AdaGrad, and the random order of pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.vectors.corpora import random_text
from trainer.vectors import glove
from trainer.vectors.cooccurrence import Cooccurrences, count, harmonic
from trainer.vectors.glove import Batch, initial_vectors, shuffle, step

V, D, RATE, X_MAX = 15, 4, 0.05, 5.0


@pytest.fixture
def counts(tmp_path: Path) -> Cooccurrences:
    return count(random_text(900, V, seed=1), harmonic(4), V, tmp_path, 10**9)


def batch_of(counts: Cooccurrences) -> Batch:
    ((i, j, number),) = counts.blocks(10**6)
    return Batch(torch.from_numpy(i), torch.from_numpy(j), torch.from_numpy(number))


def vectors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        name: torch.randn(V, D + 1, generator=generator, dtype=torch.float64)
        for name in ("words", "contexts")
    }
    return made | {f"{name}.squares": 1 + value**2 for name, value in made.items()}


def pair_cost(made: dict[str, Tensor], i: int, j: int, x: float) -> Tensor:
    """The cost of a pair, as in the paper."""
    w, b = made["words"][i, :D], made["words"][i, D]
    v, c = made["contexts"][j, :D], made["contexts"][j, D]
    weight = (x / X_MAX) ** 0.75 if x < X_MAX else 1.0
    return 0.5 * weight * (w @ v + b + c - np.log(x)) ** 2


def total_cost(made: dict[str, Tensor], batch: Batch) -> Tensor:
    pairs = zip(batch.i.tolist(), batch.j.tolist(), batch.counts.tolist(), strict=True)
    return torch.stack([pair_cost(made, *pair) for pair in pairs]).sum()


def test_gradients_with_squares_of_one(counts: Cooccurrences) -> None:
    """With all sums of squares at 1, AdaGrad's step is gradient descent."""
    batch, made = batch_of(counts), vectors()
    for name in ("words", "contexts"):
        made[f"{name}.squares"] = torch.ones(V, D + 1, dtype=torch.float64)
        made[name].requires_grad_()
    assert batch.counts.min() < X_MAX < batch.counts.max()
    expected = total_cost(made, batch)
    expected.backward()
    moved = {name: value.detach().clone() for name, value in made.items()}
    assert step(moved, batch, RATE, X_MAX) == pytest.approx(float(expected.detach()), rel=1e-12)
    for name in ("words", "contexts"):
        own = made[name].detach() - RATE * made[name].grad
        torch.testing.assert_close(moved[name], own, rtol=1e-10, atol=1e-12)


def test_adagrad(counts: Cooccurrences) -> None:
    """Pair by pair as in Stanford's program, with the vectors from before the batch.

    In glove.c the rate is a factor of the gradient, whose square is then added to the sum.
    """
    batch, made = batch_of(counts), vectors()
    start = {name: value.clone().requires_grad_() for name, value in made.items()}
    expected = {name: value.clone() for name, value in made.items()}
    pairs = zip(batch.i.tolist(), batch.j.tolist(), batch.counts.tolist(), strict=True)
    for i, j, x in pairs:
        own = [start["words"], start["contexts"]]
        gradients = torch.autograd.grad(pair_cost(start, i, j, x), own)
        for name, gradient in zip(("words", "contexts"), gradients, strict=True):
            expected[name] -= RATE * gradient / made[f"{name}.squares"].sqrt()
            expected[f"{name}.squares"] += (RATE * gradient) ** 2
    moved = {name: value.clone() for name, value in made.items()}
    step(moved, batch, RATE, X_MAX)
    for name, value in expected.items():
        torch.testing.assert_close(moved[name], value, rtol=1e-10, atol=1e-12)


def test_one_pair_at_a_time_is_the_online_algorithm(counts: Cooccurrences) -> None:
    batch, made = batch_of(counts), vectors()
    moved = {name: value.clone() for name, value in made.items()}
    for at in range(40):
        step(moved, Batch(*(column[at : at + 1] for column in batch)), RATE, X_MAX)
        own = {name: value.clone().requires_grad_() for name, value in made.items()}
        pair = pair_cost(own, int(batch.i[at]), int(batch.j[at]), float(batch.counts[at]))
        gradients = torch.autograd.grad(pair, [own["words"], own["contexts"]])
        for name, gradient in zip(("words", "contexts"), gradients, strict=True):
            made[name] -= RATE * gradient / made[f"{name}.squares"].sqrt()
            made[f"{name}.squares"] += (RATE * gradient) ** 2
    for name, value in made.items():
        torch.testing.assert_close(moved[name], value, rtol=1e-10, atol=1e-12)


def test_every_pair_is_shuffled_once_in_any_memory(
    counts: Cooccurrences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glove, "BLOCK", 50)
    contents = []
    for memory in (10**9, 48 * 30, 48):
        shuffle(counts, tmp_path / "shuffled", 0, memory)
        contents.append((tmp_path / "shuffled").read_bytes())
    assert len(set(contents)) == 1
    ((i, j, number),) = counts.blocks(10**6)
    entries = np.frombuffer(contents[0], glove._ENTRY)
    keys = entries["i"].astype(np.int64) * V + entries["j"]
    assert np.array_equal(np.sort(keys), i * V + j)
    assert entries["count"][np.argsort(keys)] == pytest.approx(number)
    assert np.corrcoef(keys, np.arange(len(keys)))[0, 1] == pytest.approx(0, abs=0.15)
    shuffle(counts, tmp_path / "shuffled", 1, 10**9)
    assert (tmp_path / "shuffled").read_bytes() != contents[0]


def test_initial_vectors() -> None:
    start = initial_vectors(200, 9, seed=0)
    for name in ("words", "contexts"):
        assert start[name].shape == (200, 10)
        assert 0.95 * 0.5 / 9 < start[name].abs().max() <= 0.5 / 9
        assert (start[f"{name}.squares"] == 1).all()
    assert not torch.equal(start["words"], start["contexts"])
