"""The columns of a batch that a model reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Self

from torch import Tensor

from trainer.models.token_scores import Target


@dataclass(frozen=True)
class Inputs:
    """The columns of a batch that a model reads; None if the batch lacks one.

    B rows of S positions, with P predictions per row. A row may hold several packed sequences.

    Attributes:
        tokens: int [B, S].
        segments: int [B, S]; 0 is padding; 1, 2, ... number the sequences of a row. Attention stays
            within a segment. None: each row is one sequence without padding.
        positions: int [B, S], counted from 0 in each sequence.
        predicted: int [B, P], the positions whose hidden states the head reads; None: all.
        token_types: int [B, S]; None: type 0 everywhere.
        prefix: bool [B, S], positions of a causal model that are visible to their whole segment.
        target_tokens: int [B, T], the input of an encoder-decoder's decoder.
        target_segments, target_positions: int [B, T]. A target position attends to the source
            positions with the same segment number.
        dropout_key: int32 [B], a random key for each row; None: no dropout.
        noise: float [B, S, E], added to normalized embeddings without gradients (SiFT).
        extra: other columns of the batch, by name. A model reads those listed in `reads`. Batches
            of a loader also have `step_key`, int32 [B], a random key that all rows of a step share.
        targets: output -> the tokens that it should predict. For these outputs a model may return
            scores (`scores_of`) in place of logits.
    """

    tokens: Tensor
    segments: Tensor | None = None
    positions: Tensor | None = None
    predicted: Tensor | None = None
    token_types: Tensor | None = None
    prefix: Tensor | None = None
    target_tokens: Tensor | None = None
    target_segments: Tensor | None = None
    target_positions: Tensor | None = None
    dropout_key: Tensor | None = None
    noise: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    targets: Mapping[str, Target] = field(default_factory=dict)

    # A batch also has columns for the loss and for bookkeeping. Models get them in `extra`, so a
    # new model may read a new column without a change here.
    @classmethod
    def of(
        cls, batch: Mapping[str, Tensor], targets: Mapping[str, Target] = MappingProxyType({})
    ) -> Self:
        """Selects a model's inputs from a batch."""
        given = {name: batch[name] for name in _COLUMNS if name in batch}
        extra = {name: batch[name] for name in batch if name not in given}
        return cls(**given, extra=extra, targets=targets)

    # Strategies move or shard all columns alike through this.
    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Applies a function to every column except `extra` and `targets`."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        changed = {name: change(column) for name, column in columns.items() if column is not None}
        return type(self)(**changed, extra=self.extra, targets=self.targets)


_COLUMNS = tuple(
    column.name for column in fields(Inputs) if column.name not in ("extra", "targets")
)
