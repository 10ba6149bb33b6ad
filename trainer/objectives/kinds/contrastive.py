"""Contrastive learning of sentence embeddings, with negatives from the whole global batch.

For each pair that belongs together, the second text should be closer to the first one than the
second texts of all other rows (Henderson et al. 2017; Gao et al. 2021, "SimCSE"), and than the
hard negatives of all rows, if rows have some (Karpukhin et al. 2020, "DPR").

Other rows may be on other devices, or in other micro-batches. So all texts are embedded twice, as
in GradCache (Gao et al. 2021, arXiv 2101.06983): first without gradients, to compute the loss of
the global batch and its gradient with respect to each embedding; then with gradients, which
continue from there. Dropout masks are functions of the example, so both passes give the same
embeddings.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, PackSpec, Parts, Vocabulary
from trainer.models import Model, Outputs
from trainer.models.inputs import Inputs
from trainer.models.pooling import Similarity
from trainer.objectives import Loss, OverBatch, Predictions, Task, Taught, Tensors
from trainer.objectives.guide import Guide
from trainer.objectives.ranking_losses import Distill
from trainer.objectives.rows import Float32
from trainer.objectives.sentence_pairs import EmbeddingConfig, SentencePairs
from trainer.objectives.task_rows import labels_of, rows_with_outputs

_LARGEST = math.log(100.0)  # of the logarithm of a learned scale


@dataclass(frozen=True)
class Config(EmbeddingConfig):
    """Contrastive learning, from rows of kind `retrieval`, or `classification` with two texts.

    Attributes:
        positive: index of the label whose pairs belong together: 0 for MNLI's entailment, 1 for
            MRPC's equivalent. The second texts of rows with other labels are negatives only.
        similarity: what compares two embeddings: cosine, or dot, the product of vectors of any
            length, unless `normalize` is set. null: as `pool`.
        temperature: divides the similarities; with `learn_temperature`, at the start.
        learn_temperature: learns the logarithm of the scale, 1 / temperature, with a scale of at
            most 100 (Radford et al. 2021, "CLIP", section 2.4); needs `model.logit_scale`.
        symmetric: also finds the first text of each second one; the loss is the mean of both.
        mask_equal: a text is no negative where it equals the row's first or second text, or
            belongs to an equal first text.
        known_positives: the most positives that a row of retrieval has; no negative of a row is
            one of its positives, be it chosen in this epoch or not. A row with more is refused. 0
            masks the chosen one only.
        margin: a second text is no negative where its cosine is higher than the right one's
            by more than this, as it may be right too (Zhang et al. 2025, "Qwen3 Embedding",
            with 0.1); null masks none.
        guide: a trained encoder whose cosines mask negatives that may be right; null is none.
        widths: the loss is the sum over these beginnings of the embeddings, so that each of them
            can be used alone (Kusupati et al. 2022, "Matryoshka"); empty is the whole width.
        negatives: number of hard negatives of each row of retrieval; a row that has more gives
            others in each epoch.
        query_length: positions of a query with its special tokens; a longer one is truncated, for
            rows of retrieval. null: the texts of a row share `data.sequence_length`, and the
            longest are truncated.
        passage_length: the same of each passage.
        distill: adds a term that compares the cosines of a row's passages with a teacher's scores.
    """

    teacher_setting = "guide.path"
    teacher_embeds = True

    positive: int = 0
    similarity: Similarity | None = None
    temperature: float = 0.05
    learn_temperature: bool = False
    symmetric: bool = False
    mask_equal: bool = True
    known_positives: int = 0
    margin: float | None = None
    guide: Guide | None = None
    widths: tuple[int, ...] = ()
    negatives: int = 0
    query_length: int | None = None
    passage_length: int | None = None
    distill: Distill | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"temperature is {self.temperature}. Use a number above 0, such as 0.05."
            )
        if self.learn_temperature and self.temperature < 0.01:
            raise ConfigError(
                f"temperature is {self.temperature}, and a learned one is at least 0.01. Start "
                "from that or more, such as 0.07."
            )
        if self.learn_temperature and self.distill is not None and self.distill.loss == "kl":
            raise ConfigError(
                "distill.loss is kl, which divides the similarities by a fixed temperature. Set it "
                "to margin_mse or mse, or learn_temperature to false."
            )
        if self.positive < 0:
            raise ConfigError(f"positive is {self.positive}. Use the index of a label, from 0.")
        if self.margin is not None and not 0 <= self.margin <= 2:
            raise ConfigError(f"margin is {self.margin}. Use a cosine from 0 to 2, such as 0.1.")
        if min(self.widths, default=1) < 1 or len({*self.widths}) < len(self.widths):
            raise ConfigError(
                f"widths are {list(self.widths)}. Use different numbers of at least 1, such as "
                "[64, 128, 256]."
            )
        if self.margin is not None and self.compares == "dot":
            raise ConfigError("margin is a cosine, and similarity is dot. Set one of them to null.")
        if self.negatives < 0:
            raise ConfigError(f"negatives is {self.negatives}. Use 0 or more.")
        if self.known_positives < 0:
            raise ConfigError(
                f"known_positives is {self.known_positives}. Use the most that a row has, or 0."
            )
        if self.distill is not None and self.distill.loss != "mse" and not self.negatives:
            raise ConfigError(
                f"distill.loss is {self.distill.loss}, which compares passages, and rows have one. "
                "Set negatives to 1 or more, or distill.loss to mse."
            )
        for name in ("query_length", "passage_length"):
            if (length := getattr(self, name)) is not None and length < 3:
                raise ConfigError(
                    f"{name} is {length}. Use at least 3: a token and one on either side."
                )

    @property
    def compares(self) -> Similarity:
        return "dot" if self.similarity == "dot" and not self.normalize else "cosine"

    def check_labels(self, labels: Sequence[str]) -> None:
        # Without a pair that belongs together, a run would train nothing. Retrieval has no labels.
        if labels and self.positive >= len(labels):
            raise ConfigError(
                f"objective.positive is {self.positive}, and the dataset has the labels "
                f"{', '.join(labels)}. Use the index of one of them, 0 to {len(labels) - 1}."
            )

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        if "logit_scale" not in missing:
            return ()
        return "model.logit_scale=true", "objective.learn_temperature=false"

    @property
    def teacher_path(self) -> str | None:
        return None if self.guide is None else self.guide.path

    def longest_text(self, sequence_length: int) -> int:
        return max(self.query_length or sequence_length, self.passage_length or sequence_length)

    @property
    def needs_scores(self) -> str | None:
        return None if self.distill is None else f"objective.distill.loss={self.distill.loss}"

    def build(self, vocabulary: Vocabulary) -> Task:
        return Contrastive(self, vocabulary) if self.guide is None else Guided(self, vocabulary)


class _Columns(NamedTuple):
    """The values of each row that other rows need.

    Attributes:
        pairs: embeddings, [N, T, D].
        texts: [N, T, 2], see `Contrastive`.
        anchor: [N], whether the row has a pair that belongs together; times its weight.
        weights: [N].
        passages: [N, T - 1 + K, 2], see `Contrastive`; [N, 0, 2] without known positives.
        logit_scale: [1], the parameter of a learned temperature.
        guide: a guide's embeddings, [N, T, G]; G is 0 without one.
    """

    pairs: Tensor
    texts: Tensor
    anchor: Tensor
    weights: Tensor
    passages: Tensor
    logit_scale: Tensor | None
    guide: Tensor


class Contrastive(SentencePairs, OverBatch):
    """Cross-entropy of the right text among all texts but the first ones of a global batch.

    A row has T = 2 + `negatives` texts. The outputs are the similarities of the rows' own pairs,
    [B, 1]. To the rows of `SentencePairs` it adds:
        texts: int32 [B, 2 T], two numbers below 2^24 that tell each text from others.
        passages: int32 [B, 2 (T - 1 + K)], with K `known_positives`: the same of the passages and
            of the row's positives.
        scores: float32 [B, M], with `distill`: a teacher's, of the texts after the first.

    Attributes:
        guide_width: G, of a guide's embeddings; 0 without one.
    """

    guide_width = 0

    kind = "classification"
    mean_names: tuple[str, ...] = ("loss", "accuracy")
    config: Config

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        self.texts = 2 + config.negatives
        known = config.known_positives
        self._numbers = self.texts - 1 + known if known else 0  # of passages, in a row
        if config.learn_temperature:
            self.needs |= {"logit_scale"}
            self.mean_names = (*self.mean_names, "temperature")
        lengths = config.query_length, config.passage_length
        of_retrieval = replace(
            self._parts,
            kind="retrieval",
            negatives=config.negatives,
            known_positives=config.known_positives,
            query_length=lengths[0],
            passage_length=lengths[1],
        )
        self._of_retrieval: Parts | None = of_retrieval
        # Only retrieval has such rows; with neither, the dataset decides.
        if config.negatives or config.known_positives or lengths != (None, None):
            self._parts, self._of_retrieval = of_retrieval, None

    def pack_spec(self, sequence_length: int) -> PackSpec:
        # [CLS], a token and [SEP]: the least that a text without a length of its own needs.
        query, passage = self.config.query_length or 3, self.config.passage_length or 3
        needed = query + (self.texts - 1) * passage
        if self._of_retrieval is None and needed > sequence_length:
            raise ConfigError(
                f"data.sequence_length is {sequence_length}, and a query of {query} positions and "
                f"passages of {passage} take {needed} with objective.negatives={self.texts - 2}. "
                "Raise it to that, or lower objective.passage_length."
            )
        return replace(super().pack_spec(sequence_length), of_retrieval=self._of_retrieval)

    def labels(self, examples: Examples) -> Float32:
        labels = labels_of(examples)
        if labels.ranks is None:
            return super().labels(examples)
        # Each row of retrieval has a pair that belongs together. Without hard negatives, a mixture
        # may have rows of both kinds.
        first = labels.values[np.cumsum(labels.count) - labels.count]
        return np.where(labels.ranks, self.config.positive, first).astype(np.float32)

    def weights(self, batch: Any) -> dict[str, float]:
        positive = batch["labels"] == self.config.positive
        return {self.denominator: float((batch["weights"] * positive).sum())}

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        batch = super().collate(examples, sequence_length)
        if self.config.distill is not None:
            batch["scores"] = self.config.distill.scores(examples)
        if self.config.known_positives:
            passages = labels_of(examples).passages
            assert passages is not None, "the layout asks for them"
            # 48 bits as two numbers that fp32 holds, as for texts below.
            both = np.stack((passages % 2**24, passages // 2**24), 2)
            batch["passages"] = both.reshape(len(passages), -1).astype(np.int32)
        # Six bytes of a digest are two numbers of 24 bits, which fp32 holds exactly: the table of
        # the global batch, with embeddings and texts, is one tensor.
        digests = [
            hashlib.blake2b(tokens[segments == text].tobytes(), digest_size=6).digest()
            for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True)
            for text in range(1, self.texts + 1)
        ]
        halves = (
            np.frombuffer(b"".join(digests), np.uint8)
            .reshape(-1, 2 * self.texts, 3)
            .astype(np.int32)
        )
        return {**batch, "texts": halves @ np.array([1, 2**8, 2**16], np.int32)}

    def summary(self, model: nn.Module, batch: Tensors) -> Tensor:
        """The columns of `_Columns`, side by side: [B, K]."""
        pairs, logit_scale = self.outputs(model, batch)
        if max(self.config.widths, default=0) > pairs.shape[-1]:
            raise ConfigError(
                f"objective.widths are {list(self.config.widths)}, and the embeddings have "
                f"{pairs.shape[-1]} numbers. Leave the larger ones out."
            )
        weights = batch["weights"]
        anchor = (batch["labels"] == self.config.positive) * weights
        columns = [pairs.flatten(1), batch["texts"].float(), anchor[:, None], weights[:, None]]
        if self._numbers:
            columns.append(batch["passages"].float())
        if logit_scale is not None:
            columns.append(logit_scale.expand(len(weights), 1))
        return torch.cat(columns, 1)

    def outputs(self, model: nn.Module, batch: Tensors) -> tuple[Tensor, Tensor | None]:
        """The embeddings [B, T, D], and the parameter of a learned temperature [1]."""
        found = model(Inputs.of(batch), self.needs)
        pairs = self.pool_texts(found[self.predicts], batch, self.config.pool)
        return pairs, found.get("logit_scale")

    def split(self, table: Tensor) -> _Columns:
        """Splits a table of summaries."""
        learned, rows = int(self.config.learn_temperature), len(table)
        others = [2 * self.texts, 1, 1, 2 * self._numbers, learned, self.texts * self.guide_width]
        embedded, texts, anchor, weights, passages, logit_scale, guide = torch.split(
            table, [table.shape[1] - sum(others), *others], 1
        )
        return _Columns(
            embedded.view(rows, self.texts, -1),
            texts.view(rows, self.texts, 2),
            anchor[:, 0],
            weights[:, 0],
            passages.view(rows, self._numbers, 2),
            # All rows have the same value.
            logit_scale[0] if self.config.learn_temperature else None,
            guide.view(rows, self.texts, self.guide_width),
        )

    def over_batch(self, table: Tensor) -> Tensor:
        """The gradient for the embeddings of each row, its loss and success: [N, T D + 2].

        Before the loss comes 1 / N of the gradient for the scale's logarithm, if it is learned. So
        the sum over all rows is the gradient, however the rows are split.
        """
        columns = self.split(table)
        rows = len(table)
        with torch.enable_grad():
            pairs = columns.pairs.detach().requires_grad_()
            inputs, log_scale = [pairs], None
            if columns.logit_scale is not None:
                log_scale = self._log_scale(columns.logit_scale).requires_grad_()
                inputs.append(log_scale)
            masks = self._masks(columns)
            found = [
                self._of_width(beginning, masks, log_scale) for beginning in self._beginnings(pairs)
            ]
            nll = torch.stack([each for each, _ in found]).sum(0) * columns.anchor
            slope, *of_scale = torch.autograd.grad(nll.sum(), inputs)
        if log_scale is not None:
            # At the limit, only a gradient that lowers the scale counts: a larger parameter would
            # change nothing, and would have to come back before the scale could.
            at_limit = log_scale.detach() >= _LARGEST
            of_scale = [torch.where(at_limit, of_scale[0].clamp(min=0), of_scale[0]) / rows]
        correct = found[-1][1] * columns.anchor  # of the largest width
        return torch.cat(
            (
                slope.flatten(1),
                *(each.expand(rows, 1) for each in of_scale),
                nll.detach()[:, None],
                correct[:, None],
            ),
            1,
        )

    def _log_scale(self, logit_scale: Tensor) -> Tensor:
        """The logarithm of the learned scale, [1], without a gradient."""
        # A scale of 20 at the start (temperature 0.05), and a parameter of 1.1: 20 exp(0.1) = 22.1.
        return (logit_scale.detach() - 1 - math.log(self.config.temperature)).clamp(max=_LARGEST)

    def _beginnings(self, pairs: Tensor) -> list[Tensor]:
        """Embeddings [N, T, D] at each of the widths, ascending."""
        return [pairs[..., :width] for width in sorted(self.config.widths) or (pairs.shape[-1],)]

    def _masks(self, columns: _Columns) -> tuple[Tensor, Tensor]:
        """bool [N, (T - 1) N], True where the text of a column is no candidate for a row.

        The second texts of all rows come first, then the third ones, and so on. The other mask,
        [N, N], is of the first texts as candidates for each second one.
        """
        # Rows that only pad the batch are none, neither by their second text nor, with `symmetric`,
        # by their first. A padding row has itself alone, so that its loss is a number.
        texts, rows = columns.texts, len(columns.texts)
        padding = columns.weights == 0
        masked = (padding | padding[:, None]).repeat(1, self.texts - 1)
        if self.config.mask_equal:
            first, second, *others = texts.unbind(1)
            candidates = torch.cat((second, *others))
            # For a row, the first text is an anchor, and each column's text a candidate.
            for own in (second, first):
                masked = masked | (own[:, None] == candidates).all(-1)
            # Hard negatives of an equal first text stay what they are.
            masked[:, :rows] |= (first[:, None] == first).all(-1)
        if self._numbers:
            passages = columns.passages.unbind(1)
            candidates = torch.cat(passages[: self.texts - 1])
            # Each candidate beside the positives of each row, one after the other: a comparison
            # with all K at once would be K times as large.
            # Passages 7, 3 and 9 as candidates and 3, 7 as positives mask the first two.
            for positive in passages[self.texts - 1 :]:
                masked |= (positive[:, None] == candidates).all(-1)
        masked = masked & ~torch.eye(*masked.shape, dtype=torch.bool, device=texts.device)
        # If column j is no candidate for row i, the first text of row i is none for column j.
        both = masked, masked[:, :rows].mT
        if (guide := self.config.guide) is None:
            return both
        cosines = _against_all(F.normalize(columns.guide, dim=-1))
        return both[0] | guide.mask(cosines), both[1] | guide.mask(cosines[:, :rows].mT)

    def _of_width(
        self, pairs: Tensor, masks: tuple[Tensor, Tensor], log_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The loss of each row and whether its right text is the nearest, from [N, T, D]."""
        rows = len(pairs)
        cosines = _against_all(self.comparable(pairs))
        losses, own = [], torch.arange(rows, device=cosines.device)
        for scores, no_candidate in zip((cosines, cosines[:, :rows].mT), masks, strict=True):
            if self.config.margin is not None:
                # The diagonal holds the right pairs. With 0.1 and a right cosine of 0.7, a text of
                # 0.85 is masked, and one of 0.75 is a negative.
                highest = scores.detach().diagonal()[:, None] + self.config.margin
                no_candidate = no_candidate | (scores.detach() > highest)
            if log_scale is None:
                scores = scores / self.config.temperature
            else:
                scores = scores * log_scale.exp()
            scores = scores.masked_fill(no_candidate, -torch.inf)
            losses.append(F.cross_entropy(scores, own, reduction="none"))
            if len(losses) == 1:
                correct = scores.argmax(-1) == own
            if not self.config.symmetric:
                break
        return torch.stack(losses).mean(0), correct

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """The mean over anchors, totals["examples"]; its value comes from the first pass."""
        pairs, logit_scale = self.outputs(model, batch)
        slope, *of_scale, nll, correct = torch.split(
            batch["over_batch"], [pairs[0].numel(), *([] if logit_scale is None else [1]), 1, 1], 1
        )
        nll, correct = nll[:, 0], correct[:, 0]
        # Its gradient equals the loss's: sum_ij d loss / d e_ij * d e_ij.
        total = (pairs.flatten(1) * slope).sum() / totals["examples"]
        anchor = (batch["labels"] == self.config.positive) * batch["weights"]
        count, distance = anchor.sum(), torch.zeros_like(nll)
        means = {}
        if logit_scale is not None:
            # Each row has an equal share of the slope: those of all micro-batches add up to it.
            total = total + (logit_scale * of_scale[0]).sum() / totals["examples"]
            temperature = (-self._log_scale(logit_scale)).exp().sum()
            means["temperature"] = (temperature * count, count)
        if (distill := self.config.distill) is not None:
            for beginning in self._beginnings(pairs):
                query, *passages = self.comparable(beginning).unbind(1)
                found = torch.stack([(query * passage).sum(-1) for passage in passages], 1)
                term = distill(found, batch["scores"], self.config.temperature)
                distance = distance + term * anchor
            total = total + distance.sum() / totals["examples"]
        value = (nll + distance.detach()).sum()
        means = {"loss": (value, count), "accuracy": (correct.sum(), count), **means}
        return Loss(total, means, self.similarities(pairs.detach())[:, None])

    def scores(self, predictions: Predictions) -> dict[str, float]:
        return {}

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, object]]:
        """The index of the label, if there are labels, and the similarity."""
        for row, output in rows_with_outputs(predictions):
            label = {} if row.label is None else {"label": row.label}
            yield {**label, "prediction": float(output[0])}


class Guided(Contrastive, Taught):
    """`Contrastive` with a guide, whose embeddings are further columns of the table."""

    _guide: nn.Module | None = None

    def attach(self, teacher: nn.Module) -> None:
        self._guide, self.guide_width = teacher, cast(Model, teacher).config.width

    def summary(self, model: nn.Module, batch: Tensors) -> Tensor:
        assert self._guide is not None, "a guide is attached before training"
        assert self.config.guide is not None
        found = self._guide(Inputs.of(batch), frozenset({"embedding"}))
        guide = self.pool_texts(found["embedding"], batch, self.config.guide.pool)
        return torch.cat((super().summary(model, batch), guide.flatten(1)), 1)


def _against_all(texts: Tensor) -> Tensor:
    """Products of each row's first text and the others of all rows: [N, T, D] -> [N, (T - 1) N]."""
    first, *others = texts.unbind(1)
    found = [first @ other.mT for other in others]
    return found[0] if len(found) == 1 else torch.cat(found, 1)
