"""DeBERTa (He et al. 2021, arXiv 2006.03654), version 1, and what version 2 shares with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models import Outputs, Start, Stored
from trainer.models.config import Pooling
from trainer.models.extras import Extra
from trainer.models.families import bert
from trainer.models.inputs import Inputs
from trainer.models.layers.attention import take
from trainer.models.layers.disentangled import (
    DisentangledLayer,
    RelativeEmbeddings,
    SeparateAttention,
    place_table,
)
from trainer.models.layers.dropout import split_key
from trainer.models.stack import Context, ScanGroup, Stack
from trainer.models.transformer import Transformer


@dataclass(frozen=True)
class Config(bert.Config):
    """DeBERTa-base, version 1.

    Attributes:
        max_positions: maximum sequence length; distances up to it have embeddings of their own.
        mask_decoder: the enhanced mask decoder (section 3.2): in masked language modeling the last
            layer runs twice, from queries with absolute positions.
    """

    codec: ClassVar[str] = "trainer.models.codecs.deberta"
    pooler_activation: ClassVar[Pooling] = "gelu"
    fewest_types: ClassVar[int] = 0

    vocab_size: int = 50265
    type_vocab: int = 0
    norm_eps: float = 1e-7
    mask_decoder: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("nsp", "span_boundary", "causal", "also_causal", "teacher_width"):
            if getattr(self, name):
                raise ConfigError(f"{name} is set, but DeBERTa has no such head. Use kind: bert.")
        if self.type_vocab or self.norm != "post" or self.gated:
            raise ConfigError(
                "DeBERTa has norm post, no token types and no gated activation. Leave norm, "
                "type_vocab and activation out, or use kind: bert."
            )
        if self.virtual_tokens:
            raise ConfigError(
                "model.peft adds positions, which DeBERTa's relative attention cannot place. Use "
                "model.peft=lora."
            )

    @property
    def attention_scale(self) -> float:
        # Three terms instead of one: their sum has the variance of three (eq. 4).
        return 1 / math.sqrt(3 * self.head_width)

    @property
    def position_table(self) -> bool:
        return False

    @property
    def normalizes_embeddings(self) -> bool:
        return True

    @property
    def buckets(self) -> int:
        """Number of distances with shared embeddings, on each side; 0: each has its own."""
        return 0

    @property
    def span(self) -> int:
        """Half of the number of relative embeddings."""
        return self.buckets or self.max_positions

    @property
    def normalizes_places(self) -> bool:
        """Whether the relative embeddings are normalized."""
        return False

    def static(self, index: int) -> tuple[bool, ...]:
        # The decoder runs the last layer, which is therefore in no loop.
        return (self.mask_decoder and index == self.layers - 1,)

    def build_layer(self, index: int, cross_attention: bool = False) -> nn.Module:
        return DisentangledLayer(self, index)

    def build_attention(self, index: int) -> nn.Module:
        return SeparateAttention(self)

    def build_base(self) -> Transformer:
        return Deberta(self, self._build_head(), self.build_extras())


class Deberta(Transformer):
    """An encoder with disentangled attention.

    Attributes:
        relative: the embeddings of relative positions.
        decoder_positions: absolute positions of the enhanced mask decoder; None without it.
    """

    config: Config

    def __init__(self, config: Config, head: nn.Module, extras: Sequence[Extra] = ()) -> None:
        super().__init__(config, head, extras)
        self.relative = RelativeEmbeddings(config, config.span, config.normalizes_places)
        self.decoder_positions: nn.Embedding | None = None
        if config.mask_decoder and config.predicts == "tokens":
            self.decoder_positions = nn.Embedding(config.max_positions, config.width)

    def sharding_units(self) -> list[nn.Module]:
        # The decoder runs the last layer twice: as a unit it would be gathered twice.
        # In the root unit it is gathered once, and its gradients are reduced once.
        units = super().sharding_units()
        return units if self.decoder_positions is None else units[:-1]

    def scan_groups(self) -> list[ScanGroup]:
        groups = super().scan_groups()
        return groups if self.decoder_positions is None else groups[:-1]

    def columns(self, inputs: Inputs) -> dict[str, Tensor]:
        tokens, segments = inputs.tokens, inputs.segments
        table, first, _ = self._places(length := tokens.shape[1])
        # Only the row of each distance is copied, from 1 - S to S - 1: the host would wait for the
        # device before it copies as much as the table. With 3 positions, distances -2 ... 2, the
        # pair (0, 2) has the distance -2, at index 0.
        by_distance = np.concatenate((table[0, ::-1], table[1:, 0])) - first
        rows = torch.tensor(by_distance).to(tokens.device, non_blocking=True)
        place = torch.arange(length, device=tokens.device)
        return {
            **super().columns(inputs),
            "places": rows[place[:, None] - place + (length - 1)],
            "segments": torch.ones_like(tokens) if segments is None else segments,
        }

    def _places(self, length: int) -> tuple[npt.NDArray[np.int64], int, int]:
        """The rows of the relative embeddings by pair of positions; the first and the last one."""
        table = place_table(length, self.config.buckets, self.config.max_positions)
        # Distances of a short sequence need the middle rows only. They decrease to the upper right.
        return table, int(table[0, -1]), int(table[-1, 0])

    def _mask(
        self, tokens: Tensor, segments: Tensor | None, prefix: Tensor | None, causal: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        mask, _ = super()._mask(tokens, segments, prefix, causal)
        _, first, last = self._places(tokens.shape[1])
        # In place of a bias, which the attention computes itself from these embeddings.
        return mask, self.relative(first, last + 1)

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        if self.decoder_positions is None or "tokens" not in outputs:
            return super().forward(inputs, outputs)
        found = self._decoded(inputs)
        if rest := outputs - {"tokens"}:
            found |= super().forward(inputs, rest)
        return found

    def _decoded(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits of masked tokens by the enhanced mask decoder, [B, P, V], or their scores."""
        assert self.decoder_positions is not None
        keys = self._keys(inputs.dropout_key)
        hidden, matrix, segments, _ = self._embed(inputs, keys.embeddings)
        mask, relative = self._mask(hidden[..., 0], segments, None, False)
        sites, columns = self.config.dropout_sites, self.columns(inputs)
        context = Context(mask=mask, sites=sites, keys=keys.layers, columns=columns)
        # A stack of the other layers, run as the whole stack would be: recomputed, or in a loop.
        below = Stack(list(self.layers)[:-1])
        below.runner, below.checkpointing = self.layers.runner, self.layers.checkpointing
        below.train(self.training)
        hidden = below.run(hidden, None, relative, context)
        length = inputs.tokens.shape[1]
        places = inputs.positions
        if places is None:
            places = torch.arange(length, device=hidden.device).expand(len(hidden), -1)
        at = inputs.predicted
        if at is None:
            at = torch.arange(length, device=hidden.device).expand(len(hidden), -1)
        # Absolute positions come in only here: "a new store opened beside the new mall" has two
        # nouns in equal surroundings, which the place in the sentence tells apart (section 3.2).
        absolute = self.decoder_positions(places.gather(1, at.long()))
        queries = take(hidden, at) + absolute.to(hidden.dtype)
        own = None if keys.layers is None else keys.layers[-1]
        # Keys and values are the states below in both passes; only the queries change.
        for _ in range(2):
            last = replace(context, positions=at, keys=own)
            queries = self.layers[-1]((queries, hidden), None, relative, last)
            if own is not None:  # other masks in the second pass
                own = torch.stack([split_key(key, 1)[0] for key in own])
        hidden = self._finish(queries, keys.final, at)
        return self.answer("tokens", self.head, inputs, hidden, matrix, keys.final)

    def start_from(self, stored: Stored) -> Start:
        start = super().start_from(stored)
        name = "decoder_positions.weight"
        if self.decoder_positions is None:
            return replace(start, unused=start.unused | {name})
        # A model without the decoder, such as a published one, may continue with one.
        new = {} if name in stored.shapes else {name: None}
        return replace(start, sources={**start.sources, **new})

    def flops_per_token(self, sequence_length: int, predicted_per_token: float = 1.0) -> float:
        """With the products of contents and places, and the decoder's second pass."""
        config = self.config
        _, first, last = self._places(sequence_length)
        products = 12 * (last + 1 - first) * config.heads * config.head_width
        passes = config.layers + (self.decoder_positions is not None) * predicted_per_token
        found = super().flops_per_token(sequence_length, predicted_per_token)
        if self.decoder_positions is not None:
            layer = 6 * config.width * (2 * config.width + 2 * config.ffn_width)
            scores = 12 * sequence_length * config.heads * config.head_width
            found += predicted_per_token * (layer + scores)
        return found + passes * products
