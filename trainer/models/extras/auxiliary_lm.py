"""A language model's head beside a task's (Radford et al. 2018, section 3.2)."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.models.extras import Extra, HeadInput
from trainer.models.heads import LanguageModelHead, answer


class AuxiliaryLanguageModel(LanguageModelHead, Extra):
    """Predicts the next token of every position except the last."""

    name = "lm_head"
    offers = frozenset({"next_tokens"})
    needs_positions = "all"

    def answer(self, model: nn.Module, read: HeadInput) -> dict[str, Tensor]:
        if "next_tokens" not in read.outputs:
            return {}
        target, size = read.inputs.targets.get("next_tokens"), len(read.matrix)
        return answer("next_tokens", self, target, size, read.hidden[:, :-1], read.matrix)
