"""Outputs of a trained head that move with the names of their labels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samestep.errors import ConfigError
from tests.outputs import fill, outputs, random_parameters
from trainer.checkpoint.layout import StoredTensors
from trainer.models.families import (
    albert,
    bart,
    bert,
    deberta,
    electra,
    gpt2,
    lstm,
    modernbert,
    neobert,
    t5,
    xlnet,
)
from trainer.training.weights.initial import stored_values
from trainer.training.weights.loading import Weights

SHAPE: dict[str, Any] = {"vocab_size": 40, "layers": 1, "width": 8, "heads": 2, "ffn_width": 16}
WIDE: dict[str, Any] = {**SHAPE, "max_positions": 12}
LABELS, ORDER = ("O", "B-x", "I-x", "B-y"), (2, 0, 3, 1)
OTHER = tuple(LABELS[index] for index in ORDER)
CONFIGS = {
    "bert": lambda **head: bert.Config(**WIDE, **head),
    "albert": lambda **head: albert.Config(**WIDE, embedding_width=4, **head),
    "electra": lambda **head: electra.Config(**WIDE, embedding_width=4, **head),
    "deberta": lambda **head: deberta.Config(**WIDE, **head),
    "modernbert": lambda **head: modernbert.Config(**WIDE, local_window=4, **head),
    "neobert": lambda **head: neobert.Config(**WIDE, **head),
    "xlnet": lambda **head: xlnet.Config(**WIDE, **head),
    "gpt2": lambda **head: gpt2.Config(**WIDE, **head),
    "t5": lambda **head: t5.Config(**SHAPE, head_width=4, **head),
    "bart": lambda **head: bart.Config(**WIDE, **head),
    "lstm": lambda **head: lstm.Config(vocab_size=40, layers=1, hidden_size=8, **head),
}
HEADS = [
    *((kind, "classification", {}) for kind in CONFIGS),
    ("bert", "tagging", {"crf": True}),
    ("lstm", "tagging", {"crf": True}),
    ("t5", "tagging", {}),
]


TOKENIZER = SimpleNamespace(fingerprint="same")
ROWS: Any = SimpleNamespace(name="rows", tokenizer=TOKENIZER)


def trained(kind: str, head: str, labels: tuple[str, ...], **more: Any) -> tuple[Weights, Any]:
    model = CONFIGS[kind](head=head, labels=labels, **more).build().eval()
    fill(model, random_parameters(model))
    tensors = StoredTensors.of({n: each.detach() for n, each in model.named_parameters()})
    return Weights(model.config, tensors, Path("w"), Path("t")), model


@pytest.mark.parametrize(("kind", "head", "more"), HEADS)
@pytest.mark.parametrize("seed", [None, 0])
def test_outputs_move_with_their_labels(
    kind: str, head: str, more: Any, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a rank reads only some elements of a parameter; all else stays as it is."""
    weights, model = trained(kind, head, LABELS, **more)
    monkeypatch.setattr(Weights, "load_tokenizer", lambda _: TOKENIZER)
    monkeypatch.setattr("trainer.training.weights.initial._extended_rows", lambda *_: {})
    other = CONFIGS[kind](head=head, labels=OTHER, **more).build().eval()
    values = stored_values(weights, other, ROWS, seed)
    for name, parameter in other.named_parameters():
        size, third = parameter.numel(), parameter.numel() // 3
        pieces = [values(name, 0, third), values(name, third, size)]
        parameter.data.copy_(torch.cat(pieces).view_as(parameter))
    tokens = torch.arange(5, 17).view(2, 6)
    columns: dict[str, Any] = {
        "tokens": tokens,
        "segments": torch.ones_like(tokens),
        "positions": torch.arange(6).expand(2, -1),
    }
    if head == "classification":
        columns["predicted"] = torch.tensor([[5], [5]])
    (before,), (after,) = (outputs(each, head, **columns) for each in (model, other))
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, before[..., list(ORDER)], rtol=1e-6, atol=1e-6)
    if "crf" in more:
        (before,), (after,) = (
            outputs(each, "tag_transitions", **columns) for each in (model, other)
        )
        order = [*ORDER, 4]  # the begin and the end of a sentence stay last
        assert torch.equal(after, before[order][:, order])


@pytest.mark.parametrize(
    ("setting", "config"),
    [
        ("model.labels: ['O', 'B-x', 'I-x', 'B-y'] -> ", {"labels": ("a", "b", "c", "d")}),
        ("model.heads: 2 -> 4", {"heads": 4}),
        ("model.activation: gelu -> relu", {"activation": "relu"}),
    ],
)
def test_another_model_of_equal_shapes_is_refused(setting: str, config: dict[str, Any]) -> None:
    weights, _ = trained("bert", "classification", LABELS)
    settings = {**WIDE, "head": "classification", "labels": LABELS, **config}
    with pytest.raises(ConfigError) as caught:
        stored_values(weights, bert.Config(**settings).build(), ROWS)
    assert f"w holds another model than the experiment's ({setting}" in str(caught.value)


def test_a_number_may_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weights, "load_tokenizer", lambda _: TOKENIZER)
    weights, _ = trained("bert", "classification", ("score",))
    model = bert.Config(**WIDE, head="classification", labels=("similarity",)).build()
    bias = stored_values(weights, model, ROWS)("head.classifier.bias", 0, 1)
    assert torch.equal(bias, weights.tensors["head.classifier.bias"])
