"""ALBERT (Lan et al. 2020): narrow embeddings, and layers that share their parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
        **bert.Config.task_names,
        "classification": {"pooler": "albert.pooler", "classifier": "classifier"},
        "multiple_choice": {"pooler": "albert.pooler", "classifier": "classifier"},
    }
    their_settings: ClassVar[Mapping[str, str]] = {
        **bert.Config.their_settings,
        "embedding_width": "embedding_size",
        "groups": "num_hidden_groups",
        "head_dropout": "classifier_dropout_prob",
    }
    # transformers can put several different layers into a group; no released model does.
    their_constants: ClassVar[Mapping[str, object]] = {
        **bert.Config.their_constants,
        "inner_group_num": 1,
    }
    embedding_names: ClassVar[Mapping[str, str]] = {
        **bert.Config.embedding_names,
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
    optional_names: ClassVar[re.Pattern[str]] = re.compile(
        r"((albert\.)?pooler|sop_classifier\.classifier)\.(weight|bias)"
    )

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

    def layer_places(self) -> dict[int, str]:
        # The first layer of each group has the parameters; see `build_layers`.
        each = self.layers // self.groups
        return {
            group * each: f"encoder.albert_layer_groups.{group}.albert_layers.0"
            for group in range(self.groups)
        }
