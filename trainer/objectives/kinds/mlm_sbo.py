"""Masked language modeling and the span-boundary objective: SpanBERT (Joshi et al. 2020).

Runs of words are masked (section 3.1), and each of their tokens is predicted twice: from its own
hidden state, and from the hidden states just outside of the run and the token's place in it
(section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, PackSpec, Vocabulary
from trainer.models.inputs import Inputs
from trainer.models.token_scores import Target
from trainer.objectives import Loss, Objective, Tensors
from trainer.objectives.chosen_tokens import MOST_WORDS
from trainer.objectives.kinds import mlm
from trainer.objectives.rows import Int32, columns_of, score_output, token_target
from trainer.objectives.word_spans import choose_spans, geometric_probabilities

SPAN_COLUMNS = frozenset({"span_first", "span_last", "span_offset"})


@dataclass(frozen=True)
class Config(mlm.Config):
    """Masked spans and the span-boundary objective. Spans are runs of whole words.

    Attributes:
        span_p: parameter of the geometric distribution of a span's words.
        longest_span: maximum number of words in a span.
        boundary_tokens: only this number of tokens of a span are predicted from its boundaries.
    """

    whole_words: bool = True
    span_p: float = 0.2
    longest_span: int = 10
    boundary_tokens: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ngrams != 1:
            raise ConfigError(
                f"ngrams is {self.ngrams}, but mlm_sbo masks spans. Leave ngrams out, or use mlm."
            )
        if not 0 < self.span_p < 1:
            raise ConfigError(
                f"span_p is {self.span_p}. Use a number between 0 and 1, such as 0.2."
            )
        if not 1 <= self.longest_span <= MOST_WORDS:
            raise ConfigError(
                f"longest_span is {self.longest_span}. Use 1 to {MOST_WORDS}, such as 10."
            )
        if self.boundary_tokens < 1:
            raise ConfigError(
                f"boundary_tokens is {self.boundary_tokens}. Use 1 or more, such as 20."
            )

    def build(self, vocabulary: Vocabulary) -> Objective:
        return MaskedSpans(self, vocabulary)


class MaskedSpans(mlm.MaskedLM):
    """The sum of two losses, each a mean over its own predictions.

    To a batch of `mlm.MaskedLM` it adds, for B examples and P predictions:
        span_first, span_last: int64 [B, P], first and last position of the prediction's span; 1 and
            0 for unused entries, so that the positions next to it exist.
        span_offset: int64 [B, P], index of the prediction in its span.
        boundary_weights: float32 [B, P], 1 for a prediction from the boundaries that counts.

    All tokens of a span are replaced alike: by [MASK], by random tokens, or not at all.
    """

    needs = frozenset({"tokens", "span_boundary"})
    columns = SPAN_COLUMNS
    config: Config

    def pack_spec(self, sequence_length: int) -> PackSpec:
        if self.config.longest_span > sequence_length - 2:
            raise ConfigError(
                f"longest_span is {self.config.longest_span}, but a sequence of {sequence_length} "
                f"has room for {sequence_length - 2} tokens. Use longer sequences, or a smaller "
                "longest_span."
            )
        return super().pack_spec(sequence_length)

    def predict(self, tokens: Int32, examples: Examples) -> Batch:
        config, key = self.config, self.masking_key(tokens, examples)
        # The budget is the same as for single tokens; only their places are chosen together.
        maskable, count = self.budget(tokens)
        likely = geometric_probabilities(config.span_p, config.longest_span)
        spans = choose_spans(key, maskable, self.continues(tokens), count, likely)
        predicted, used = columns_of(spans > 0, self.predictions(tokens.shape[1]))
        # Predictions are in ascending order, so those of a span are neighbors. For the spans 4 and
        # 7 of positions 2 3 | 4 5 6, first is 2 2 4 4 4 and last is 3 3 6 6 6.
        span = np.where(used, np.take_along_axis(spans, predicted, 1), 0)
        entry = np.broadcast_to(np.arange(span.shape[1]), span.shape)
        starts, ends = np.ones_like(used), np.ones_like(used)
        starts[:, 1:] = ends[:, :-1] = span[:, 1:] != span[:, :-1]
        first_entry = np.maximum.accumulate(np.where(starts, entry, 0), axis=1)
        last_entry = np.minimum.accumulate(
            np.where(ends, entry, span.shape[1] - 1)[:, ::-1], axis=1
        )[:, ::-1]
        first = np.take_along_axis(predicted, first_entry, 1)
        last = np.take_along_axis(predicted, last_entry, 1)
        offset = predicted - first
        weights = used * examples.weight[:, None]
        return {
            "predicted": predicted,
            "labels": self.replace(key, tokens, predicted, used, first).astype(np.int64),
            "weights": weights,
            "span_first": np.where(used, first, 1),
            "span_last": np.where(used, last, 0),
            "span_offset": offset,
            "boundary_weights": weights * (offset < config.boundary_tokens),
        }

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        return {**super().weights(batch), "sbo": float(batch["boundary_weights"].sum())}

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """The sum of both cross-entropies in float32, each over its predictions in the step."""
        targets = {
            "tokens": token_target(batch),
            "span_boundary": Target(batch["labels"], batch["boundary_weights"]),
        }
        outputs = model(Inputs.of(batch, targets), self.needs)
        tokens, boundary = (score_output(outputs, name, target) for name, target in targets.items())
        total = tokens.loss / totals["mlm"] + boundary.loss / totals["sbo"]
        metrics = {
            # As in `mlm_nsp`: a sum over predictions whose mean is the step's loss.
            "loss": (total.detach() * totals["mlm"], tokens.weight),
            "mlm_loss": (tokens.nll, tokens.weight),
            "sbo_loss": (boundary.nll, boundary.weight),
            "accuracy": (tokens.correct, tokens.weight),
            "sbo_accuracy": (boundary.correct, boundary.weight),
        }
        return Loss(total, metrics)

    def terms(self) -> Mapping[str, float]:
        return {"mlm_loss": 1.0, "sbo_loss": 1.0}
