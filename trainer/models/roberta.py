"""RoBERTa (Liu et al. 2019): BERT with one token type, other heads, and a position offset of 2."""

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

    Position p is row p + 2 of the table, as in fairseq, which skips rows up to the padding id.
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
                "nsp is true, but RoBERTa has no next-sentence head. Set nsp to false, or use "
                "kind: bert."
            )

    @property
    def settings_for(self) -> Mapping[str, str]:
        settings = super().settings_for
        return {name: settings[name] for name in settings if name != "next_sentence"}

    @property
    def head_activation(self) -> Activation:
        return "gelu"
