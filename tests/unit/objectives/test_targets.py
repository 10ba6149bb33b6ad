"""Objectives that need only scores of tokens ask for them, and take logits as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.examples import Vocabulary
from trainer.models import Outputs, scores_of
from trainer.models.inputs import Inputs
from trainer.models.token_scores import score_logits
from trainer.monitoring.meter import Meter
from trainer.objectives.kinds import (
    causal_lm,
    classification,
    distillation,
    mlm,
    mlm_nsp,
    mlm_sbo,
    replaced_mlm,
    replaced_tokens,
)

VOCABULARY = Vocabulary(
    size=40, pad=0, cls=2, sep=3, mask=4, special=(0, 1, 2, 3, 4), continuing=(39,)
)
B, P, S = 2, 5, 9
TOTALS = {name: torch.tensor(7.0) for name in ("mlm", "lm", "nsp", "sbo", "rtd", "examples")}

CASES: dict[str, tuple[Any, set[str]]] = {  # settings; the outputs that need not be logits
    "mlm": (mlm.Config(), {"tokens"}),
    "mlm_nsp": (mlm_nsp.Config(), {"tokens"}),
    "mlm_sbo": (mlm_sbo.Config(), {"tokens", "span_boundary"}),
    "causal_lm": (causal_lm.Config(z_loss=1e-2), {"next_tokens"}),
    "classification": (classification.Config(lm_weight=0.5), {"next_tokens"}),
    # Samples of a generator need its logits, and so does a teacher.
    "replaced_tokens": (replaced_tokens.Config(), set()),
    "replaced_mlm": (replaced_mlm.Config(masked_only=True), {"original"}),
    "replaced_mlm or copy": (replaced_mlm.Config(masked_only=False), set()),
    "distillation": (distillation.Config(teacher="", of=mlm.Config(), hard=0.5), set()),
    "distillation of causal_lm": (
        distillation.Config(teacher="", of=causal_lm.Config(z_loss=1e-2), hard=0.5),
        set(),
    ),
}


class FixedLogits(nn.Module):
    """Returns random logits, or the scores of those that have a target."""

    def __init__(self, returns_scores: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        widths = {"next_sentence": (2,), "classification": (1, 3), "replaced": (S,), "copied": (S,)}
        whole = {"next_tokens": (S - 1, 40), "original": (P, 40)}
        names = ("tokens", "span_boundary")
        shapes = {**widths, **whole, **dict.fromkeys(names, (P, 40))}
        self.logits = {
            name: torch.randn(B, *shape, generator=generator).requires_grad_()
            for name, shape in shapes.items()
        }
        self.returns_scores = returns_scores
        self.targets: set[str] = set()
        self.rows = slice(None)  # of a batch, of which the next pass has a part

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        self.targets |= set(inputs.targets)
        found = {name: self.logits[name][self.rows] * 1 for name in outputs - {"sampled"}}
        if "copied" in outputs:
            found["original"] = torch.cat([found["original"]] * 2, 1)[:, :S]
        if "sampled" in outputs:
            found["sampled"] = torch.ones(B, P, dtype=torch.int64)[self.rows]
        if self.returns_scores:
            for name, target in inputs.targets.items():
                score = score_logits(found.pop(name), target)
                found[scores_of(name)] = torch.stack(score)
        return found


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def ids(*shape: int, high: int = 40) -> Tensor:
        return torch.randint(5, high, shape, generator=generator)

    weights = torch.tensor([[1.0, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    return {
        "tokens": ids(B, S),
        "segments": torch.ones(B, S, dtype=torch.int32),
        "predicted": torch.arange(1, P + 1).expand(B, -1),
        "labels": ids(B, P),
        "weights": weights,
        "boundary_weights": weights.flip(0),
        "next_labels": torch.tensor([0, 1]),
        "next_weights": torch.ones(B),
        "lm_weights": torch.ones(B, S - 1),
        "real_weights": torch.ones(B, S),
        "sample_key": torch.zeros(B, dtype=torch.int32),
    }


def batch_for(name: str) -> dict[str, Tensor]:
    columns = batch()
    if name == "classification":
        columns |= {"labels": torch.tensor([0, 2]), "weights": torch.ones(B)}
        columns["lm_weights"][0, 2:] = 0
    if name.endswith("causal_lm"):
        columns |= {"labels": columns["tokens"][:, 1:], "weights": torch.ones(B, S - 1)}
    if name.startswith("distillation"):
        columns["token_weights"] = torch.ones(B, S)
    return columns


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_two_batches_is_the_loss_of_both_together(name: str) -> None:
    """Rows have different numbers of predictions, so a mean of both losses would be another."""
    objective, model = CASES[name][0].build(VOCABULARY), FixedLogits(False)
    teacher = FixedLogits(False)
    if name.startswith("distillation"):
        objective.attach(teacher)

    def means(parts: list[slice]) -> dict[str, float]:
        meter = Meter()
        for rows in parts:
            model.rows = teacher.rows = rows
            columns = {key: column[rows] for key, column in batch_for(name).items()}
            totals = {key: torch.tensor(x) for key, x in objective.weights(columns).items()}
            meter.add(objective.loss(model, columns, totals).metrics)
        return meter.compute(lambda tensor: tensor)

    together, apart = means([slice(0, 2)]), means([slice(0, 1), slice(1, 2)])
    assert objective.loss_of(together) == pytest.approx(together["loss"], rel=1e-6)
    assert objective.loss_of(apart) == pytest.approx(together["loss"], rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_scores_and_logits_give_the_same_loss(name: str) -> None:
    config, wanted = CASES[name]
    columns = batch_for(name)
    found = []
    for returns_scores in (False, True):
        objective, model = config.build(VOCABULARY), FixedLogits(returns_scores)
        if name.startswith("distillation"):
            objective.attach(FixedLogits(False))
        loss = objective.loss(model, columns, TOTALS)
        loss.total.backward()
        gradients = {each: logits.grad for each, logits in model.logits.items()}
        assert not any(value.requires_grad for pair in loss.metrics.values() for value in pair)
        found.append((loss.total, loss.metrics, gradients))
        assert model.targets == wanted
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
