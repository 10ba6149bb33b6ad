"""Input embeddings: the sum of token, position and token-type embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.accelerators.kernels import adds_rows_in_order
from trainer.models.config import TransformerConfig
from trainer.models.layers.dropout import dropout


class _Lookup(torch.autograd.Function):
    """Looks up rows of a matrix, and returns the matrix for its second use in the head.

    A single autograd node adds both gradients in place. Two nodes would fill a matrix of zeros for
    the rows and sum two matrices into a third: 4 % of a BERT-base step on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        return F.embedding(ids, matrix), matrix.view_as(matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, matrix: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        if adds_rows_in_order(matrix.device):
            return matrix.index_add_(0, ids.flatten(), rows.flatten(0, -2)), None
        # Sorts the ids first, so that a repeated run has the same bits.
        backward = torch.ops.aten.embedding_dense_backward
        return matrix.add_(backward(rows, ids, len(matrix), -1, False)), None


def look_up(matrix: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a matrix [V, E] by int [B, S] -> [B, S, E], and the matrix, for a tied head."""
    found: tuple[Tensor, Tensor] = _Lookup.apply(matrix, tokens)  # type: ignore[no-untyped-call]
    return found


class Embeddings(nn.Module):
    """The sum of a family's embeddings: tokens, positions, token types; then dropout.

    BERT normalizes the sum before dropout (Devlin et al. 2019, figure 2). Embeddings
    of another width E than the hidden states' D are projected after it (Lan et al. 2020, "ALBERT",
    section 3.1: V E + E D weights instead of V D).

    Args:
        config: of the model.
        shared: embeddings of another model, whose tables and norm are used; None: own ones.

    Attributes:
        stream_dtype: see `FeedsResidual`; None keeps the dtype of the sum, or of its projection.
    """

    stream_dtype: torch.dtype | None = None

    def __init__(self, config: TransformerConfig, shared: Embeddings | None = None) -> None:
        super().__init__()
        self.position_offset = config.position_offset
        self.dropout = config.embedding_dropout
        width = config.embedding_width
        if shared is None:
            self.tokens = nn.Embedding(config.vocab_size, width)
            self.positions = None
            if config.position_table:
                assert config.max_positions is not None
                rows = config.max_positions + config.position_offset
                self.positions = nn.Embedding(rows, width)
            self.types = nn.Embedding(config.type_vocab, width) if config.type_vocab else None
            self.norm = config.build_norm(width) if config.normalizes_embeddings else None
        else:
            self.tokens, self.positions = shared.tokens, shared.positions
            self.types, self.norm = shared.types, shared.norm
        self.projection = nn.Linear(width, config.width) if config.projects_embeddings else None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        token_types: Tensor | None = None,
        dropout_key: Tensor | None = None,
        prompt: nn.Module | None = None,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """int [B, S] each -> [B, S, D], and the token embeddings [V, E] for a tied head.

        Without `token_types` all positions have type 0. With a prompt of n positions the result is
        [B, n + S, D]; the prompt has positions 0 to n - 1, and `positions` are the tokens'. For
        `noise` see `Inputs`.
        """
        hidden, matrix = self.look_up(tokens)
        if prompt is not None:
            hidden = prompt(hidden)
            count = hidden.shape[1] - tokens.shape[1]
            # The prompt takes positions 0 to n - 1 and token type 0.
            before = torch.arange(count, device=tokens.device).expand(len(tokens), -1)
            if positions is not None:
                positions = torch.cat([before.to(positions.dtype), positions], 1)
            if token_types is not None:
                token_types = F.pad(token_types, (count, 0))
        if self.positions is not None:
            assert positions is not None, "the model has a position table"
            hidden = hidden + self.positions(positions + self.position_offset)
        if self.types is not None:
            # Adding row 0 is cheaper than looking it up for every position.
            one_type = token_types is None
            hidden = hidden + (self.types.weight[0] if one_type else self.types(token_types))
        if noise is not None:
            # Without weights, so that noise has the same size for all tokens and models.
            hidden = F.layer_norm(hidden.detach(), hidden.shape[-1:])
            hidden = hidden + F.pad(noise, (0, 0, hidden.shape[1] - noise.shape[1], 0))
        if self.norm is not None:
            hidden = self.norm(hidden)
        hidden = dropout(hidden, self.dropout, dropout_key)
        if self.projection is not None:
            hidden = self.projection(hidden)
        if self.stream_dtype is not None:
            hidden = hidden.to(self.stream_dtype)
        return hidden, matrix

    def look_up(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The token embeddings: int [B, S] -> [B, S, E], and all of them, [V, E]."""
        return look_up(self.tokens.weight, tokens)
