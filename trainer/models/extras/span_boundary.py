"""A head that predicts the tokens of a masked span from the states around it (SpanBERT)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.config import TransformerConfig
from trainer.models.extras import Extra, HeadInput
from trainer.models.heads import Factors, VocabularyHead, answer
from trainer.models.layers import LayerNorm
from trainer.models.layers.attention import take


class SpanBoundary(VocabularyHead, Extra):
    """Predicts a token of a span from the states outside of it (Joshi et al. 2020, section 3.2).

    Two layers with GELU and norm read the state before the span, the state after it, and an
    embedding of the token's place in the span; the output matrix is the token embeddings.

    Args:
        config: of the model.
        positions: number of places with an embedding; later ones share the last.
        width: of these embeddings.
    """

    name = "span_head"
    offers = frozenset({"span_boundary"})
    trains: ClassVar[Mapping[str, str]] = {"span_boundary": "model.span_boundary=false"}
    columns = ("span_first", "span_last", "span_offset")
    needs_positions = "all"
    pretraining = "model.span_boundary"

    def __init__(self, config: TransformerConfig, positions: int = 20, width: int = 200) -> None:
        super().__init__()
        self.vocabulary = config.vocab_size
        self.positions = nn.Embedding(positions, width)
        self.first = nn.Linear(2 * config.width + width, config.width)
        self.first_norm = LayerNorm(config.width, eps=config.norm_eps)
        self.second = nn.Linear(config.width, config.embedding_width)
        self.second_norm = LayerNorm(config.embedding_width, eps=config.norm_eps)

    def factors(self, hidden: Tensor, embedding: Tensor, *columns: Any) -> Factors:
        """[B, S, D], token embeddings [V, E], the columns of `mlm_sbo`, int [B, P] each."""
        first, last, offset = columns
        # [CLS] and [SEP] surround every sequence, so the states before and after a span exist.
        place = self.positions(offset.clamp(max=self.positions.num_embeddings - 1))
        read = torch.cat([take(hidden, first - 1), take(hidden, last + 1), place], -1)
        inner = self.first_norm(F.gelu(self.first(read)))
        return self.second_norm(F.gelu(self.second(inner))), embedding, None

    def answer(self, model: nn.Module, head_input: HeadInput) -> dict[str, Tensor]:
        if "span_boundary" not in head_input.outputs:
            return {}
        target = head_input.inputs.targets.get("span_boundary")
        columns = [head_input.inputs.extra[name] for name in self.columns]
        size, hidden, matrix = self.vocabulary, head_input.hidden, head_input.matrix
        return answer("span_boundary", self, target, size, hidden, matrix, *columns)
