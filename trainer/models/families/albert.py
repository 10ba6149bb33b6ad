"""ALBERT (Lan et al. 2020): narrow embeddings, and layers that share their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from samestep.errors import ConfigError
from trainer.models.config import Activation
from trainer.models.families import bert


@dataclass(frozen=True)
class Config(bert.Config):
    """ALBERT-base, version 2 (without dropout).

    Attributes:
        embedding_width: E, of the embeddings, which are projected to `width`.
        groups: number of groups of consecutive layers; the layers of a group share all parameters.
        head_dropout: dropout rate in a task's head.
        nsp: adds a pooler and a head that predicts whether two segments are in their order
            (`objective: mlm_sop`) or follow each other (`mlm_nsp`).
    """

    codec: ClassVar[str] = "trainer.models.codecs.albert"

    vocab_size: int = 30000
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation: Activation = "gelu_tanh"
    embedding_width: int = 128
    groups: int = 1
    head_dropout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("embedding_width")
        self.check_positive("groups")
        if self.layers % self.groups:
            raise ConfigError(
                f"groups {self.groups} does not divide layers {self.layers}. Use 1, so that all "
                "layers share their parameters, or a divisor."
            )
        self.check_rate("head_dropout")

    @property
    def projects_embeddings(self) -> bool:
        return True  # also if both widths are equal, as in transformers

    def build_layers(self) -> Sequence[nn.Module]:
        # 12 layers in 3 groups: a a a a b b b b c c c c.
        each = self.layers // self.groups
        distinct = [self.build_layer(group * each) for group in range(self.groups)]
        return [layer for layer in distinct for _ in range(each)]
