"""A head that reads a learned mean of all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from samestep.errors import ConfigError
from tests.outputs import outputs
from trainer.models import Stored
from trainer.models.codecs import codec_of
from trainer.models.families import (
    albert,
    bert,
    deberta_v2,
    distilbert,
    electra,
    modernbert,
    neobert,
    roberta,
)
from trainer.models.peft.kinds import prompt

SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "layers": 3,
    "width": 16,
    "heads": 2,
    "ffn_width": 32,
    "max_positions": 24,
    "head": "classification",
    "labels": ("a", "b"),
    "scalar_mix": True,
}
FAMILIES: dict[str, Any] = {
    "bert": bert.Config(**SHAPE),
    "roberta": roberta.Config(**SHAPE),
    "albert": albert.Config(**SHAPE, embedding_width=8),
    "distilbert": distilbert.Config(**SHAPE),
    "electra": electra.Config(**SHAPE, embedding_width=8),
    "deberta": deberta_v2.Config(**SHAPE, position_buckets=8),
    "modernbert": modernbert.Config(**SHAPE, local_window=8),
    "neobert": neobert.Config(**SHAPE),
}


def make(config: Any) -> Any:
    model = config.build().eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(model.initial_values(name, 0, each.numel(), 0).view_as(each))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_reads_equation_1(family: str) -> None:
    """At first the mean of all layers; then the softmax of scores, and the gain."""
    model = make(FAMILIES[family])
    tokens = torch.randint(4, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    given = {"tokens": tokens, "positions": torch.arange(20).expand(2, -1)}
    layers = torch.stack(outputs(model, *(f"layer.{n}" for n in range(4)), **given))
    (hidden,) = outputs(model, "hidden", **given)
    torch.testing.assert_close(hidden, layers.mean(0))
    with torch.no_grad():
        model.mix.scores.copy_(torch.tensor([0.0, 1.0, -1.0, 2.0]))
        model.mix.gain.fill_(0.5)
    shares = torch.tensor([0.0, 1.0, -1.0, 2.0]).softmax(0)
    expected = 1.5 * (shares[:, None, None, None] * layers).sum(0)
    first = torch.zeros(2, 1, dtype=torch.long)
    hidden, logits = outputs(model, "hidden", "classification", **given, predicted=first)
    torch.testing.assert_close(hidden, expected)
    torch.testing.assert_close(logits, model.head(expected[:, :1], None))
    logits.square().sum().backward()
    assert all(bool(each.grad.any()) for each in model.mix.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_not_exported(family: str) -> None:
    with pytest.raises(ConfigError, match="has no head that reads all layers"):
        codec_of(FAMILIES[family]).to_huggingface()


def test_it_starts_from_a_model_without() -> None:
    config = FAMILIES["bert"]
    before = replace(config, scalar_mix=False, head="language_model", labels=())
    shapes = {name: tuple(each.shape) for name, each in before.build().named_parameters()}
    sources = config.build().start_from(Stored(before, shapes)).sources
    assert sources["mix.scores"] is None
    assert sources["mix.gain"] is None
    assert sources["layers.0.ffn.up.weight"] == "layers.0.ffn.up.weight"


@pytest.mark.parametrize(
    "changes",
    [{"head": "language_model", "labels": ()}, {"peft": prompt.Config(length=2)}],
)
def test_it_needs_a_task_and_no_prompt(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="scalar_mix is for a task's head"):
        replace(FAMILIES["bert"], **changes)
