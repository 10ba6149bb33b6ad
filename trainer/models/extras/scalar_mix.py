"""A learned mean of all layers, as what a task's head reads (ELMo)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from trainer.models import Outputs
from trainer.models.extras import Extra, HeadInput


class ScalarMix(Extra):
    """A learned mean of all layers, for a head on frozen features (Peters et al. 2018, equation 1).

    gain * sum_j softmax(scores)_j h_j; at first all layers count alike, and the gain is 1. The
    output `mix_scores` is for a penalty on the scores (`trainer.objectives.mix_penalty`).

    Args:
        layers: number of layers, the embeddings included.
    """

    name = "mix"
    offers = frozenset({"mix_scores"})
    is_below_head = True
    needs_layers = True
    needs_positions = "all"

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.empty(layers))
        self.gain = nn.Parameter(torch.empty(1))  # the gain minus 1, so it starts at 0

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """The hidden states of all layers, [B, S, D] each -> [B, S, D]."""
        shares = self.scores.float().softmax(0)
        # One after the other: no tensor [layers, B, S, D] is needed.
        mixed = sum(share * state for share, state in zip(shares, states, strict=True))
        return cast(Tensor, (1 + self.gain) * mixed)

    def below_head(
        self,
        hidden: Tensor,
        layers: Sequence[Tensor],
        segments: Tensor | None,
        dropout_key: Tensor | None,
    ) -> Tensor:
        mixed: Tensor = self(layers)
        return mixed

    def given(self, outputs: Outputs) -> dict[str, Tensor]:
        """The scores, if they are among the outputs; a copy, as for `TagTransitions`."""
        return {"mix_scores": self.scores.clone()} if "mix_scores" in outputs else {}

    def answer(self, model: nn.Module, head_input: HeadInput) -> dict[str, Tensor]:
        return self.given(head_input.outputs)

    def initial_std(self, shape: Sequence[int]) -> float:
        return 0.0
