"""Skip-gram and CBOW against their formulas, pair by pair."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.vectors.corpora import random_text
from trainer.vectors.windows import Negatives, Windows, windows
from trainer.vectors.word2vec import Batch, batch_of, initial_vectors, step

V, D, K = 12, 6, 3
TEXT = random_text(200, V, seed=1)
NEGATIVES = Negatives(np.bincount(TEXT[TEXT >= 0], minlength=V) + 1)


def vectors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = torch.randn(2, V, D, generator=generator, dtype=dtype)
    return inputs, outputs


def found_and_batch(cbow: bool) -> tuple[Windows, Batch]:
    found = windows(TEXT, 0, np.ones(V), 3, seed=0, epoch=0)
    batch = batch_of(found, 0, len(found.center), NEGATIVES, K, cbow)
    return found, batch


def expected_loss(found: Windows, batch: Batch, inputs: Tensor, outputs: Tensor, cbow: bool):
    """The sum over predictions, written as in the paper."""
    words = found.words
    if cbow:
        predictions = [
            (words[center], inputs[[words[context] for _, context in own]].mean(0))
            for center, own in itertools.groupby(
                zip(found.center.tolist(), found.context.tolist(), strict=True), lambda p: p[0]
            )
        ]
    else:
        predictions = [
            (words[context], inputs[words[center]])
            for center, context in zip(found.center, found.context, strict=True)
        ]
    assert len(predictions) == len(batch.targets)
    total = torch.zeros((), dtype=inputs.dtype)
    for (right, hidden), targets in zip(predictions, batch.targets.tolist(), strict=True):
        assert targets[0] == right
        total = total - torch.log(torch.sigmoid(hidden @ outputs[right]))
        for random in targets[1:]:
            if random != right:
                total = total - torch.log(torch.sigmoid(-hidden @ outputs[random]))
    return total


@pytest.mark.parametrize("cbow", [False, True])
def test_loss_and_gradients(cbow: bool) -> None:
    found, batch = found_and_batch(cbow)
    assert (batch.weight == 0).any()  # some random word is the right one
    inputs, outputs = (each.requires_grad_() for each in vectors())
    expected = expected_loss(found, batch, inputs, outputs, cbow)
    expected.backward()
    moved = [each.detach().clone() for each in (inputs, outputs)]
    before = step(*moved, batch, rate=0.5)
    assert before == pytest.approx(float(expected.detach()), rel=1e-12)
    for after, start in zip(moved, (inputs, outputs), strict=True):
        assert start.grad is not None
        torch.testing.assert_close(after, start.detach() - 0.5 * start.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cbow", [False, True])
def test_batches_are_parts_of_a_block(cbow: bool) -> None:
    found, whole = found_and_batch(cbow)
    starts = np.flatnonzero(np.diff(found.center, prepend=-1)) if cbow else np.arange(10**6)
    middle = int(starts[20])
    parts = [
        batch_of(found, *bounds, NEGATIVES, K, cbow)
        for bounds in ((0, middle), (middle, len(found.center)))
    ]
    for name in ("inputs", "targets", "weight"):
        together = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(together, getattr(whole, name)), name
    assert parts[1].row[0] == 0


def test_every_pair_has_its_own_random_words() -> None:
    found, batch = found_and_batch(cbow=False)
    same_center = np.flatnonzero(np.diff(found.center) == 0)
    random = batch.targets[:, 1:]
    equal = (random[same_center] == random[same_center + 1]).double().mean()
    assert equal < 0.4  # 12 words of different frequency; 1 if a center's pairs shared them


def test_initial_vectors() -> None:
    start = initial_vectors(300, 50, seed=0)
    assert start["inputs"].abs().max() <= 0.5 / 50
    assert start["inputs"].std() == pytest.approx(1 / 50 / 12**0.5, rel=0.02)
    assert not start["outputs"].any()
    assert torch.equal(start["inputs"], initial_vectors(300, 50, seed=0)["inputs"])
    assert not torch.equal(start["inputs"], initial_vectors(300, 50, seed=1)["inputs"])
