"""Masked language modelling (Devlin et al. 2019, "BERT", section 3.1), with masks drawn anew for each epoch.

The masks of an example are hashes of (its key, position), so they do not depend on the batch it travels in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.examples import Batch, Examples, PackSpec, Vocabulary
from trainer.hashing import U64, combine, mix, name_key, uniform
from trainer.objectives import Loss

Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]

_CHOOSE = name_key("mlm.choose")
_REPLACE = name_key("mlm.replace")
_COLUMN_BITS = np.uint64(0xFFFF)
_NEVER = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True)
class Config:
    """Masked language modelling.

    Attributes:
        mask_fraction: share of an example's tokens that are predicted; the rounded count, at least 1, is exact.
        replace_mask: probability that a predicted token is replaced by [MASK].
        replace_random: probability that it is replaced by a random token; otherwise it is left as it is.
    """

    mask_fraction: float = 0.15
    replace_mask: float = 0.8
    replace_random: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.mask_fraction <= 1:
            raise ConfigError(f"mask_fraction is {self.mask_fraction}; use a share above 0 and at most 1, as 0.15")
        if min(self.replace_mask, self.replace_random) < 0 or self.replace_mask + self.replace_random > 1 + 1e-9:
            raise ConfigError(
                f"replace_mask {self.replace_mask} and replace_random {self.replace_random} must be probabilities that "
                "add up to at most 1; use 0.8 and 0.1"
            )

    def build(self, vocabulary: Vocabulary) -> MaskedLM:
        return MaskedLM(self, vocabulary)


class MaskedLM:
    """The masked-language-modelling objective; see `trainer.objectives.Objective`.

    A batch holds, for B examples of S cells and P predictions (`predictions(S)`):
        tokens: int32 [B, S], the model's input, masks applied.
        segments: int32 [B, S], 0 for padding, else the number from 1 of the sequence within its row.
        positions: int32 [B, S], cells since the sequence's [CLS]; 0 for padding.
        predicted: int64 [B, P], the cells to predict; unused entries, all at the end of a row, are 0.
        labels: int64 [B, P], the original tokens of those cells.
        weights: float32 [B, P], 1 for a prediction that counts, 0 for unused entries and examples of weight 0.

    Raises:
        ConfigError: the vocabulary has no [MASK], [CLS], [SEP] or [PAD], or only special tokens.
    """

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        needed = {"[MASK]": vocabulary.mask, "[CLS]": vocabulary.cls, "[SEP]": vocabulary.sep, "[PAD]": vocabulary.pad}
        ids = {name: token for name, token in needed.items() if token is not None}
        ordinary = np.setdiff1d(np.arange(vocabulary.size, dtype=np.int32), [*vocabulary.special, *ids.values()])
        if len(ids) < len(needed) or ordinary.size == 0:
            raise ConfigError(
                f"the objective mlm needs {', '.join(needed)} and ordinary tokens besides; this tokenizer has "
                f"{', '.join(ids) or 'no special tokens'} and {ordinary.size} ordinary tokens; use a tokenizer made "
                "for BERT or RoBERTa"
            )
        self.config = config
        self._mask, self._cls, self._sep, self._pad = (np.int32(ids[name]) for name in needed)
        self._ordinary = ordinary
        self._is_ordinary = np.zeros(vocabulary.size, dtype=np.bool_)
        self._is_ordinary[ordinary] = True

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """One cell for [CLS] before a sequence and one for [SEP] after each piece.

        Raises:
            ConfigError: no room for a token between them, or more cells than `collate` can number.
        """
        if not 3 <= sequence_length <= 65_536:
            raise ConfigError(
                f"sequence_length is {sequence_length}; mlm needs 3 ([CLS], a token, [SEP]) to 65536, for example 128"
            )
        return PackSpec(sequence_length, prefix=1, suffix=1)

    def predictions(self, sequence_length: int) -> int:
        """P, the predictions that a row of `sequence_length` cells has room for."""
        return max(1, round(self.config.mask_fraction * (sequence_length - 2)))

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        """Lays the pieces out in rows of S = `sequence_length` cells and masks them; see the class for the arrays."""
        tokens, segments, positions = self._lay_out(examples, sequence_length)
        predicted, used = self._choose(examples.key, tokens)
        cells = predicted + np.arange(len(tokens))[:, None] * sequence_length
        labels = tokens.reshape(-1)[cells]
        # Unused entries point at cell 0, which is never masked: they write back what they read.
        tokens.reshape(-1)[cells] = np.where(used, self._replace(examples.key, predicted, labels), labels)
        return {
            "tokens": tokens,
            "segments": segments,
            "positions": positions,
            "predicted": predicted,
            "labels": labels.astype(np.int64),
            "weights": used * examples.weight[:, None],
        }

    def _lay_out(self, examples: Examples, width: int) -> tuple[Int32, Int32, Int32]:
        """Returns tokens, segments and positions, each [B, S], without masks."""
        row, shape = examples.row, (examples.key.size, width)
        first = row * width + examples.column  # cells are numbered through the batch, row by row
        after = first + examples.length
        if examples.isolated:  # every piece is a sequence
            begin, end = first - 1, after + 1
            number = np.arange(1, row.size + 1) - np.searchsorted(row, row)
        else:  # every row is one
            last = np.flatnonzero(np.diff(row, append=-1))
            begin, end = row[last] * width, after[last] + 1
            number = np.ones(last.size, dtype=np.int64)

        cells = np.arange(examples.key.size * width, dtype=np.int32)
        tokens = np.full(cells.size, self._pad, dtype=np.int32)
        tokens[_paint(first, after, 1, cells.size) > 0] = examples.tokens
        tokens[begin] = self._cls
        tokens[after] = self._sep
        segments = _paint(begin, end, number, cells.size)
        positions = (cells - _paint(begin, end, begin, cells.size)) * (segments > 0)
        return tokens.reshape(shape), segments.reshape(shape), positions.reshape(shape)

    def _choose(self, key: U64, tokens: Int32) -> tuple[Int64, npt.NDArray[np.bool_]]:
        """Chooses the ordinary tokens of smallest hash; returns their columns [B, P] and which are in use [B, P]."""
        width = tokens.shape[1]
        slots = self.predictions(width)
        column = np.arange(width, dtype=np.uint64)
        # The column in the low bits makes hashes distinct, and lets us partition values, which is quicker than indices.
        rank = (combine(key[:, None], _CHOOSE, column) & ~_COLUMN_BITS) | column
        maskable = self._is_ordinary.take(tokens)
        rank[~maskable] = _NEVER
        rank.partition(slots - 1, axis=1)
        lowest = np.sort(rank[:, :slots], axis=1)

        available = maskable.sum(axis=1)
        count = np.minimum(available, np.maximum(1, np.rint(self.config.mask_fraction * available)))
        used = np.arange(slots) < count[:, None]
        return np.where(used, lowest & _COLUMN_BITS, 0).astype(np.int64), used

    def _replace(self, key: U64, predicted: Int64, labels: Int32) -> Int32:
        """What stands in the predicted cells [B, P]: [MASK], a random ordinary token, or the label itself."""
        hashed = combine(key[:, None], _REPLACE, predicted)
        draw = uniform(hashed)
        random = self._ordinary[mix(hashed) % np.uint64(self._ordinary.size)]
        masked = np.where(draw < self.config.replace_mask, self._mask, random)
        return np.where(draw < self.config.replace_mask + self.config.replace_random, masked, labels)

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """The number of predictions that count."""
        return {"mlm": float(batch["weights"].sum())}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]) -> Loss:
        """Cross-entropy of the predicted tokens in float32, over the step's number of predictions, totals["mlm"]."""
        logits = model(
            tokens=batch["tokens"],
            segments=batch["segments"],
            positions=batch["positions"],
            predicted=batch["predicted"],
            dropout_key=batch.get("dropout_key"),
        ).flatten(0, 1)
        labels, weights = batch["labels"].flatten(), batch["weights"].flatten()
        nll = (F.cross_entropy(logits.float(), labels, reduction="none") * weights).sum()
        correct = ((logits.detach().argmax(dim=-1) == labels) * weights).sum()
        weight = weights.sum()
        return Loss(nll / totals["mlm"], {"loss": (nll.detach(), weight), "accuracy": (correct, weight)})


def _paint(begin: Int64, end: Int64, value: npt.ArrayLike, cells: int) -> Int32:
    """A line of `cells` zeros with value[i] in the cells begin[i] up to end[i]; spans ascend and do not overlap."""
    edges = np.empty(2 * begin.size + 2, dtype=np.int64)
    edges[0], edges[1:-1:2], edges[2:-1:2], edges[-1] = 0, begin, end, cells
    values = np.zeros(edges.size - 1, dtype=np.int32)
    values[1::2] = value
    return np.repeat(values, edges[1:] - edges[:-1])
