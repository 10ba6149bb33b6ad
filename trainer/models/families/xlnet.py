"""XLNet (Yang et al. 2019, arXiv 1906.08237)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models import Outputs, Start, Stored
from trainer.models.families import bert
from trainer.models.heads import Factors, VocabularyHead
from trainer.models.inputs import Inputs
from trainer.models.layers.attention import segment_mask
from trainer.models.layers.dropout import dropout, split_key
from trainer.models.layers.embeddings import Embeddings
from trainer.models.layers.two_streams import SITES, TwoStreamLayer, distance_encodings
from trainer.models.stack import Context
from trainer.models.transformer import Transformer

_PERMUTED = "permuted_tokens"


@dataclass(frozen=True)
class Config(bert.Config):
    """XLNet-base.

    Attributes:
        max_positions: maximum sequence length; there is no table of positions.
        type_vocab: number of segments that `data.packing: pairs` may mark; layers only compare
            them.
    """

    codec: ClassVar[str] = "trainer.models.codecs.xlnet"
    # The dropout after the last layer is the last: heads that score each position have none.
    heads_with_dropout: ClassVar[frozenset[str]] = frozenset()
    fewest_types: ClassVar[int] = 0

    vocab_size: int = 32000

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "nsp",
            "span_boundary",
            "causal",
            "also_causal",
            "teacher_width",
            "scalar_mix",
            "head_lstm",
            "crf",
        ):
            if getattr(self, name):
                raise ConfigError(f"{name} is set, but XLNet has no such head. Use kind: bert.")
        if not self.tied or self.norm != "post" or self.gated:
            raise ConfigError(
                "XLNet has norm post, tied embeddings and no gated activation. Leave norm, tied "
                "and activation out, or use kind: bert."
            )
        if self.width % 2:
            raise ConfigError(f"width is {self.width}. XLNet's sinusoids need an even width.")
        if self.virtual_tokens:
            raise ConfigError(
                "model.peft adds positions, which XLNet's relative attention cannot place. Use "
                "model.peft=lora."
            )

    @property
    def predicts(self) -> str:
        return _PERMUTED if self.head == "language_model" else super().predicts

    @property
    def settings_for(self) -> Mapping[str, str]:
        settings = {name: value for name, value in super().settings_for.items() if "head" in value}
        return {**settings, _PERMUTED: "model.head=language_model"}

    @property
    def position_table(self) -> bool:
        return False

    # Embeddings go to the layers as they are: each layer normalizes its own sums.
    @property
    def normalizes_embeddings(self) -> bool:
        return False

    @property
    def dropout_sites(self) -> tuple[str, ...]:
        # The content stream's and the query stream's.
        return (*SITES, *(f"query_{site}" for site in SITES))

    @property
    def final_dropout(self) -> bool:
        return True

    def build_embeddings(self) -> nn.Module:
        # Segments are compared in the layers. They have no embeddings, whatever type_vocab says.
        return Embeddings(replace(self, type_vocab=0))

    def build_layer(self, index: int, cross_attention: bool = False) -> nn.Module:
        return TwoStreamLayer(self, index)

    def build_base(self) -> Transformer:
        return XLNet(
            self, TiedTokenHead(self) if self.head == "language_model" else self._build_head()
        )


class TiedTokenHead(VocabularyHead):
    """Predicts tokens by the token embeddings and a bias."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def factors(self, hidden: Tensor, embedding: Tensor, *_columns: Any) -> Factors:
        return hidden, embedding, self.bias


class XLNet(Transformer):
    """An encoder whose pre-training predicts tokens in a factorization order.

    For `permuted_tokens` it reads the column `rank`, int [B, S]: a position attends to those of
    rank 0 and of a smaller rank than its own, in the content stream also to itself. All other
    outputs attend to all positions.

    Attributes:
        mask_embedding: the query stream's input; None with the head of a task.
    """

    config: Config

    def __init__(self, config: Config, head: nn.Module) -> None:
        super().__init__(config, head, config.build_extras())
        predicts = config.head == "language_model"
        self.mask_embedding = nn.Parameter(torch.empty(config.width)) if predicts else None

    def reads_for(self, outputs: Outputs) -> frozenset[str]:
        return super().reads_for(outputs) | frozenset({"rank"} if _PERMUTED in outputs else ())

    def columns(self, inputs: Inputs) -> dict[str, Tensor]:
        tokens, types = inputs.tokens, inputs.token_types
        return {
            **super().columns(inputs),
            "token_types": torch.zeros_like(tokens) if types is None else types,
            "distances": distance_encodings(tokens.shape[1], self.config.width, tokens.device)[
                None
            ],
        }

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if _PERMUTED in outputs:
            found = self._permuted(inputs)
        if rest := outputs - {_PERMUTED}:
            found |= super().forward(inputs, rest)
        return found

    def _permuted(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits [B, P, V] of the predicted positions, or their scores."""
        assert inputs.predicted is not None, "only predicted positions have a query stream"
        assert self.mask_embedding is not None
        keys, at, rank = self._keys(inputs.dropout_key), inputs.predicted, inputs.extra["rank"]
        content, matrix, segments, _ = self._embed(inputs, keys.embeddings)
        # visible[b, i, j]: whether position i may read position j. With the ranks 0 2 1 of a b c, b
        # reads a and c, c reads a alone, and a reads a alone.
        visible = (rank[:, None, :] == 0) | (rank[:, None, :] < rank[:, :, None])
        if segments is not None:
            visible = visible & segment_mask(segments)[:, 0]
        # Only the content stream sees its own token: the query stream has to predict it.
        itself = torch.eye(rank.shape[1], dtype=torch.bool, device=rank.device)
        predicted = self.mask_embedding.expand(len(at), at.shape[1], -1).to(content.dtype)
        if keys.embeddings is not None:
            key = split_key(keys.embeddings, 1)[0]  # another mask than the content stream's
            predicted = dropout(predicted, self.config.dropout, key, at)
        context = Context(
            mask=(visible | itself)[:, None],
            sites=self.config.dropout_sites,
            keys=keys.layers,
            columns={
                **self.columns(inputs),
                "predicted": at,
                "visible": visible.take_along_dim(at.long()[..., None], 1)[:, None],
            },
        )
        # Passing the predicted positions marks the last layer, which needs no content stream.
        _, predicted = self.layers.run((content, predicted), None, None, context, at)
        hidden = self._finish(predicted, keys.final, at)
        return self.answer(_PERMUTED, self.head, inputs, hidden, matrix)

    def start_from(self, stored: Stored) -> Start:
        start = super().start_from(stored)
        name = "mask_embedding"
        if self.mask_embedding is None:
            return replace(start, unused=start.unused | {name})
        new = {} if name in stored.shapes else {name: None}
        return replace(start, sources={**start.sources, **new})

    def flops_per_token(self, sequence_length: int, predicted_per_token: float = 1.0) -> float:
        """The content stream at all positions, and the query stream at the predicted ones.

        Keys of distances are projected once for a batch, and do not count; scores of distances
        do, and there are twice as many as of contents.
        """
        config = self.config
        layer = 6 * config.width * (2 * config.width + 2 * config.ffn_width)  # q, out, ffn
        keys = 6 * config.width * 2 * config.width
        attention = 24 * sequence_length * config.heads * config.head_width
        # The content stream skips the last layer, and the query stream has all of them.
        streams = config.layers - 1 + config.layers * predicted_per_token
        if config.head != "language_model":
            streams = config.layers - 1 + predicted_per_token
        shared = self.embedding_flops() + predicted_per_token * self.head_flops()
        return streams * (layer + attention) + config.layers * keys + shared
