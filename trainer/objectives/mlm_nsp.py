"""Masked language modelling and next-sentence prediction: BERT's objective (Devlin et al. 2019, section 3.1).

Beside the masked tokens the model predicts, from the [CLS] of a pair of segments, whether B is the text after A.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.examples import Batch, Examples, PackSpec, Vocabulary
from trainer.models import Inputs
from trainer.objectives import Loss, Objective, mlm
from trainer.objectives.rows import score_tokens


@dataclass(frozen=True)
class Config(mlm.Config):
    """Masked language modelling and next-sentence prediction, on examples of `data.packing: pairs`."""

    def build(self, vocabulary: Vocabulary) -> Objective:
        return MaskedLMWithNextSentence(self, vocabulary)


class MaskedLMWithNextSentence(Objective):
    """The sum of two losses, each a mean over its own predictions; see `trainer.objectives.Objective`.

    To a batch of `mlm.MaskedLM` it adds, for B examples:
        next_labels: int64 [B], 0 where segment B is the text after A, 1 where it is from another document.
        next_weights: float32 [B], the weight of the example.

    Raises:
        ConfigError: as for `mlm.MaskedLM`.
    """

    predicts = "tokens"
    needs = frozenset({"tokens", "next_sentence"})

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        self._mlm = mlm.MaskedLM(config, vocabulary)
        self.columns = self._mlm.columns

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """As for masked language modelling; examples must be pairs."""
        return replace(self._mlm.pack_spec(sequence_length), pairs=True)

    def predictions(self, sequence_length: int) -> int:
        """P, the predictions of tokens that a row of `sequence_length` cells has room for."""
        return self._mlm.predictions(sequence_length)

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        """Lays the pairs out and masks them; see the class for the arrays."""
        assert examples.random is not None, "the packing is not pairs"
        batch = self._mlm.collate(examples, sequence_length)
        return {
            **batch,
            "next_labels": examples.random.astype(np.int64),
            "next_weights": examples.weight,
        }

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """The number of tokens that are predicted, and of pairs."""
        return {**self._mlm.weights(batch), "nsp": float(batch["next_weights"].sum())}

    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> Loss:
        """The sum of both cross-entropies in float32, each over the step's number of its predictions."""
        outputs = model(Inputs.of(batch), self.needs)
        next_logits = outputs["next_sentence"]
        tokens = score_tokens(outputs["tokens"], batch)
        labels, weights = batch["next_labels"], batch["next_weights"]
        next_nll = (F.cross_entropy(next_logits.float(), labels, reduction="none") * weights).sum()
        next_correct = ((next_logits.detach().argmax(dim=-1) == labels) * weights).sum()
        total = tokens.nll / totals["mlm"] + next_nll / totals["nsp"]
        pairs = weights.sum()
        metrics = {
            # Its denominators differ; weighted by pairs, the micro-batches of a step add up to the loss of the step.
            "loss": (total.detach() * totals["nsp"], pairs),
            "mlm_loss": (tokens.nll.detach(), tokens.weight),
            "nsp_loss": (next_nll.detach(), pairs),
            "accuracy": (tokens.correct, tokens.weight),
            "nsp_accuracy": (next_correct, pairs),
        }
        return Loss(total, metrics)
