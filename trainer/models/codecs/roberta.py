"""RoBERTa in Hugging Face files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from trainer.models.codecs import bert
from trainer.models.families import roberta


class Codec(bert.Codec[roberta.Config]):
    """RoBERTa in Hugging Face files."""

    model_type: ClassVar[str] = "roberta"
    architecture: ClassVar[str] = "RobertaForMaskedLM"
    causal_architecture: ClassVar[str] = "RobertaForCausalLM"
    # The first entries of fairseq's dictionary, whatever the tokenizer.
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
        **bert.Codec.task_names,
        "classification": {"pooler": "classifier.dense", "classifier": "classifier.out_proj"},
        "multiple_choice": {"pooler": "roberta.pooler.dense", "classifier": "classifier"},
    }
