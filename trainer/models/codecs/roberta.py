"""RoBERTa in Hugging Face files, and CamemBERT and XLM-RoBERTa, which have its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

from trainer.models.codecs import ConfigJson, bert, settings
from trainer.models.families import roberta

_CLASSES = {"camembert": "Camembert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}
"""`model_type` -> the beginning of its classes' names."""


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

    @classmethod
    def from_huggingface(
        cls, family: type[roberta.Config], config: ConfigJson, tensors: Iterable[str] = ()
    ) -> roberta.Config:
        name = config.get("model_type")
        # The base class rejects other families by name.
        if name not in _CLASSES:
            return super().from_huggingface(family, config, tensors)
        own = settings.renamed(config, cls.model_type, _CLASSES[name], "Roberta")
        return replace(super().from_huggingface(family, own, tensors), published_as=name)

    def to_huggingface(self) -> ConfigJson:
        name = self.config.published_as
        own = settings.renamed(super().to_huggingface(), name, "Roberta", _CLASSES[name])
        # The vocabulary of CamemBERT has other tokens at fairseq's places.
        return own | ({"bos_token_id": 5, "eos_token_id": 6} if name == "camembert" else {})
