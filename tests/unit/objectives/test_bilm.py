"""Bidirectional language modeling: each pair of neighbors is a prediction in both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.outputs import outputs
from tests.unit.objectives.test_causal_lm import VOCABULARY, _examples
from trainer.models import Model
from trainer.models.families import bilm, lstm
from trainer.models.recurrent.model import RecurrentConfig
from trainer.objectives import Objective
from trainer.objectives.kinds import causal_lm
from trainer.objectives.kinds.bilm import Config

SIZES = {"layers": 2, "hidden_size": 16, "proj_size": 0, "embedding_width": 16}
SHAPE: dict[str, Any] = {**SIZES, "vocab_size": 50, "dropout": 0.0}


def filled(config: RecurrentConfig) -> Model:
    model, generator = config.build().eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def model_and_batch(
    z_loss: float = 0.0,
) -> tuple[Model, Objective, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = filled(bilm.Config(**SHAPE))
    objective = Config(z_loss=z_loss).build(VOCABULARY)
    arrays = objective.collate(_examples(isolated=True), 12)
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    totals = {name: torch.tensor(value) for name, value in objective.weights(arrays).items()}
    return model, objective, batch, totals


def test_batches_are_those_of_causal_lm() -> None:
    ours = Config().build(VOCABULARY).collate(_examples(isolated=True), 12)
    theirs = causal_lm.Config().build(VOCABULARY).collate(_examples(isolated=True), 12)
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_the_loss_is_the_mean_of_both_directions(z_loss: float) -> None:
    """[CLS] 10 11 12 [SEP] and [CLS] 13 14 [SEP] are 7 pairs, each predicted twice."""
    model, objective, batch, totals = model_and_batch(z_loss)
    assert totals == {"lm": 7.0}
    loss = objective.loss(model, batch, totals)
    tokens = batch["tokens"][0].long()
    following, previous = outputs(
        model, "next_tokens", "previous_tokens", tokens=tokens[None], segments=batch["segments"][:1]
    )
    assert previous.shape == (1, 11, 50)
    pairs = [0, 1, 2, 3, 5, 6, 7]  # the left token of each
    left, right = tokens[pairs], tokens[[at + 1 for at in pairs]]
    forward = F.cross_entropy(following[0, pairs], right)
    backward = F.cross_entropy(previous[0, pairs], left)
    means = {name: total / weight for name, (total, weight) in loss.metrics.items()}
    torch.testing.assert_close(means["forward_loss"], forward.detach())
    torch.testing.assert_close(means["backward_loss"], backward.detach())
    torch.testing.assert_close(means["loss"], (forward + backward).detach() / 2)
    assert 0 <= means["accuracy"] <= 1
    log_z = torch.stack([following[0, pairs].logsumexp(-1), previous[0, pairs].logsumexp(-1)])
    penalty = z_loss * log_z.square().mean()
    torch.testing.assert_close(loss.total, (forward + backward) / 2 + penalty)
    assert ("z_loss" in means) == (z_loss > 0)
    if z_loss:
        torch.testing.assert_close(means["z_loss"], penalty.detach())


@pytest.mark.parametrize("kind", ["lstm", "bilm"])
def test_packed_rows_have_the_loss_of_separate_rows(kind: str) -> None:
    """Chunks of 3, 2 and 1 tokens, in one row and in rows of their own."""
    own: dict[str, Any] = {**SHAPE, "residual": True}
    config = lstm.Config(**own) if kind == "lstm" else bilm.Config(**own)
    settings = causal_lm.Config() if kind == "lstm" else Config()
    model, objective = filled(config), settings.build(VOCABULARY)
    packed = replace(
        _examples(isolated=True),
        row=np.zeros(3, dtype=np.int64),
        column=np.array([1, 6, 10]),
        key=np.zeros(1, dtype=np.uint64),
        weight=np.ones(1, dtype=np.float32),
    )
    apart = replace(
        packed,
        row=np.arange(3),
        column=np.ones(3, dtype=np.int64),
        key=np.zeros(3, dtype=np.uint64),
        weight=np.ones(3, dtype=np.float32),
    )
    losses, gradients = [], []
    for examples, width in ((packed, 14), (apart, 14), (apart, 6)):
        arrays = objective.collate(examples, width)
        totals = {name: torch.tensor(value) for name, value in objective.weights(arrays).items()}
        assert totals == {"lm": 9.0}
        model.zero_grad()
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        loss = objective.loss(model, batch, totals).total
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad for parameter in model.parameters()])
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-5, atol=1e-6)


def test_no_prediction_sees_what_it_predicts() -> None:
    """Changing a token changes forward logits at and after it, and backward logits before it."""
    model, _, batch, _ = model_and_batch()
    names, segments = ("next_tokens", "previous_tokens"), batch["segments"][:1]
    tokens = batch["tokens"][:1].long()
    changed = tokens.clone()
    changed[0, 2] += 20
    before = outputs(model, *names, tokens=tokens, segments=segments)
    after = outputs(model, *names, tokens=changed, segments=segments)
    differs = [(one != two).any(-1)[0, :8].tolist() for one, two in zip(before, after, strict=True)]
    # The sequence is positions 0 to 4; position 4 predicts nothing forward, and its state is lost.
    assert differs[0][:4] == [False, False, True, True]
    # Entry t is the prediction of token t from those after it.
    assert differs[1][:4] == [True, True, False, False]
    assert not any(differs[0][5:] + differs[1][5:])
