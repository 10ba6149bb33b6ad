"""What parameter-efficient fine-tuning adds to models.

Where it begins, what it trains, and how text is written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from samestep.errors import ConfigError
from tests.outputs import predict
from trainer.models.families import bart, bert, gpt2, llama, t5
from trainer.models.inputs import Inputs
from trainer.models.peft.kinds import adapters, lora, prefix, prompt

SHAPE: dict[str, Any] = {"vocab_size": 60, "layers": 2, "width": 32, "heads": 2, "ffn_width": 64}
CONFIGS: dict[str, Any] = {
    "bert": bert.Config(**SHAPE, max_positions=40, head="tagging", labels=("O", "B-X", "I-X")),
    "gpt2": gpt2.Config(**SHAPE, max_positions=40),
    "llama": llama.Config(**SHAPE, kv_heads=1, head_width=16, max_positions=40),
    "llama, two stacks": llama.Config(
        **SHAPE, kv_heads=1, head_width=16, causal=False, decoder_layers=2, start_token=1
    ),
    "t5": t5.Config(**SHAPE, head_width=16),
    "bart": bart.Config(**SHAPE, max_positions=40),
}
METHODS: dict[str, Any] = {
    "lora": lora.Config(rank=4),
    "adapters": adapters.Config(width=8),
    "prefix": prefix.Config(length=3),
    "prefix of a network": prefix.Config(length=3, network_width=6),
    "prompt": prompt.Config(length=3),
}


def make(family: str, method: str | None) -> Any:
    config = replace(CONFIGS[family], peft=METHODS[method] if method else None)
    model = config.build().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                model.initial_values(name, 0, parameter.numel(), 0).view(parameter.shape)
            )
    return model


def batch(family: str) -> dict[str, Tensor]:
    tokens = torch.randint(5, 60, (2, 8), generator=torch.Generator().manual_seed(1))
    found = {
        "tokens": tokens,
        "segments": torch.ones_like(tokens),
        "positions": torch.arange(8).expand(2, -1),
    }
    return found | (
        {"target_tokens": tokens, "target_segments": torch.ones_like(tokens)}
        if CONFIGS[family].encoder_decoder
        else {}
    )


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_lora_begins_with_the_model_as_it_is_and_adapters_nearly(family: str) -> None:
    expected = predict(make(family, None), **batch(family))
    assert torch.equal(predict(make(family, "lora"), **batch(family)), expected)
    adapted = predict(make(family, "adapters"), **batch(family))
    torch.testing.assert_close(adapted, expected, rtol=0.1, atol=0.1)
    assert not torch.equal(adapted, expected)


@torch.no_grad()
def test_a_network_computes_the_prefix_of_each_layer() -> None:
    """Equation 3 of Li & Liang 2021: the model is that of the keys and values that it computes."""
    model = make("bert", "prefix of a network")
    plain = make("bert", "prefix")
    for ours, other in zip(model.layers, plain.layers, strict=True):
        network = ours.attention.prefix
        hidden = torch.tanh(network.positions @ network.inner.weight.T + network.inner.bias)
        both = hidden @ network.outer.weight.T + network.outer.bias
        other.attention.prefix.keys.copy_(both[:, :32])
        other.attention.prefix.values.copy_(both[:, 32:])
    torch.testing.assert_close(predict(model, **batch("bert")), predict(plain, **batch("bert")))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", CONFIGS)
def test_only_what_is_added_has_gradients(family: str, method: str) -> None:
    """And a task's head, and the norms beside adapters.

    Of all positions, which are as many as without.
    """
    model = make(family, method)
    logits = predict(model, **batch(family))
    assert logits.shape[1] == 8
    logits.square().sum().backward()
    parts = {"lora": ".lora.", "adapters": ".adapter.", "prompt": "prompt."}
    added = parts.get(method, ".prefix.")
    for name, parameter in model.named_parameters():
        is_norm = method == "adapters" and "norm." in name and model.role(name).part != "embedding"
        of_head = name.startswith("head.") and family == "bert"
        assert (parameter.grad is not None) == (added in name or is_norm or of_head), name


@pytest.mark.parametrize("method", ["prefix", "prefix of a network", "prompt"])
@pytest.mark.parametrize("family", ["gpt2", "t5", "bart", "llama, two stacks"])
@torch.no_grad()
def test_writing_goes_on_as_reading_does(family: str, method: str) -> None:
    """Token by token, with padding before the shorter text, the logits are those of the whole
    texts.
    """
    model, inputs = make(family, method), batch(family)
    if family != "gpt2":
        whole = predict(model, **inputs)
        found, cache = model.start(
            Inputs(inputs["tokens"], target_tokens=inputs["target_tokens"][:, :3]), 8
        )
        torch.testing.assert_close(found, whole[:, 2])
        for place in range(3, 8):
            torch.testing.assert_close(
                model.step(inputs["target_tokens"][:, place], cache), whole[:, place]
            )
        return
    tokens = inputs["tokens"]
    whole = [
        predict(model, tokens=row[None], positions=torch.arange(len(row))[None])[0]
        for row in (tokens[0], tokens[1, 2:])
    ]
    segments = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    found, cache = model.start(Inputs(tokens[:, :4], segments), 8)
    torch.testing.assert_close(found, torch.stack([whole[0][3], whole[1][1]]))
    for place in range(4, 8):
        found = model.step(tokens[:, place], cache)
        torch.testing.assert_close(found, torch.stack([whole[0][place], whole[1][place - 2]]))


@pytest.mark.parametrize("method", ["lora", "adapters"])
def test_flops_leave_out_the_gradients_of_frozen_matrices(method: str) -> None:
    """All but attention, which has no matrices, and the backward pass below the first of what is
    trained.
    """
    model, inputs = make("bert", method), batch("bert")
    embeddings = model.embeddings.tokens.weight
    with FlopCounterMode(display=False) as counter:
        embeddings.requires_grad_()  # so that the backward pass reaches all layers
        predict(model, **inputs).sum().backward()
    attention = 12 * 2 * 8 * 32
    counted = counter.get_total_flops() / 16
    counts = counter.get_flop_counts()["Global"]
    of_attention = (
        sum(
            flops
            for name, flops in counts.items()
            if "attention" in str(name) or "bmm" in str(name)
        )
        / 16
    )
    assert model.flops_per_token(8) - attention == pytest.approx(counted - of_attention)


@pytest.mark.parametrize(
    "settings", [{"targets": ("gate",)}, {"targets": ("cross_query",)}, {"targets": ("querry",)}]
)
def test_unknown_targets_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"which this model lacks.*Known: query, key, value, out, up, down"
    ):
        replace(CONFIGS["bert"], peft=lora.Config(**settings)).build()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (lora, {"rank": 0}),
        (lora, {"alpha": 0}),
        (lora, {"targets": ()}),
        (adapters, {"width": 0}),
        (prefix, {"length": 0}),
        (prefix, {"network_width": 0}),
        (prompt, {"length": 0}),
    ],
)
def test_sizes_of_nothing_are_refused(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        kind.Config(**settings)
