"""The second loss of SiFT, computed from two passes, and its noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.errors import ConfigError
from samestep.examples import Vocabulary
from tests.unit.objectives.tiny_bert import tiny_bert
from trainer.models import Model
from trainer.models.families import gpt2
from trainer.models.inputs import Inputs
from trainer.models.sampling import normal
from trainer.objectives.kinds import classification, question_answering, regression, sift, tagging

VOCABULARY = Vocabulary(100, 0, 1, 2, 3, (0, 1, 2, 3))
LABELS = {
    "classification": ("classification", ("a", "b", "c")),
    "regression": ("classification", ("score",)),
    "tagging": ("tagging", ("a", "b", "c")),
}
OF = {
    "classification": classification.Config(),
    "regression": regression.Config(),
    "tagging": tagging.Config(),
}


def make(kind: str, **changes: Any) -> Model:
    head, labels = LABELS[kind]
    shape = {"layers": 2, "width": 16, "ffn_width": 32} | changes
    return tiny_bert(max_positions=16, head=head, labels=labels, **shape)


def batch_of(kind: str, rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, 100, (rows, 16), generator=generator)
    batch = {
        "tokens": tokens,
        "segments": torch.ones_like(tokens),
        "positions": torch.arange(16).expand(rows, -1),
        "dropout_key": torch.arange(rows, dtype=torch.int32),
        "weights": torch.tensor([1.0] * (rows - 1) + [0.0]),
        "labels": torch.arange(rows) % 3,
    }
    if kind == "tagging":
        return {**batch, "labels": tokens % 3, "weights": (tokens > 20) * batch["weights"][:, None]}
    batch["predicted"] = torch.zeros(rows, 1, dtype=torch.long)
    return batch | ({"labels": batch["labels"].float()} if kind == "regression" else {})


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """The sum of both divergences, class by class."""
    if first.shape[-1] == 1:
        return (first - second)[..., 0] ** 2
    p, q = first.softmax(-1), second.softmax(-1)
    return (p * (p / q).log() + q * (q / p).log()).sum(-1)


@pytest.mark.parametrize("kind", OF)
def test_the_loss_is_that_of_the_paper(kind: str) -> None:
    """From the noise on: the steepest direction, and two predictions."""
    model, batch = make(kind, dropout=0.0, attention_dropout=0.0), batch_of(kind)
    objective = sift.Config(OF[kind], weight=2.0, noise=0.1, step=0.05).build(VOCABULARY)
    totals = {name: torch.tensor(x) for name, x in objective.weights(batch).items()}
    loss = objective.loss(model, batch, totals)
    loss.total.backward()
    found = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad()

    inputs, output = Inputs.of(batch), objective.predicts
    plain = objective.of.loss(model, batch, totals).total

    def predicted(noise: Tensor | None) -> Tensor:
        given = Inputs(**{**vars(inputs), "noise": noise})
        logits: Tensor = model(given, frozenset({output}))[output]
        return logits

    start = normal(batch["dropout_key"], (16, 16), 0.1).requires_grad_()
    divergence(predicted(start), predicted(None).detach()).sum().backward()
    assert start.grad is not None
    slope = start.grad
    model.zero_grad()
    noise = start.detach() + 0.05 * slope / (slope.abs().amax(-1, keepdim=True) + 1e-6)
    weights = batch["weights"].view(4, -1)
    change = (divergence(predicted(noise), predicted(None)) * weights).sum() / weights.sum()
    expected = plain + 2 * change
    assert change > 1e-6
    torch.testing.assert_close(loss.total, expected, rtol=1e-5, atol=1e-6)
    expected.backward()
    actual = {name: each.grad for name, each in model.named_parameters()}
    torch.testing.assert_close(found, actual, rtol=1e-4, atol=1e-4)
    means = {name: float(total / count) for name, (total, count) in loss.metrics.items()}
    assert means["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert means["sift_loss"] == pytest.approx(change.item(), rel=1e-4)
    assert means["task_loss"] == pytest.approx(plain.item(), rel=1e-5)
    assert objective.loss_of(means) == pytest.approx(expected.item(), rel=1e-5)


def test_embeddings_are_normalized_before_the_noise() -> None:
    """So ten times larger embeddings get the same relative noise; see equation 6 of the paper."""
    model, batch = make("classification"), batch_of("classification")
    noise = normal(batch["dropout_key"], (16, 16), 0.5)
    given = Inputs(**{**vars(Inputs.of(batch)), "noise": noise})
    before = model.eval()(given, frozenset({"classification"}))["classification"]
    with torch.no_grad():
        for name in ("tokens", "positions", "types"):
            model.get_parameter(f"embeddings.{name}.weight").mul_(10)
    after = model(given, frozenset({"classification"}))["classification"]
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(
        model(Inputs(**{**vars(given), "noise": None}), frozenset({"classification"}))[
            "classification"
        ],
        before,
        atol=1e-3,
    )


def test_evaluations_have_the_task_s_loss_alone() -> None:
    model, batch = make("classification"), batch_of("classification")
    objective = sift.Config(OF["classification"]).build(VOCABULARY)
    totals = {name: torch.tensor(x) for name, x in objective.weights(batch).items()}
    with torch.no_grad():
        loss = objective.loss(model.eval(), batch, totals)
        own = objective.of.loss(model, batch, totals)
    assert torch.equal(loss.total, own.total)
    assert loss.metrics.keys() == own.metrics.keys()
    means = {name: float(total / count) for name, (total, count) in loss.metrics.items()}
    assert objective.loss_of(means) == means["loss"]


def test_noise_is_normal_and_a_function_of_its_key() -> None:
    keys = torch.tensor([5, 6, 7], dtype=torch.int32)
    noise = normal(keys, (200, 64), 0.01)
    assert torch.equal(noise[1:2], normal(keys[1:2], (200, 64), 0.01))
    assert noise.abs().max() <= 0.02
    # The standard deviation of a normal number that is truncated at two of them is 0.8796.
    assert noise.std().item() == pytest.approx(0.008796, rel=0.01)
    assert abs(noise.mean().item()) < 1e-4
    assert torch.corrcoef(noise.flatten(1)).fill_diagonal_(0).abs().max() < 0.03
    flat = noise[0].flatten()
    assert abs(F.cosine_similarity(flat[1:], flat[:-1], dim=0)) < 0.03


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="of is question_answering, which sift does not"):
        sift.Config(question_answering.Config())
    for name in ("weight", "noise", "step"):
        with pytest.raises(ConfigError, match=f"{name} is 0.0. Use a number above 0"):
            sift.Config(OF["tagging"], **{name: 0.0})


def test_models_without_a_norm_after_their_embeddings_do_not_offer_it() -> None:
    assert "inputs.noise" in make("tagging").offers
    config = gpt2.Config(100, layers=1, width=16, heads=2, ffn_width=32, max_positions=16)
    assert "inputs.noise" not in config.build().offers
