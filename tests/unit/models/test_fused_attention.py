"""Models with fused attention: masks and biases as vectors mean what matrices meant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.outputs import predict
from tests.unit.models.test_contract import BART, GPT2, MODELS, SHAPE, T5, columns, make
from trainer.models import Outputs
from trainer.models.config import TransformerConfig
from trainer.models.families import (
    albert,
    deberta,
    deberta_v2,
    deberta_v3,
    electra,
    modernbert,
    mpnet,
    xlnet,
)
from trainer.models.inputs import Inputs
from trainer.models.layers.dropout import attention_dropout
from trainer.models.peft.kinds import lora, prefix

LOCAL = modernbert.Config(**SHAPE, max_positions=24, local_window=4, global_every=2)
FUSIBLE = {
    **{name: config for name, config in MODELS.items() if name != "gpt2, prefix"},
    "albert": albert.Config(**SHAPE, max_positions=24, embedding_width=8),
    "electra": electra.Config(**SHAPE, max_positions=24, embedding_width=8, generator_divisor=0),
    "modernbert": LOCAL,
    "modernbert, left to right": replace(LOCAL, causal=True),
    "mpnet": mpnet.Config(**SHAPE, max_positions=24),
    "bert, lora": replace(MODELS["bert"], peft=lora.Config()),
}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    segments: Tensor | None,
    key_segments: Tensor | None,
    causal: bool,
    prefix: Tensor | None,
    window: int | None,
    bias: Tensor | None,
    scale: float,
    dropout: float,
    dropout_key: Tensor | None,
    dropout_version: int,
) -> Tensor:
    """The arithmetic of a fused kernel, score by score."""
    queries, keys = query.shape[2], key.shape[2]
    row, column = torch.arange(queries)[:, None], torch.arange(keys)
    allowed = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if segments is not None and key_segments is not None:
        allowed = allowed & (segments[:, None, :, None] == key_segments[:, None, None, :])
    if causal:
        seen = column <= row
        if prefix is not None:
            seen = seen | prefix[:, None, None, :].bool()
        allowed = allowed & seen
    if window is not None:
        allowed = allowed & ((row - column).abs() <= window)
    scores = scale * query @ key.mT
    if bias is not None:
        scores = scores + bias[:, column - row + queries - 1]
    scores = scores.masked_fill(~allowed, float("-inf"))
    probabilities = scores.softmax(-1).nan_to_num(0.0)
    return attention_dropout(probabilities, dropout, dropout_key, dropout_version) @ value


def inputs(config: TransformerConfig, packed: bool) -> dict[str, Any]:
    found = columns(config)
    if packed:
        found["segments"] = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2, 0], [1] * 6 + [2, 2, 0]])
        if "target_tokens" in found:
            found["target_segments"] = torch.tensor([[1, 2, 2, 2, 0], [1, 1, 1, 2, 2]])
    else:
        del found["segments"]
        found.pop("target_segments", None)
    return found | {"dropout_key": torch.tensor([5, -6], dtype=torch.int32)}


def results(model: Any, given: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The output where there is a token, and the gradients of its squares."""
    model.zero_grad()
    found = predict(model, **given)
    name = "target_segments" if model.config.predicts == "target_tokens" else "segments"
    if name in given and found.ndim == 3:
        found = found[:, : given[name].shape[1]][given[name] > 0]
    found.square().sum().backward()
    return found.detach(), {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "without segments"])
@pytest.mark.parametrize("name", FUSIBLE)
def test_computes_what_masks_compute(name: str, packed: bool) -> None:
    config = FUSIBLE[name]
    if packed and name.endswith(("classes", "prompt")):
        pytest.skip("a row is one text")
    model = make(config).train()
    given = inputs(config, packed)
    expected, gradients = results(model, given)
    assert model.fuse_attention(attention)
    found, fused = results(model, given)
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * max(scale, 1))
    assert fused.keys() == gradients.keys()
    for each, gradient in gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(fused[each], gradient, rtol=1e-4, atol=1e-5 * max(scale, 1))


def test_is_used_by_a_generator_too() -> None:
    model = make(replace(FUSIBLE["electra"], generator_divisor=2)).train()
    assert model.fuse_attention(attention)
    assert model.generator.fuses_attention


@pytest.mark.parametrize(
    "config",
    [
        deberta.Config(**SHAPE, max_positions=24),
        deberta_v2.Config(**SHAPE, max_positions=24, position_buckets=8),
        deberta_v3.Config(**SHAPE, max_positions=24, position_buckets=8),
        xlnet.Config(**SHAPE, max_positions=24),
        replace(GPT2, peft=prefix.Config(3)),
    ],
    ids=["DeBERTa", "DeBERTa v2", "DeBERTa v3", "XLNet", "prefix"],
)
def test_leaves_other_attention_as_it_is(config: TransformerConfig) -> None:
    model = make(config)
    assert not model.fuse_attention(attention)
    assert not model.fuses_attention


def test_scores_are_computed_where_they_are_asked_for() -> None:
    model = make(MODELS["bert"])
    given = columns(model.config)
    names: Outputs = frozenset({"attention.1"})
    expected = model(Inputs(**given), names)["attention.1"]
    model.fuse_attention(attention)
    assert torch.equal(model(Inputs(**given), names)["attention.1"], expected)


def test_generates_with_a_cache_as_before() -> None:
    for config in (GPT2, T5, BART):
        model = make(config)
        tokens = torch.tensor([[3, 4, 5], [6, 7, 8]])
        given = Inputs(tokens, torch.ones_like(tokens), target_tokens=tokens[:, :1])
        expected, before = model.start(given, 8)
        later = model.step(tokens[:, 0], before)
        model.fuse_attention(attention)
        found, cache = model.start(given, 8)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.step(tokens[:, 0], cache), later, rtol=1e-5, atol=1e-5)
