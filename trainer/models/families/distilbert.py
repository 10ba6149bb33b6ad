"""DistilBERT (Sanh et al. 2019) in its own format: BERT without token types and pooler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainer.models.config import Pooling
from trainer.models.families import bert


@dataclass(frozen=True)
class Config(bert.Config):
    """DistilBERT-base, uncased.

    Attributes:
        head_dropout: dropout rate in the head of a task.
    """

    codec: ClassVar[str] = "trainer.models.codecs.distilbert"
    pooler_activation: ClassVar[Pooling] = "relu"
    heads_with_dropout: ClassVar[frozenset[str]] = frozenset({"tagging", "question_answering"})
    fewest_types: ClassVar[int] = 0

    layers: int = 6
    type_vocab: int = 0
    head_dropout: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_absent("DistilBERT", "type_vocab", "nsp", fix="Leave it out, or use kind: bert.")
        self.check_rate("head_dropout")

    @property
    def normalizes_embeddings(self) -> bool:
        return True
