"""Input embeddings: the sum of token, position and type, as far as a family has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.models.config import TransformerConfig
from trainer.models.dropout import dropout
from trainer.models.layers import make_norm


class _Lookup(torch.autograd.Function):
    """Rows of a matrix, and the matrix for its second use in the head.

    One node for both adds their gradients in place. Two would fill a matrix of zeros for the rows, and sum two matrices
    into a third: 4 % of a step of BERT-base on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        return F.embedding(ids, matrix), matrix.view_as(matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, matrix: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return matrix.index_add_(0, ids.flatten(), rows.flatten(0, -2)), None


class Embeddings(nn.Module):
    """Learned embeddings of tokens and, with `max_positions`, of positions; dropped out.

    With `types` also of token types, and the sum is normalised (Devlin et al. 2019, figure 2).
    """

    def __init__(self, config: TransformerConfig, max_positions: int | None = None, types: int | None = None) -> None:
        super().__init__()
        self.position_offset = config.position_offset
        self.dropout = config.dropout
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = None
        if max_positions is not None:
            self.positions = nn.Embedding(max_positions + config.position_offset, config.width)
        self.types = None if types is None else nn.Embedding(types, config.width)
        self.norm = None if types is None else make_norm(config)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        token_types: Tensor | None = None,
        dropout_key: Tensor | None = None,
        prompt: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor]:
        """int [B, S] each -> [B, S, D], and the token embeddings [V, D] for a tied head.

        Without token_types every cell is of type 0. With a prompt, of n cells: [B, n + S, D]; it takes the first n
        positions, and those that are given are of the tokens behind it.
        """
        hidden, matrix = _Lookup.apply(self.tokens.weight, tokens)  # type: ignore[no-untyped-call]
        if prompt is not None:
            hidden = prompt(hidden)
            before = torch.arange(hidden.shape[1] - tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
            positions = None if positions is None else torch.cat([before.to(positions.dtype), positions], 1)
            token_types = None if token_types is None else F.pad(token_types, (before.shape[1], 0))
        if self.positions is not None:
            assert positions is not None, "the model has a position table"
            hidden = hidden + self.positions(positions + self.position_offset)
        if self.types is not None:
            hidden = hidden + (self.types.weight[0] if token_types is None else self.types(token_types))
        if self.norm is not None:
            hidden = self.norm(hidden)
        return dropout(hidden, self.dropout, dropout_key), matrix
