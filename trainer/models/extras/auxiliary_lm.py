"""A language model's head beside a task's (Radford et al. 2018, section 3.2)."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.models.config import TransformerConfig
from trainer.models.extras import Extra, HeadInput
from trainer.models.heads import LanguageModelHead, answer


class AuxiliaryLanguageModel(LanguageModelHead, Extra):
    """Predicts the next token of every position except the last."""

    name = "lm_head"
    offers = frozenset({"next_tokens"})
    needs_positions = "all"

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.vocabulary = config.vocab_size

    def answer(self, model: nn.Module, head_input: HeadInput) -> dict[str, Tensor]:
        if "next_tokens" not in head_input.outputs:
            return {}
        target, size = head_input.inputs.targets.get("next_tokens"), self.vocabulary
        return answer(
            "next_tokens", self, target, size, head_input.hidden[:, :-1], head_input.matrix
        )
