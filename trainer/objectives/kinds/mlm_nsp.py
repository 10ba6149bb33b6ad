"""Masked language modeling and next-sentence prediction: BERT's objective (Devlin et al. 2019).

Section 3.1: from the [CLS] of a pair of segments, the model also predicts whether segment B follows
segment A.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import nn

from samestep.examples import Batch, Examples, PackSpec, PairTask, Vocabulary
from trainer.models.inputs import Inputs
from trainer.objectives import Loss, Objective, Tensors
from trainer.objectives.kinds import mlm
from trainer.objectives.rows import score_output, token_target


@dataclass(frozen=True)
class Config(mlm.Config):
    """Masked language modeling and next-sentence prediction, on `data.packing: pairs`."""

    def build(self, vocabulary: Vocabulary) -> Objective:
        return MaskedLMWithNextSentence(self, vocabulary)


class MaskedLMWithNextSentence(mlm.MaskedLM):
    """The sum of two losses, each a mean over its own predictions.

    To a batch of `mlm.MaskedLM` it adds, for B examples:
        next_labels: int64 [B], 0 if segment B follows segment A, else 1.
        next_weights: float32 [B], the weight of the example.

    Attributes:
        pairs: the prediction about a pair, "next" or "order".
        short: prefix of the names of its metrics.
    """

    needs = frozenset({"tokens", "next_sentence"})
    pairs: PairTask = "next"
    short = "nsp"

    def pack_spec(self, sequence_length: int) -> PackSpec:
        return replace(super().pack_spec(sequence_length), pairs=self.pairs)

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        assert examples.random is not None, "the packing is not pairs"
        return {
            **super().collate(examples, sequence_length),
            "next_labels": examples.random.astype(np.int64),
            "next_weights": examples.weight,
        }

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        return {**super().weights(batch), self.short: float(batch["next_weights"].sum())}

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """The sum of both cross-entropies in float32, each over its predictions in the step."""
        target = token_target(batch)
        outputs = model(Inputs.of(batch, {"tokens": target}), self.needs)
        next_logits = outputs["next_sentence"]
        tokens = score_output(outputs, "tokens", target)
        labels, weights = batch["next_labels"], batch["next_weights"]
        next_nll = (F.cross_entropy(next_logits.float(), labels, reduction="none") * weights).sum()
        next_correct = ((next_logits.detach().argmax(dim=-1) == labels) * weights).sum()
        total = tokens.loss / totals["mlm"] + next_nll / totals[self.short]
        pairs = weights.sum()
        metrics = {
            # The terms have different denominators. Weighted by pairs, `total` of each micro-batch
            # is divided by the step's number of pairs later, and they add up to the step's loss.
            "loss": (total.detach() * totals[self.short], pairs),
            "mlm_loss": (tokens.nll, tokens.weight),
            f"{self.short}_loss": (next_nll.detach(), pairs),
            "accuracy": (tokens.correct, tokens.weight),
            f"{self.short}_accuracy": (next_correct, pairs),
        }
        return Loss(total, metrics)

    def terms(self) -> Mapping[str, float]:
        return {"mlm_loss": 1.0, f"{self.short}_loss": 1.0}
