"""MPNet in Hugging Face files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from trainer.models.codecs import ConfigJson, bert, roberta
from trainer.models.families import mpnet

_BUCKETS = "relative_attention_num_buckets"


class Codec(bert.Codec[mpnet.Config]):
    """MPNet in Hugging Face files."""

    model_type: ClassVar[str] = "mpnet"
    prefix_in_peft: ClassVar[bool] = False
    architecture: ClassVar[str] = "MPNetForMaskedLM"
    causal_architecture: ClassVar[str] = ""
    special_ids: ClassVar[Mapping[str, int]] = roberta.Codec.special_ids
    head_names: ClassVar[Mapping[str, str]] = roberta.Codec.head_names
    nsp_names: ClassVar[Mapping[str, str]] = {}
    task_names: ClassVar[Mapping[str, Mapping[str, str]]] = {
        **roberta.Codec.task_names,
        "multiple_choice": {"pooler": "mpnet.pooler.dense", "classifier": "classifier"},
    }
    # transformers has neither token types nor a left-to-right model of this family.
    their_settings: ClassVar[Mapping[str, str]] = {
        ours: theirs
        for ours, theirs in bert.Codec.their_settings.items()
        if ours not in ("type_vocab", "causal")
    }
    their_constants: ClassVar[Mapping[str, object]] = {_BUCKETS: mpnet.BUCKETS}
    embedding_names: ClassVar[Mapping[str, str]] = {
        ours: theirs
        for ours, theirs in bert.Codec.embedding_names.items()
        if ours != "types.weight"
    }
    layer_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **bert.Codec.layer_names,
        "attention.qkv": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        "attention.out": ("attention.attn.o",),
        "attention_norm": ("attention.LayerNorm",),
    }

    def to_huggingface(self) -> ConfigJson:
        return super().to_huggingface() | {_BUCKETS: mpnet.BUCKETS}

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        # All layers share it, so it lies beside them.
        bias = "mpnet.encoder.relative_attention_bias.weight"
        return super().tensor_names() | {"relative_bias.weight": (bias,)}
