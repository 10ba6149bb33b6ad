"""Layers get the columns that their family reads, in every stack and no others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.models import ModelConfig
from trainer.models.families import bert, t5
from trainer.models.inputs import Inputs
from trainer.models.stack import Context


@dataclass(frozen=True)
class Encoder(bert.Config):
    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"gap"})


@dataclass(frozen=True)
class EncoderDecoder(t5.Config):
    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"gap"})


SIZES = {"vocab_size": 20, "layers": 2, "width": 8, "heads": 2, "ffn_width": 8}


def columns_of_layers(
    config: ModelConfig, inputs: Inputs, output: str
) -> list[Mapping[str, Tensor]]:
    """The columns that each layer gets, in the order in which they run."""
    model, found = config.build(), []

    def note(_layer: nn.Module, arguments: tuple[object, ...]) -> None:
        context = arguments[-1]
        assert isinstance(context, Context)
        found.append(context.columns)

    for layer in model.sharding_units():
        layer.register_forward_pre_hook(note)
    assert model.reads == {"gap"}
    model(inputs, frozenset({output}))
    return found


def test_encoder() -> None:
    tokens, gap = torch.ones(1, 4, dtype=torch.long), torch.arange(4)[None]
    inputs = Inputs(tokens, positions=gap, extra={"gap": gap, "labels": tokens})
    assert columns_of_layers(Encoder(**SIZES), inputs, "tokens") == [{"gap": gap}] * 2


def test_encoder_decoder() -> None:
    tokens, gap = torch.ones(1, 4, dtype=torch.long), torch.arange(4)[None]
    inputs = Inputs(tokens, target_tokens=tokens, extra={"gap": gap, "labels": tokens})
    assert columns_of_layers(EncoderDecoder(**SIZES), inputs, "target_tokens") == [{"gap": gap}] * 4
