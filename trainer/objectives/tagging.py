"""A tag for each word, as in named-entity recognition (Devlin et al. 2019, section 5.3): that of its first token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.examples import Batch, Examples, PackSpec, Parts, Vocabulary
from trainer.metrics import check_names, entities
from trainer.objectives import Loss, ObjectiveConfig, Predictions, Task
from trainer.objectives.rows import logits
from trainer.objectives.task_rows import Int64, RowWindows, TaskRows, labels_of, last_pieces
from trainer.tasks import TASKS

_OUTSIDE = "O"


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Tagging of words. A text that is too long becomes several examples, which do not overlap.

    Attributes:
        metrics: that the held-out split is scored with, each over whole entities of tags like B-PER and I-PER:
            entity_f1, entity_precision, entity_recall; [] for tags that name no entities, as parts of speech.
    """

    metrics: tuple[str, ...] = ("entity_f1",)

    def __post_init__(self) -> None:
        check_names(self.metrics, TASKS["tagging"].metrics)

    def build(self, vocabulary: Vocabulary) -> Task:
        return Tagging(self, vocabulary)


class Tagging(Task):
    """The tagging objective; see `trainer.objectives.Task`.

    To the rows of `TaskRows` it adds, for B examples of S cells:
        labels: int64 [B, S], the tag of the cell's token, the first one of a word; -1 in all other cells.
        weights: float32 [B, S], 1 for a cell with a tag, 0 for others and in examples of weight 0.

    The outputs are the tags with the highest scores, float32 [B, S]: logits of all cells would be many.

    Raises:
        ConfigError: as for `TaskRows`.
    """

    predicts = "tagging"
    needs = frozenset({"tagging"})

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        self.config = config
        self._rows = TaskRows(vocabulary)

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """A text in windows, one after the other."""
        return self._rows.pack_spec(sequence_length, Parts("tagging", between=self._rows.between))

    def predictions(self, sequence_length: int) -> int:
        """All cells."""
        return sequence_length

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        """Lays the texts out; see the class for the arrays."""
        batch = self._rows.lay_out(examples, sequence_length)
        labels, (column, length) = labels_of(examples), last_pieces(examples)
        # A row's tags are those of all its tokens; an example takes those of its window.
        within: Int64 = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
        first_tag = np.cumsum(labels.count) - labels.count + labels.begin
        first_cell = np.arange(length.size) * sequence_length + column
        tags: Int64 = np.full(batch["tokens"].size, -1)
        tags[np.repeat(first_cell, length) + within] = labels.values[
            np.repeat(first_tag, length) + within
        ]
        tags = tags.reshape(-1, sequence_length)
        return {**batch, "labels": tags, "weights": (tags >= 0) * examples.weight[:, None]}

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """The number of tags that count."""
        return {"tags": float(batch["weights"].sum())}

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> Loss:
        """Cross-entropy in float32, over the step's number of tags, totals["tags"]."""
        scores = logits(model, batch, self.predicts).float()
        labels, weights = batch["labels"], batch["weights"]
        nll = F.cross_entropy(
            scores.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-1
        )
        nll = (nll * weights.flatten()).sum()
        tags = scores.detach().argmax(-1)
        weight = weights.sum()
        metrics = {
            "loss": (nll.detach(), weight),
            "accuracy": (((tags == labels) * weights).sum(), weight),
        }
        return Loss(nll / totals["tags"], metrics, tags.float())

    @property
    def score_names(self) -> tuple[str, ...]:
        """The metrics."""
        return self.config.metrics

    def scores(self, predictions: Predictions) -> dict[str, float]:
        """The metrics, over all words of the split; a word that no token stands for is predicted to be outside."""
        return entities.scores(self.config.metrics, self.tags(predictions), _true_tags(predictions))

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """The words of each row, their tags as label, and the predicted ones."""
        for row, true, found in zip(
            predictions.rows, _true_tags(predictions), self.tags(predictions), strict=True
        ):
            words = [row.texts[-1][begin:end] for begin, end, _ in row.spans]
            yield {"words": words, "label": true, "prediction": found}

    def tags(self, predictions: Predictions) -> list[list[str]]:
        """The predicted tag of each word of each row: that of the first token that shares a character with it."""
        names = (*predictions.labels, _OUTSIDE)
        found = []
        for of_row in self._rows.windows(predictions, most=None):
            tag = _tags_of_tokens(of_row, predictions)
            words = np.array(of_row.row.spans, dtype=np.int64).reshape(-1, 3)[:, :2]
            tokens = np.array(of_row.row.offsets, dtype=np.int64).reshape(-1, 2)
            found.append([names[i] for i in tag[_first_tokens(words, tokens)].tolist()])
        return found


def _true_tags(predictions: Predictions) -> list[list[str]]:
    """The tag of each word of each row."""
    return [[predictions.labels[tag] for _, _, tag in row.spans] for row in predictions.rows]


def _tags_of_tokens(of_row: RowWindows, predictions: Predictions) -> Int64:
    """int64 [n + 1], the tag of each token of a row, and -1, which goes for none."""
    tags: Int64 = np.full(len(of_row.row.offsets) + 1, -1)
    for example, begin, column, length in zip(
        *(array.tolist() for array in of_row[1:]), strict=True
    ):
        tags[begin : begin + length] = predictions.outputs[example, column : column + length]
    return tags


def _first_tokens(words: Int64, tokens: Int64) -> Int64:
    """The first token that shares a character with each word; -1 where none does.

    Args:
        words: int64 [w, 2], their characters, from and to.
        tokens: int64 [n, 2], likewise, in order.
    """
    visible = np.flatnonzero(
        tokens[:, 0] < tokens[:, 1]
    )  # of white space alone there may be tokens without any
    if not visible.size:
        return np.full(len(words), -1)
    begin, end = tokens[visible].T
    first = np.searchsorted(end, words[:, 0], side="right")
    at = np.minimum(first, len(end) - 1)
    shares = (first < len(end)) & (begin[at] < words[:, 1]) & (words[:, 0] < words[:, 1])
    return np.where(shares, visible[at], -1)
