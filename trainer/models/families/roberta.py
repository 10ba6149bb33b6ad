"""RoBERTa (Liu et al. 2019): BERT with one token type, other heads, and a position offset of 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from samestep.errors import ConfigError
from trainer.models.config import WHOLE_NORMAL, Activation
from trainer.models.families import bert


@dataclass(frozen=True)
class Config(bert.Config):
    """RoBERTa-base.

    Position p is row p + 2 of the table, as in fairseq, which skips rows up to the padding id.

    Attributes:
        initialization: "bert", a normal distribution truncated at two standard deviations; or
            "fairseq", as in the original code: not truncated, and zeros in the row of the padding
            token, id 1.
        published_as: the `model_type` of exports, which weights of CamemBERT and XLM-RoBERTa keep:
            their architecture is this one.
    """

    codec: ClassVar[str] = "trainer.models.codecs.roberta"
    position_offset: ClassVar[int] = 2
    classification_drops_first: ClassVar[bool] = True

    vocab_size: int = 50265
    type_vocab: int = 1
    norm_eps: float = 1e-5
    initialization: Literal["bert", "fairseq"] = "bert"
    published_as: Literal["roberta", "camembert", "xlm-roberta"] = "roberta"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nsp:
            raise ConfigError(
                "nsp is true, but RoBERTa has no next-sentence head. Set nsp to false, or use "
                "kind: bert."
            )

    @property
    def settings_for(self) -> Mapping[str, str]:
        settings = super().settings_for
        return {name: settings[name] for name in settings if name != "next_sentence"}

    @property
    def normal_bound(self) -> float:
        # fairseq's init_bert_params calls normal_(mean=0, std=0.02).
        return WHOLE_NORMAL if self.initialization == "fairseq" else super().normal_bound

    def zero_row(self, name: str) -> int | None:
        tables = ("embeddings.tokens.weight", "embeddings.positions.weight")
        if self.initialization == "fairseq" and name in tables:
            return self.position_offset - 1  # the id of the padding token
        return None

    @property
    def head_activation(self) -> Activation:
        return "gelu"
