"""Predicting original tokens where a generator may have replaced them (Clark et al. 2020).

Section 3.4 of the ELECTRA paper asks where the gains of replaced-token detection come from. Between
BERT and ELECTRA are "Replace MLM", which predicts masked tokens from an input with the generator's
samples instead of [MASK], and "All-Tokens MLM", which predicts the token of every position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.examples import Vocabulary
from trainer.models.inputs import Inputs
from trainer.objectives import Loss, Objective, Tensors
from trainer.objectives.kinds import replaced_tokens
from trainer.objectives.rows import score_output, token_target


@dataclass(frozen=True)
class Config(replaced_tokens.Config):
    """Prediction of original tokens, from an input with the samples of a generator.

    Attributes:
        discriminator_weight: factor of the loss of the model beside the generator.
        masked_only: whether it predicts the masked tokens only (Replace MLM), or the tokens of all
            positions, with a choice to copy (All-Tokens MLM).
    """

    discriminator_weight: float = 1.0

    def build(self, vocabulary: Vocabulary) -> Objective:
        return ReplacedMLM(self, vocabulary)


class ReplacedMLM(replaced_tokens.ReplacedTokens):
    """The sum of two cross-entropies, the generator's and the main model's."""

    predicts = "original"
    main = "main_loss"

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        super().__init__(config, vocabulary)
        outputs = {"tokens", "sampled", "original"}
        self.needs = frozenset(outputs if config.masked_only else outputs | {"copied"})

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """The weighted sum of both losses in float32, each over its predictions in the step."""
        target = token_target(batch)
        # Neither the generator, which is sampled from, nor the choice to copy can do with scores.
        targets = {"original": target} if self.config.masked_only else {}
        outputs = model(Inputs.of(batch, targets), self.needs)
        first = score_output(outputs, "tokens", target)
        if self.config.masked_only:
            main = score_output(outputs, "original", target).loss
        else:
            main = -(_log_likelihood(outputs, batch) * batch["real_weights"]).sum()
        total = self.config.generator_weight * first.loss / totals["mlm"]
        total = total + self.config.discriminator_weight * main / totals["rtd"]
        changed = (outputs["sampled"] != batch["labels"]) * batch["weights"]
        metrics = {
            # As in `mlm_nsp`: a sum over predictions whose mean is the step's loss.
            "loss": (total.detach() * totals["mlm"], first.weight),
            "mlm_loss": (first.nll, first.weight),
            "main_loss": (main.detach(), batch["real_weights"].sum()),
            "accuracy": (first.correct, first.weight),
            "replaced": (changed.sum(), first.weight),
        }
        return Loss(total, metrics)


def _log_likelihood(outputs: Tensors, batch: Tensors) -> Tensor:
    """The log-probability of each position's original token: float [B, S].

    The model copies the token that it reads with probability D, and otherwise takes one from its
    softmax: p(original) = D * [read == original] + (1 - D) * softmax(original).
    """
    masked, at = batch["tokens"].long(), batch["predicted"].long()
    # Unused entries are position 0, [CLS], which stays.
    kept = masked.gather(1, at)
    original = masked.scatter(1, at, batch["labels"].where(at > 0, kept))
    read = masked.scatter(1, at, outputs["sampled"].where(at > 0, kept))
    scores, copied = outputs["original"].float(), outputs["copied"].float()
    # In logarithms: p of a copied token is near 1, and fp32 would lose what is missing to 1.
    of_softmax = -F.cross_entropy(scores.flatten(0, 1), original.flatten(), reduction="none")
    own = F.logsigmoid(-copied) + of_softmax.view_as(copied)
    return torch.logaddexp(own, F.logsigmoid(copied)).where(read == original, own)
