"""GPT-2 in Hugging Face files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar, TypeVar

from torch import Tensor

from samestep.config import decode
from samestep.errors import ConfigError
from trainer.models import codecs
from trainer.models.codecs import ConfigJson, settings
from trainer.models.codecs.tensors import join_tensors, keep_one, split_tensors
from trainer.models.config import Activation
from trainer.models.families import gpt2

_FIELDS = {
    "vocab_size": "vocab_size",
    "layers": "n_layer",
    "width": "n_embd",
    "heads": "n_head",
    "max_positions": "n_positions",
    "dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
    "norm_eps": "layer_norm_epsilon",
    "initializer_range": "initializer_range",
}
_LAYER = {
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "attention_norm": "ln_1",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
    "ffn_norm": "ln_2",
}
# transformers' Conv1D stores [in, out].
_TRANSPOSED = re.compile(r".*\.(attn|mlp)\.c_\w+\.weight")
_BARE = ("wte.", "wpe.", "h.", "ln_f.", "tokens_embed.", "positions_embed.")
# Stored by older versions of transformers.
_BUFFERS = re.compile(r".*\.attn\.(masked_)?bias")


C = TypeVar("C", bound=gpt2.Config)


class Codec(codecs.Codec[C]):
    """GPT-2 in Hugging Face files."""

    model_type: ClassVar[str] = "gpt2"
    prefix_in_peft: ClassVar[bool] = True
    architecture: ClassVar[str] = "GPT2LMHeadModel"
    table_names: ClassVar[Mapping[str, str]] = {
        "embeddings.tokens.weight": "transformer.wte.weight",
        "embeddings.positions.weight": "transformer.wpe.weight",
        "final_norm.weight": "transformer.ln_f.weight",
        "final_norm.bias": "transformer.ln_f.bias",
    }
    activation_key: ClassVar[str] = "activation_function"
    activations: ClassVar[Mapping[str, Activation]] = settings.ACTIVATIONS

    @classmethod
    def from_huggingface(
        cls, family: type[C], config: ConfigJson, tensors: Iterable[str] = ()
    ) -> C:
        config = {"embd_pdrop": 0.1, **config}  # transformers' default
        fixed = {
            "model_type": cls.model_type,
            # samestep has one dropout rate for embeddings and branches.
            "embd_pdrop": config.get("resid_pdrop"),
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
        }
        names = _FIELDS | {"activation": cls.activation_key}
        fields = settings.read_settings(config, names, fixed, cls.activations)
        # Null stands for four times the width.
        ffn_width = config.get("n_inner") or 4 * config["n_embd"]
        architecture = cls._task_architecture()
        settings.check_named(config, tuple(tensors), {architecture: ("score",)})
        head, labels = settings.read_task(config, {"classification": architecture})
        own = {"ffn_width": ffn_width, "head": head, "labels": list(labels)}
        decoded: C = decode(family, {**fields, **own}, "config.json")
        return decoded

    @classmethod
    def _task_architecture(cls) -> str:
        return cls.architecture.replace("LMHeadModel", "ForSequenceClassification")

    def to_huggingface(self) -> ConfigJson:
        config = self.config
        activation = settings.write_activation(config.activation, self.activations, self.model_type)
        if config.head == "multiple_choice":
            raise ConfigError(
                f"a multiple_choice head cannot be exported: transformers' {self.model_type} has "
                "none. Export the model that it was fine-tuned from."
            )
        # Rates of embeddings and of branches are one setting here, and two there.
        fields = {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
        is_task = config.head != "language_model"
        architecture = self._task_architecture() if is_task else self.architecture
        return {
            "architectures": [architecture],
            "model_type": self.model_type,
            **fields,
            "embd_pdrop": config.dropout,
            "n_inner": config.ffn_width,
            self.activation_key: activation,
            **settings.name_labels(config.labels),
        }

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            if _BUFFERS.fullmatch(name):
                continue
            # A checkpoint of the bare model (GPT2Model) has no "transformer." before its names.
            full = f"transformer.{name}" if name.startswith(_BARE) else name
            found[full] = _transpose(name, tensor)
        keep_one(found, self.table_names["embeddings.tokens.weight"], "lm_head.weight")
        return join_tensors(found, self.tensor_names(), self.config)

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        exported = split_tensors(parameters, self.tensor_names(), self.config)
        return {name: _transpose(name, tensor) for name, tensor in exported.items()}

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        table: dict[str, tuple[str, ...]] = {
            ours: (theirs,) for ours, theirs in self.table_names.items()
        }
        for layer in range(self.config.layers):
            for ours, theirs in _LAYER.items():
                for kind in ("weight", "bias"):
                    name = f"transformer.h.{layer}.{theirs}.{kind}"
                    table[f"layers.{layer}.{ours}.{kind}"] = (name,)
        if self.config.head != "language_model":
            table["head.classifier.weight"] = ("score.weight",)
        return table


def _transpose(name: str, tensor: Tensor) -> Tensor:
    """Converts a matrix between our layout and a Conv1D's."""
    return tensor.T.contiguous() if _TRANSPOSED.fullmatch(name) else tensor
