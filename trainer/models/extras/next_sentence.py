"""A head that predicts whether the second of two segments follows the first (BERT)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from trainer.models.config import TransformerConfig
from trainer.models.extras import Extra, HeadInput


class NextSentence(Extra):
    """Scores pairs of segments: BERT's pooler (dense, tanh) and a classifier."""

    name = "nsp_head"
    offers = frozenset({"next_sentence"})
    trains: ClassVar[Mapping[str, str]] = {"next_sentence": "model.nsp=false"}
    needs_positions = "first"
    pretraining = "model.nsp"
    # BERT's fine-tuning reuses the pooler (Devlin et al. 2019, section 3.2).
    lends: ClassVar[Mapping[str, str]] = {"head.pooler.": "nsp_head.pooler."}

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pooler = nn.Linear(config.width, config.width)
        self.classifier = nn.Linear(config.width, 2)

    def forward(self, first: Tensor) -> Tensor:
        """Hidden states of the first position [B, D] -> logits [B, 2]: follows, is random."""
        logits: Tensor = self.classifier(self.pooler(first).tanh())
        return logits

    def answer(self, model: nn.Module, head_input: HeadInput) -> dict[str, Tensor]:
        if "next_sentence" not in head_input.outputs:
            return {}
        return {"next_sentence": self(head_input.whole[:, 0])}
