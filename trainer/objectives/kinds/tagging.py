"""Tagging of words at their first tokens: named entities (Devlin et al. 2019, section 5.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, Vocabulary
from samestep.tasks import TASKS
from trainer.metrics import check_names, entities, per_class
from trainer.metrics.per_class import ClassReport
from trainer.models.inputs import Inputs
from trainer.objectives import Loss, Predictions, Task, Tensors, crf
from trainer.objectives.class_weights import ClassLoss, ClassLossConfig, ClassWeights
from trainer.objectives.rows import Float32, Int64, logits
from trainer.objectives.task_rows import RowTask, labels_of, last_chunks

OUTSIDE = "O"


@dataclass(frozen=True)
class Config(ClassLossConfig):
    """Tagging of words. A text that is too long becomes several examples, which do not overlap.

    Attributes:
        metrics: scores of the held-out split, over whole entities of tags like B-PER and I-PER:
            entity_f1, entity_precision, entity_recall; [] for tags that name no entities, as parts
            of speech.
        class_weights: tag -> weight of its words in the loss, 1 for tags that are left out; or
            balanced, n / (k * count) for a tag that `count` of the n words of training rows have,
            of k tags.
        label_smoothing: probability of each tag that is spread evenly over all tags.
        crf: scores sequences of tags by a conditional random field (`trainer.objectives.crf`),
            for a model with `crf: true`; else each tag by itself.
    """

    metrics: tuple[str, ...] = ("entity_f1",)
    class_weights: ClassWeights = None
    label_smoothing: float = 0.0
    crf: bool = False

    def __post_init__(self) -> None:
        check_names(self.metrics, TASKS["tagging"].metrics)
        self.check_class_loss()
        if self.crf and (self.class_weights is not None or self.label_smoothing):
            raise ConfigError(
                "class_weights and label_smoothing are for tags that are scored by themselves, and "
                "crf scores sequences. Leave one of them out."
            )

    def build(self, vocabulary: Vocabulary) -> Task:
        return SequenceTagging(self, vocabulary) if self.crf else Tagging(self, vocabulary)


class Tagging(RowTask):
    """The tagging objective; see `RowTask`.

    To the rows of `RowTask` it adds, for B examples of S positions:
        labels: int64 [B, S], the tag of a word at its first token; -1 at all other positions.
        weights: float32 [B, S], 1 at a tag, 0 elsewhere and in examples of weight 0.

    The outputs are the tags with the highest scores, float32 [B, S]: all logits would be many.
    """

    kind = "tagging"
    predicts = "tagging"
    needs = frozenset({"tagging"})
    denominator = "tags"
    mean_names = ("loss", "accuracy")

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self._class_loss = ClassLoss(config)

    def weights(self, batch: Mapping[str, object]) -> dict[str, float]:
        return {self.denominator: self._class_loss.total(batch)}

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        batch = self.lay_out(examples, sequence_length)
        labels, (column, length) = labels_of(examples), last_chunks(examples)
        # Each example comes with the tags of its whole row and takes the window's. If a row
        # of 5 tags became windows of 3 and 2, the values are 0 1 2 3 4 0 1 2 3 4, and the examples
        # take the values from 0 + 0 and from 5 + 3 on.
        first_tag = np.cumsum(labels.count) - labels.count + labels.begin
        first_position = np.arange(length.size) * sequence_length + column
        chunk_start = np.cumsum(length) - length
        offset = np.arange(int(length.sum())) - np.repeat(chunk_start, length)
        tags: Int64 = np.full(batch["tokens"].size, -1)
        values = labels.values[np.repeat(first_tag, length) + offset]
        tags[np.repeat(first_position, length) + offset] = values
        tags = tags.reshape(-1, sequence_length)
        return {**batch, "labels": tags, "weights": (tags >= 0) * examples.weight[:, None]}

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """Cross-entropy in float32, over the step's sum of weights of tags, totals["tags"]."""
        scores = logits(model, batch, self.predicts).float()
        labels, weights = batch["labels"], batch["weights"]
        nll = self._class_loss(scores.flatten(0, 1), labels.flatten())
        nll = (nll * weights.flatten()).sum()
        weight = self._class_loss.weights(labels, weights).sum()
        return _loss(nll, scores.detach().argmax(-1), batch, totals, weight)

    def scores(self, predictions: Predictions) -> dict[str, float]:
        """Metrics over all words of the split; words without a token are predicted as outside."""
        return entities.scores(self.score_names, self.tags(predictions), _true_tags(predictions))

    def class_report(self, predictions: Predictions) -> ClassReport | None:
        """Of kinds of entities; None without metrics of entities, as of parts of speech."""
        if not self.score_names:
            return None
        return per_class.of_entities(self.tags(predictions), _true_tags(predictions))

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, object]]:
        """The words of each row, their tags as label, and the predicted ones."""
        true, predicted = _true_tags(predictions), self.tags(predictions)
        for row, label, prediction in zip(predictions.rows, true, predicted, strict=True):
            words = [row.texts[-1][begin:end] for begin, end, _ in row.spans]
            yield {"words": words, "label": label, "prediction": prediction}

    def combined(self, outputs: Sequence[Float32]) -> Float32:
        """Majority vote on each tag; ties go to the earliest member.

        Example: the votes 3 1 1 give 1, and 3 1 2 give 3.
        """
        votes = np.stack(list(outputs))
        # Number of members that agree with each vote: [members, N, S].
        agree = (votes[:, None] == votes[None]).sum(axis=1)
        first = agree.argmax(axis=0)
        chosen: Float32 = np.take_along_axis(votes, first[None], axis=0)[0]
        return chosen

    def tags(self, predictions: Predictions) -> list[list[str]]:
        """The predicted tags of each row's words, read at their first tokens."""
        names = (*predictions.labels, OUTSIDE)
        found = []
        for example, position in self.first_positions(predictions):
            tags = predictions.outputs[example, position].astype(np.int64)
            of_words = np.where(example < 0, len(names) - 1, tags)
            found.append([names[tag] for tag in of_words.tolist()])
        return found

    def first_positions(self, predictions: Predictions) -> Iterator[tuple[Int64, Int64]]:
        """For each row, the example and the position of each word's first token.

        Both are -1 for a word without tokens, or in no example.
        """
        for row, *windows in self.windows(predictions):
            # The place of each token; words without tokens have the last one, -1.
            place: Int64 = np.full((2, len(row.offsets) + 1), -1)
            for example, begin, column, length in zip(*windows, strict=True):
                place[0, begin : begin + length] = example
                place[1, begin : begin + length] = np.arange(column, column + length)
            words = np.array(row.spans, dtype=np.int64).reshape(-1, 3)[:, :2]
            tokens = np.array(row.offsets, dtype=np.int64).reshape(-1, 2)
            example, position = place[:, _first_tokens(words, tokens)]
            yield example, position


class SequenceTagging(Tagging):
    """Tagging by a conditional random field over the words of an example.

    Its loss is the negative log-likelihood of sequences, over the step's number of tags.
    """

    needs = frozenset({"tagging", "tag_transitions"})

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        outputs = model(Inputs.of(batch), self.needs)
        scores, transitions = (outputs[name].float() for name in ("tagging", "tag_transitions"))
        is_word = batch["labels"] >= 0
        # Words first: of the labels -1 2 -1 0 the order is 1 3 0 2.
        order = (~is_word).int().argsort(dim=1, stable=True)
        used, labels = is_word.gather(1, order), batch["labels"].gather(1, order).clamp(min=0)
        words = scores.gather(1, order[..., None].expand_as(scores))
        likelihood = crf.log_likelihood(words, labels, used, transitions)
        # All words of an example have its weight.
        nll = -(likelihood * batch["weights"].amax(1)).sum()
        best = crf.best_tags(words.detach(), used, transitions.detach())
        tags = torch.empty_like(best).scatter_(1, order, best)
        return _loss(nll, tags, batch, totals, batch["weights"].sum())


def _loss(nll: Tensor, tags: Tensor, batch: Tensors, totals: Tensors, weight: Tensor) -> Loss:
    """The loss, of this weight, and the metrics of predicted tags, int64 [B, S]."""
    weights = batch["weights"]
    correct = ((tags == batch["labels"]) * weights).sum()
    metrics = {"loss": (nll.detach(), weight), "accuracy": (correct, weights.sum())}
    return Loss(nll / totals["tags"], metrics, tags.float())


def _true_tags(predictions: Predictions) -> list[list[str]]:
    """The tags of each row's words."""
    return [[predictions.labels[tag] for _, _, tag in row.spans] for row in predictions.rows]


def _first_tokens(words: Int64, tokens: Int64) -> Int64:
    """The first token that shares a character with each word; -1 where none does.

    Args:
        words: int64 [w, 2], their characters, [begin, end).
        tokens: int64 [n, 2], likewise, in order.
    """
    # Example: with tokens at the characters 0-3, 4-5 and 5-7, the words at 4-7 and 8-9 get 1 and
    # -1. A token of white space may have no characters.
    visible = np.flatnonzero(tokens[:, 0] < tokens[:, 1])
    if not visible.size:
        return np.full(len(words), -1)
    begin, end = tokens[visible].T
    # The first token that ends after the word begins; it may also begin after the word ends.
    first = np.searchsorted(end, words[:, 0], side="right")
    at = np.minimum(first, len(end) - 1)
    shares = (first < len(end)) & (begin[at] < words[:, 1]) & (words[:, 0] < words[:, 1])
    return np.where(shares, visible[at], -1)
