"""The penalty on the scores of a mean of layers: once a step, however the step is split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from samestep.errors import ConfigError
from tests.unit.objectives.test_sift import OF, VOCABULARY, batch_of, make
from trainer.models import Model
from trainer.models.families import bert, bilm
from trainer.objectives.kinds import contrastive, distillation, mlm, sift
from trainer.objectives.mix_penalty import with_penalty

LAMBDA = 0.1


def mixed(kind: str) -> Model:
    model = make(kind, dropout=0.0, attention_dropout=0.0, scalar_mix=True)
    with torch.no_grad():
        model.get_parameter("mix.scores").copy_(torch.tensor([0.5, -1.0, 2.0]))
    return model


def gradients(objective: Any, model: Model, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = {}
    for batch in batches:
        for name, weight in objective.weights(batch).items():
            totals[name] = totals.get(name, torch.tensor(0.0)) + weight
    model.zero_grad()
    for batch in batches:
        objective.loss(model, batch, totals).total.backward()
    return {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


@pytest.mark.parametrize("kind", OF)
def test_it_is_added_once_a_step(kind: str) -> None:
    """The gradient of lambda * sum w^2, as AllenNLP's regularizer adds it to a batch's loss."""
    model, batch = mixed(kind), batch_of(kind)
    own = OF[kind].build(VOCABULARY)
    expected = gradients(own, model, [batch])
    scores = model.get_parameter("mix.scores").detach()
    expected["mix.scores"] = expected["mix.scores"] + 2 * LAMBDA * scores
    parts = [{name: each[rows] for name, each in batch.items()} for rows in ([0], [1, 2, 3])]
    for batches in ([batch], parts):
        found = gradients(with_penalty(own, LAMBDA), model, batches)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_logged_losses_and_evaluations_are_without_it() -> None:
    model, batch = mixed("classification"), batch_of("classification")
    own = OF["classification"].build(VOCABULARY)
    objective = with_penalty(own, LAMBDA)
    totals = {"examples": torch.tensor(3.0)}
    plain, found = (each.loss(model, batch, totals) for each in (own, objective))
    assert found.metrics == plain.metrics
    assert (found.total - plain.total).item() == pytest.approx(LAMBDA * 5.25, rel=1e-4)
    with torch.no_grad():
        assert objective.loss(model, batch, totals).total == plain.total
    assert objective.loss_of({"loss": 2.0}) == own.loss_of({"loss": 2.0})
    assert objective.terms() == own.terms()


@pytest.mark.long
def test_beside_noise() -> None:
    """The scores reach the penalty through SiFT's passes, too."""
    model, batch = mixed("tagging"), batch_of("tagging")
    own = sift.Config(OF["tagging"]).build(VOCABULARY)
    expected = gradients(own, model, [batch])["mix.scores"]
    found = gradients(with_penalty(own, LAMBDA), model, [batch])["mix.scores"]
    scores = model.get_parameter("mix.scores").detach()
    torch.testing.assert_close(found, expected + 2 * LAMBDA * scores, rtol=1e-5, atol=1e-5)


def test_a_bilm_has_the_scores() -> None:
    settings: dict[str, Any] = {"hidden_size": 16, "proj_size": 8, "embedding_width": 8}
    config = bilm.Config(100, **settings, head="classification", labels=("a", "b"), scalar_mix=True)
    model, batch = config.build(), batch_of("classification")
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(model.initial_values(name, 0, each.numel(), 0).view_as(each))
        model.get_parameter("mix.scores").copy_(torch.tensor([0.5, -1.0, 2.0]))
    batch["labels"] = batch["labels"] % 2
    own = OF["classification"].build(VOCABULARY)
    model.eval()
    expected = gradients(own, model, [batch])["mix.scores"] + 2 * LAMBDA * torch.tensor(
        [0.5, -1.0, 2.0]
    )
    found = gradients(with_penalty(own, LAMBDA), model, [batch])["mix.scores"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_it_needs() -> None:
    config = bert.Config(100, head="classification", labels=("a", "b"), scalar_mix=True)
    assert replace(config, scalar_mix_l2=0.001).scalar_mix_l2 == 0.001
    for changes in ({"scalar_mix_l2": -1.0}, {"scalar_mix_l2": 0.1, "scalar_mix": False}):
        with pytest.raises(ConfigError, match=r"scalar_mix_l2 is .* scalar_mix=true"):
            replace(config, **changes)
    with pytest.raises(ConfigError, match="is for tasks"):
        with_penalty(mlm.Config().build(VOCABULARY), LAMBDA)
    for other in (distillation.Config("teacher", OF["classification"]), contrastive.Config()):
        with pytest.raises(ConfigError, match="without a teacher or negatives of the batch"):
            with_penalty(other.build(VOCABULARY), LAMBDA)
