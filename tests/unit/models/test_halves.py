"""The two halves of an encoder-decoder that start from a decoder alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.errors import ConfigError
from tests.outputs import outputs, predict
from trainer.models import Stored
from trainer.models.families import llama
from trainer.models.stack import Context

SHAPE: dict[str, Any] = {"vocab_size": 60, "layers": 3, "width": 24, "heads": 6, "ffn_width": 40}
ONE = llama.Config(**SHAPE, kv_heads=2, head_width=4, tied=False, theta=50.0)
PAIR = replace(ONE, causal=False, decoder_layers=3, start_token=1)
SOURCE = {
    "tokens": torch.arange(3, 17).view(2, 7),
    "segments": torch.tensor([[1] * 7, [1] * 5 + [0] * 2]),
}
TARGET = {
    "target_tokens": torch.tensor([[1, 20, 21, 22], [1, 30, 31, 0]]),
    "target_segments": torch.tensor([[1] * 4, [1] * 3 + [0]]),
}


def random(config: llama.Config) -> Any:
    model = config.build().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return model


def started(one: Any, **changes: Any) -> Any:
    """The encoder-decoder with the weights that it takes from a model with one stack."""
    model = replace(PAIR, **changes).build().eval()
    stored = dict(one.named_parameters())
    shapes = {name: tuple(each.shape) for name, each in stored.items()}
    start = model.start_from(Stored(one.config, shapes))
    assert not start.unused
    for name, parameter in model.named_parameters():
        source = start.sources[name]
        assert source is not None, name
        parameter.data = stored[source].data.clone()
    assert {*start.sources.values()} == {*stored}
    return model


@torch.no_grad()
def test_the_encoder_is_the_model_with_attention_in_both_directions() -> None:
    one = random(ONE)
    both_ways = replace(ONE, causal=False).build().eval()
    both_ways.load_state_dict(one.state_dict())
    expected = outputs(both_ways, "layer.3", **SOURCE)[0]
    found = outputs(started(one), "layer.3", **SOURCE)[0]
    real = SOURCE["segments"].bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_the_decoder_without_cross_attention_is_the_model_itself() -> None:
    """Its positions are those of the targets, not of the sources."""
    one = random(ONE)
    pair = started(one)
    for layer in pair.decoder:
        layer.cross_attention.out.weight.zero_()
    tokens, segments = TARGET["target_tokens"], TARGET["target_segments"]
    expected = predict(one, tokens=tokens, segments=segments)
    far = torch.arange(7).expand(2, -1) + 9
    found = predict(pair, **SOURCE, positions=far, **TARGET)
    real = segments.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-6, atol=1e-6)
    assert (predict(started(one), **SOURCE, **TARGET) - found)[real].abs().max() > 0.1


@torch.no_grad()
def test_cross_attention_is_grouped_and_has_no_positions() -> None:
    attention = started(random(ONE)).decoder[1].cross_attention
    generator = torch.Generator().manual_seed(1)
    hidden, memory = (torch.randn(2, n, 24, generator=generator) for n in (4, 7))
    mask = SOURCE["segments"].bool()[:, None, None, :]

    found = attention(hidden, memory, Context(memory_mask=mask))

    def heads(part: Tensor) -> Tensor:
        return part.unflatten(-1, (-1, 4)).transpose(1, 2)

    query = heads(F.linear(hidden, attention.query.weight))
    # Heads 0 to 2 of the queries read head 0 of the keys, 3 to 5 head 1.
    key, value = (
        torch.stack([heads(part)[:, head // 3] for head in range(6)], 1)
        for part in F.linear(memory, attention.kv.weight).chunk(2, -1)
    )
    scores = (query @ key.transpose(2, 3) / 2).masked_fill(~mask, float("-inf"))
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found, F.linear(mixed, attention.out.weight))


def test_targets_begin_with_the_start_token() -> None:
    pair = random(PAIR)
    other = {**TARGET, "target_tokens": TARGET["target_tokens"].clone()}
    other["target_tokens"][:, 0] = 9
    assert torch.equal(predict(pair, **SOURCE, **TARGET), predict(pair, **SOURCE, **other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": True}, "decoder_layers is 3, which needs causal: false"),
        ({"head": "tagging", "labels": ("a", "b")}, "needs causal: false .* head: language_model"),
        ({"start_token": None}, "start_token is None, and vocab_size 60. With decoder_layers"),
        ({"start_token": 60}, "start_token is 60, and vocab_size 60"),
        ({"decoder_layers": None}, "start_token is 1, but a Llama without decoder_layers has none"),
        ({"decoder_layers": 0}, "decoder_layers is 0"),
        ({"qk_norm": True}, "qk_norm is True, but a Llama with decoder_layers has none"),
        ({"output_norm": True}, "output_norm is True, but"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(PAIR, **changes)


def test_stacks_of_another_size_than_the_weights_are_refused() -> None:
    one = random(ONE)
    with pytest.raises(ConfigError, match="decoder_layers is 2, but the weights of init_from have"):
        started(one, decoder_layers=2)
