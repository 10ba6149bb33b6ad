"""Bidirectional language modeling (Peters et al. 2018, "ELMo", section 3.1).

A model predicts each token from those before it, and by separate layers from those after it. Unlike
masked language modeling, no state sees both sides of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from samestep.examples import Vocabulary
from trainer.models.inputs import Inputs
from trainer.objectives import Loss, Objective, Tensors
from trainer.objectives.kinds import causal_lm
from trainer.objectives.rows import score_output, token_target


@dataclass(frozen=True)
class Config(causal_lm.Config):
    """Bidirectional language modeling; needs a model of two directions: bilm."""

    def build(self, vocabulary: Vocabulary) -> Objective:
        return BiLM(self, vocabulary)


class BiLM(causal_lm.CausalLM):
    """The mean of both directions' cross-entropies, on the batches of `causal_lm`.

    Each pair of neighboring tokens is two predictions: of the second from the left, and of the
    first from the right.
    """

    needs = frozenset({"next_tokens", "previous_tokens"})

    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """The mean in float32, over the step's number of predictions in either direction."""
        following = token_target(batch, self.z_loss)
        # Position t predicts token t + 1, which predicts token t backward.
        previous = replace(following, labels=batch["tokens"][:, :-1].long())
        targets = {"next_tokens": following, "previous_tokens": previous}
        outputs = model(Inputs.of(batch, targets), self.needs)
        forward = score_output(outputs, "next_tokens", following)
        backward = score_output(outputs, "previous_tokens", previous)
        metrics = {
            "loss": ((forward.nll + backward.nll) / 2, forward.weight),
            "forward_loss": (forward.nll, forward.weight),
            "backward_loss": (backward.nll, backward.weight),
            "accuracy": ((forward.correct + backward.correct) / 2, forward.weight),
        }
        if self.z_loss:
            penalty = self.z_loss * (forward.log_z_squared + backward.log_z_squared) / 2
            metrics["z_loss"] = (penalty, forward.weight)
        return Loss((forward.loss + backward.loss) / 2 / totals[self.denominator], metrics)
