"""ALBERT in Hugging Face files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from trainer.models.codecs import bert
from trainer.models.families import albert


class Codec(bert.Codec[albert.Config]):
    """ALBERT in Hugging Face files."""

    model_type: ClassVar[str] = "albert"
    prefix_in_peft: ClassVar[bool] = False
    architecture: ClassVar[str] = "AlbertForMaskedLM"
    causal_architecture: ClassVar[str] = ""
    special_ids: ClassVar[Mapping[str, int]] = {
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    head_names: ClassVar[Mapping[str, str]] = {
        "dense": "predictions.dense",
        "norm": "predictions.LayerNorm",
        "bias": "predictions.bias",
        "decoder": "predictions.decoder",
    }
    nsp_names: ClassVar[Mapping[str, str]] = {
        "pooler": "albert.pooler",
        "classifier": "sop_classifier.classifier",
    }
    task_names: ClassVar[Mapping[str, Mapping[str, str]]] = {
        **bert.Codec.task_names,
        "classification": {"pooler": "albert.pooler", "classifier": "classifier"},
        "multiple_choice": {"pooler": "albert.pooler", "classifier": "classifier"},
    }
    their_settings: ClassVar[Mapping[str, str]] = {
        **bert.Codec.their_settings,
        "embedding_width": "embedding_size",
        "groups": "num_hidden_groups",
        "head_dropout": "classifier_dropout_prob",
    }
    # transformers can put several different layers into a group; no released model does.
    their_constants: ClassVar[Mapping[str, object]] = {
        **bert.Codec.their_constants,
        "inner_group_num": 1,
    }
    embedding_names: ClassVar[Mapping[str, str]] = {
        **bert.Codec.embedding_names,
        "projection.weight": "encoder.embedding_hidden_mapping_in.weight",
        "projection.bias": "encoder.embedding_hidden_mapping_in.bias",
    }
    layer_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attention.qkv": ("attention.query", "attention.key", "attention.value"),
        "attention.out": ("attention.dense",),
        "attention_norm": ("attention.LayerNorm",),
        "ffn.up": ("ffn",),
        "ffn.down": ("ffn_output",),
        "ffn_norm": ("full_layer_layer_norm",),
    }
    pooler: ClassVar[str] = "pooler"
    optional_names: ClassVar[re.Pattern[str]] = re.compile(
        r"((albert\.)?pooler|sop_classifier\.classifier)\.(weight|bias)"
    )

    def layer_places(self) -> dict[int, str]:
        config = self.config
        # The first layer of each group has the parameters; see `build_layers`.
        each = config.layers // config.groups
        return {
            group * each: f"encoder.albert_layer_groups.{group}.albert_layers.0"
            for group in range(config.groups)
        }
