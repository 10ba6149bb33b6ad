"""RoBERTa (Liu et al.

2019): BERT with one token type, other names for its heads, and positions that start at 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trainer.errors import ConfigError
from trainer.models import bert
from trainer.models.config import Activation


@dataclass(frozen=True)
class Config(bert.Config):
    """RoBERTa-base.

    Position p is row p + 2 of the table, as in fairseq, where rows up to the padding id are unused.
    """

    position_offset: ClassVar[int] = 2
    model_type: ClassVar[str] = "roberta"
    architecture: ClassVar[str] = "RobertaForMaskedLM"
    causal_architecture: ClassVar[str] = "RobertaForCausalLM"
    special_ids: ClassVar[Mapping[str, int]] = {
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
    }
    head_names: ClassVar[Mapping[str, str]] = {
        "dense": "lm_head.dense",
        "norm": "lm_head.layer_norm",
        "bias": "lm_head.bias",
        "decoder": "lm_head.decoder",
    }
    nsp_names: ClassVar[Mapping[str, str]] = {}
    task_names: ClassVar[Mapping[str, Mapping[str, str]]] = {
        **bert.Config.task_names,
        "classification": {"pooler": "classifier.dense", "classifier": "classifier.out_proj"},
        "multiple_choice": {"pooler": "roberta.pooler.dense", "classifier": "classifier"},
    }
    classification_drops_first: ClassVar[bool] = True

    vocab_size: int = 50265
    type_vocab: int = 1
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nsp:
            raise ConfigError(
                "nsp is true, and RoBERTa has no next-sentence head; set nsp to false, or use "
                "kind: bert"
            )

    @property
    def settings_for(self) -> Mapping[str, str]:
        return {
            name: setting
            for name, setting in super().settings_for.items()
            if name != "next_sentence"
        }

    @property
    def head_activation(self) -> Activation:
        return "gelu"
