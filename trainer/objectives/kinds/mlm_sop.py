"""Masked language modeling and sentence order: ALBERT's objective (Lan et al. 2020, section 3.1).

From the [CLS] of two consecutive segments, the model also predicts whether they are in their order
or swapped. Unlike a random segment, a swapped one cannot be told from its topic.
"""

from __future__ import annotations

from dataclasses import dataclass

from samestep.examples import PairTask, Vocabulary
from trainer.objectives import Objective
from trainer.objectives.kinds import mlm, mlm_nsp


@dataclass(frozen=True)
class Config(mlm.Config):
    """Masked language modeling and sentence order, on `data.packing: pairs`."""

    def build(self, vocabulary: Vocabulary) -> Objective:
        return MaskedLMWithSentenceOrder(self, vocabulary)


class MaskedLMWithSentenceOrder(mlm_nsp.MaskedLMWithNextSentence):
    """See `mlm_nsp.MaskedLMWithNextSentence`; label 0 means in order, 1 swapped."""

    pairs: PairTask = "order"
    short = "sop"
