"""BART (Lewis et al. 2020, arXiv 1910.13461)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models.config import Head, Norm
from trainer.models.encoder_decoder import EncoderDecoder
from trainer.models.families import Family
from trainer.models.heads import LanguageModelHead, PooledHead, TokenHead
from trainer.models.layers.dropout import dropout
from trainer.models.layers.embeddings import Embeddings

UNUSED_ROWS = 2
"""Rows at the start of the position tables that nothing reads, as in fairseq."""

_TASKS: tuple[Head, ...] = ("classification", "question_answering")


@dataclass(frozen=True)
class Config(Family):
    """BART-base; with 12 layers, width 1024, 16 heads and `ffn_width: 4096`, BART-large.

    Attributes:
        layers: number of the encoder's layers.
        decoder_layers: number of the decoder's layers, if it differs from `layers`.
        max_positions: maximum length of sources and targets, in tokens.
        ffn_dropout: dropout rate inside the feed-forward network.
        head_dropout: dropout rate in the head for classification.
        scale_embeddings: whether token embeddings are multiplied by the square root of the width.
        initializer_range: standard deviation of the initial weights.
        start_token: id of the decoder's first input token, before each target: the tokenizer's
            `</s>`, as 2 in BART's own.
        head: predicts tokens (`language_model`); or, fine-tuned for a task, from the decoder, which
            gets the text too: its class (`classification`), or the first and last token of an
            answer (`question_answering`).
        labels: names of classes; `classification` with a single label is a regression.
    """

    codec: ClassVar[str] = "trainer.models.codecs.bart"

    vocab_size: int = 50265
    layers: int = 6
    decoder_layers: int | None = None
    max_positions: int = 1024
    ffn_dropout: float = 0.0
    head_dropout: float = 0.0
    scale_embeddings: bool = False
    initializer_range: float = 0.02
    start_token: int = 2
    head: Head = "language_model"
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("max_positions")
        if self.decoder_layers is not None:
            self.check_positive("decoder_layers")
        for name in ("ffn_dropout", "head_dropout"):
            self.check_rate(name)
        if not self.initializer_range > 0:
            raise ConfigError(
                f"initializer_range is {self.initializer_range}. Use a number above 0."
            )
        if not 0 <= self.start_token < self.vocab_size:
            raise ConfigError(
                f"start_token is {self.start_token}, and vocab_size {self.vocab_size}. Use the id "
                "of the tokenizer's </s>."
            )
        self.check_heads()
        self.check_task(*_TASKS)

    @property
    def norm(self) -> Norm:
        return "post"

    @property
    def position_table(self) -> bool:
        return False  # each stack has its own, beside the shared table of tokens

    @property
    def normalizes_embeddings(self) -> bool:
        return False  # after the positions, see `LearnedPositions`

    @property
    def embedding_dropout(self) -> float:
        return 0.0  # likewise

    @property
    def settings_for(self) -> Mapping[str, str]:
        heads: dict[str, str] = {head: f"model.head={head}" for head in _TASKS}
        return {"target_tokens": "model.head=language_model", **heads}

    @property
    def encoder_decoder(self) -> bool:
        return True

    @property
    def decoder(self) -> bool:
        return True

    @property
    def sets_start(self) -> bool:
        return True

    @property
    def reads_sources(self) -> bool:
        return True

    @property
    def dropout_sites(self) -> tuple[str, ...]:
        of_branches = ("attention", "attention_output", "ffn_output")
        return (*of_branches, "ffn_hidden", "cross_attention", "cross_attention_output")

    def initial_std(self, name: str) -> tuple[float, ...]:
        return (self.initializer_range,)

    def build_embeddings(self) -> nn.Module:
        return ScaledEmbeddings(self) if self.scale_embeddings else Embeddings(self)

    def build_base(self) -> EncoderDecoder:
        return EncoderDecoder(
            self,
            self._build_head(),
            decoder_layers=self.stacks["decoder"],
            encoder_positions=LearnedPositions(self),
            decoder_positions=LearnedPositions(self),
        )

    @property
    def stacks(self) -> dict[str, int]:
        """Number of layers of each stack."""
        return {"encoder": self.layers, "decoder": self.decoder_layers or self.layers}

    def _build_head(self) -> nn.Module:
        if self.head == "language_model":
            return LanguageModelHead(self, bias=True)
        if self.head == "classification":
            return PooledHead(self, self.classes, dropout_first=True)
        return TokenHead(self.width, self.classes)


class ScaledEmbeddings(Embeddings):
    """Token embeddings times the square root of their width (Vaswani et al. 2017, section 3.4)."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `Embeddings.forward`; the matrix for the head is not scaled."""
        hidden, matrix = super().forward(*args, **kwargs)
        return hidden * matrix.shape[1] ** 0.5, matrix


class LearnedPositions(nn.Module):
    """Adds a stack's learned positions to embeddings, normalizes the sum and applies dropout."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.table = nn.Embedding(config.max_positions + UNUSED_ROWS, config.width)
        self.norm = config.build_norm()

    def forward(self, hidden: Tensor, positions: Tensor, key: Tensor | None = None) -> Tensor:
        """[B, S, D], int [B, S] or [1, S] -> [B, S, D]; key: int32 [B], None means no dropout."""
        hidden = hidden + self.table(positions + UNUSED_ROWS)
        return dropout(self.norm(hidden), self.dropout, key)
