"""Models that return the hidden states of all positions give the same logits as without."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.outputs import outputs, predict
from trainer.models.families import bart, bert, gpt2, t5

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "layers": 2,
    "width": 16,
    "heads": 2,
    "ffn_width": 32,
    "dropout": 0.2,
}
CONFIGS = {
    "bert": bert.Config(**SHAPE),
    "bert, classes": bert.Config(**SHAPE, head="classification", labels=("a", "b", "c")),
    "gpt2": gpt2.Config(**SHAPE),
    "t5": t5.Config(**SHAPE, head_width=8),
    "bart": bart.Config(**SHAPE, ffn_dropout=0.2),
    "t5, tags": t5.Config(**SHAPE, head_width=8, head="tagging", labels=("O", "B")),
}


def make(name: str) -> Any:
    model = CONFIGS[name].build().train()
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            parameter.copy_(
                model.initial_values(own, 0, parameter.numel(), 0).view_as(parameter) * 10
            )
    return model


def batch(name: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (3, 12), generator=generator)
    given: dict[str, Any] = {
        "tokens": tokens,
        "segments": (torch.arange(12) < 9).int().expand(3, 12),
    }
    given |= {
        "positions": torch.arange(12).expand(3, 12),
        "dropout_key": torch.arange(3, dtype=torch.int32),
    }
    if name in ("t5", "bart"):
        given |= {
            "target_tokens": tokens[:, :7],
            "target_segments": torch.ones(3, 7, dtype=torch.int32),
        }
    return given


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_do_not_depend_on_whether_hidden_states_are_returned(name: str) -> None:
    """Dropout included; and a layer's norm comes before what is returned."""
    config, model, given = CONFIGS[name], make(name), batch(name)
    predicted = torch.tensor([[0, 2], [5, 1], [3, 3]])
    for places in (predicted, None) if name != "bert, classes" else (predicted[:, :1],):
        logits, states = outputs(model, config.predicts, "hidden", **given, predicted=places)
        alone = predict(model, **given, predicted=places)
        torch.testing.assert_close(
            logits, alone, rtol=0, atol=3e-6 * float(alone.detach().abs().max())
        )
        assert states.shape == (3, 7 if name in ("t5", "bart") else 12, 16)


@pytest.mark.parametrize(
    ("name", "wanted", "calls"),
    [
        *((name, ("layer.1", "layer.2"), [2, 2]) for name in CONFIGS),
        ("bert", ("tokens", "compared.1"), [2, 2]),
        # A layer whose attention scores are kept is not recomputed.
        ("bert", ("layer.2", "attention.1"), [1, 2]),
    ],
)
def test_layers_are_recomputed_below_their_states(
    name: str, wanted: tuple[str, ...], calls: list[int]
) -> None:
    """With the same gradients, bit by bit."""
    gradients = []
    for recomputes in (False, True):
        model = make(name)
        model.activation_checkpointing = recomputes
        counts = [0, 0]
        stack = next(iter(model.stacks().values()))
        for index, layer in enumerate(stack):
            layer.ffn.register_forward_pre_hook(partial(_count, counts, index))
        found = outputs(model, *wanted, **batch(name))
        sum(each[each.isfinite()].square().sum() for each in found).backward()
        assert counts == (calls if recomputes else [1, 1])
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert all(parameter.grad is not None for parameter in stack.parameters())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def _count(counts: list[int], index: int, *_: Any) -> None:
    counts[index] += 1
