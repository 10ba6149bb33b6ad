"""Left-to-right language modeling: predicts each token from those before it.

With a decoder this is GPT's objective (Radford et al. 2018, 2019). With a causal BERT it is the
ablation "LTR & No NSP" of Devlin et al. 2019, section 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from samestep.examples import Batch, Examples, Vocabulary
from trainer.objectives import Objective
from trainer.objectives.rows import Rows, TokenObjective, ZLossConfig


@dataclass(frozen=True)
class Config(ZLossConfig):
    """Left-to-right language modeling, by a causal model: gpt2, llama, bert with `causal: true`."""

    z_loss: float = 0.0

    def build(self, vocabulary: Vocabulary) -> Objective:
        return CausalLM(self, vocabulary)


class CausalLM(TokenObjective):
    """The left-to-right objective; see `trainer.objectives.Objective`.

    A sequence is a chunk between [CLS] and [SEP], or between tokens that end texts; see
    `Rows.for_decoder`.

    To the arrays of `rows.Rows` it adds, for B examples of S positions:
        predicted: int64 [B, S - 1], the positions 0 to S - 2.
        labels: int64 [B, S - 1], the token after each.
        weights: float32 [B, S - 1], 1 where that token is of the same sequence, in an example of
            weight 1. The end token after a chunk that was cut because a row was full does not
            count: the text continues elsewhere.
    """

    predicts = "next_tokens"
    needs = frozenset({"next_tokens"})
    denominator = "lm"

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        self._rows = Rows.for_decoder(vocabulary)
        self.z_loss = config.z_loss

    def predictions(self, sequence_length: int) -> int:
        return sequence_length - 1

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        rows = self._rows.lay_out(examples, sequence_length)
        segments = rows["segments"]
        counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        # A chunk may be cut if its end token has the last position of the row: with best_fit and
        # padded, a chunk that fills the whole row; with concat, the last chunk of each row.
        end = examples.column + examples.length
        cut = end == sequence_length - 1
        if examples.isolated:
            cut &= examples.column == 1
        counts[examples.row[cut], sequence_length - 2] = False
        predicted = np.broadcast_to(np.arange(sequence_length - 1), counts.shape)
        return {
            **rows,
            "predicted": predicted.copy(),
            "labels": rows["tokens"][:, 1:].astype(np.int64),
            "weights": counts * examples.weight[:, None],
        }
