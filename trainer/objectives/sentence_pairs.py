"""Pairs of texts that a model embeds apart: what `cosine` and `contrastive` share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, Vocabulary
from trainer.models.inputs import Inputs
from trainer.objectives import ObjectiveConfig, Tensors
from trainer.objectives.task_rows import RowTask, single_labels


class SentencePairs(RowTask):
    """A task whose rows are two texts; their embeddings are compared (Reimers & Gurevych 2019).

    Both are in one row, as packed sequences, [CLS] first text [SEP] [CLS] second text [SEP], which
    do not see each other. To the rows of `RowTask` it adds:
        labels: float32 [B], the number of the row, or the index of its class.
        weights: float32 [B], the weight of the example.

    An embedding is the mean of the hidden states of a sequence, [CLS] and [SEP] included.
    """

    predicts = "embedding"
    needs = frozenset({"embedding"})

    def __init__(self, config: ObjectiveConfig, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary, "first")
        # [SEP] of the first text and [CLS] of the second one.
        self._parts = replace(self._parts, between=2)

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        batch = self.lay_out(examples, sequence_length)
        texts = np.bincount(examples.row, minlength=examples.key.size)
        if (texts != 2).any():
            raise ConfigError(
                f"a row of the dataset has {texts.min()} text, and embeddings of two texts are "
                "compared. Use a source with two texts."
            )
        second = (examples.column[1::2] - 1)[:, None]
        place = np.arange(sequence_length)
        used = np.greater(batch["segments"], 0)
        later = (place >= second) & used
        begin = self._rows.begin
        return {
            "tokens": np.where(place == second, begin, batch["tokens"]).astype(np.int32),
            "segments": (used + later.astype(np.int32)).astype(np.int32),
            "positions": np.where(later, place - second, batch["positions"]).astype(np.int32),
            "labels": single_labels(examples).astype(np.float32),
            "weights": examples.weight,
        }

    def embed(self, model: nn.Module, batch: Tensors) -> Tensor:
        """The embeddings of both texts of each row: float32 [B, 2, D]."""
        hidden = model(Inputs.of(batch), frozenset({"embedding"}))["embedding"].float()
        segments = batch["segments"][:, None, :]
        number = torch.arange(1, 3, device=segments.device)[:, None]
        share: Any = (segments == number).float()
        embedded: Tensor = (share / share.sum(-1, keepdim=True).clamp(min=1)) @ hidden
        return embedded


def similarities(pairs: Tensor) -> Tensor:
    """The cosine of both embeddings of each row: [B, 2, D] -> [B]."""
    return torch.cosine_similarity(pairs[:, 0], pairs[:, 1], dim=-1)
