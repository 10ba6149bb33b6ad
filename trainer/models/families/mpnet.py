"""MPNet (Song et al. 2020): RoBERTa's layers and heads, and a relative bias for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainer.models.config import Activation
from trainer.models.families import bert
from trainer.models.layers.relative import RelativeBias
from trainer.models.transformer import Transformer

BUCKETS, MAX_DISTANCE = 32, 128
"""Of relative positions, as T5's: constants, since `transformers` computes with no others."""


@dataclass(frozen=True)
class Config(bert.Config):
    """MPNet-base.

    Positions are learned, as in RoBERTa, and the scores of all layers have T5's bias by distance.
    """

    codec: ClassVar[str] = "trainer.models.codecs.mpnet"
    position_offset: ClassVar[int] = 2
    classification_drops_first: ClassVar[bool] = True
    fewest_types: ClassVar[int] = 0

    vocab_size: int = 30527
    type_vocab: int = 0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_absent("MPNet", "type_vocab", "nsp", fix="Leave it out, or use kind: bert.")

    @property
    def normalizes_embeddings(self) -> bool:
        return True

    @property
    def head_activation(self) -> Activation:
        return "gelu"  # whatever the layers have, as in RoBERTa

    def build_base(self) -> Transformer:
        bias = RelativeBias(BUCKETS, MAX_DISTANCE, self.heads, bidirectional=True)
        return Transformer(self, self._build_head(), self.build_extras(), relative_bias=bias)
