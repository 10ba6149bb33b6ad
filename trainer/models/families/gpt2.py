"""GPT-2 (Radford et al. 2019), and its names in Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from samestep.config import decode
from samestep.errors import ConfigError
from trainer.models import huggingface
from trainer.models.config import Activation, Head
from trainer.models.family import Family
from trainer.models.heads import LanguageModelHead, TokenHead
from trainer.models.huggingface import ConfigJson
from trainer.models.transformer import Transformer

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


@dataclass(frozen=True)
class Config(Family):
    """GPT-2 small.

    Attributes:
        max_positions: maximum sequence length, in tokens.
        initializer_range: standard deviation of the initial weights; for projections into the
            residual stream it is divided by sqrt(2 * layers), the root of their number.
        head: predicts tokens (`language_model`); or, fine-tuned for a task, from the last position
            of a sequence, its class (`classification`), or a score for choosing among texts
            (`multiple_choice`).
        labels: names of classes; `classification` with a single label is a regression.
    """

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
    activations: ClassVar[Mapping[str, str]] = huggingface.ACTIVATIONS

    vocab_size: int = 50257
    activation: Activation = "gelu_tanh"
    max_positions: int = 1024
    initializer_range: float = 0.02
    head: Head = "language_model"
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("max_positions")
        if not self.initializer_range > 0:
            raise ConfigError(
                f"initializer_range is {self.initializer_range}. Use a number above 0."
            )
        self.check_heads()
        self.check_task("classification", "multiple_choice")

    @property
    def causal(self) -> bool:
        return True

    @property
    def settings_for(self) -> Mapping[str, str]:
        return {head: f"model.head={head}" for head in ("classification", "multiple_choice")}

    def initial_std(self, name: str) -> tuple[float, ...]:
        into_residual = name.endswith((".attention.out.weight", ".ffn.down.weight"))
        # Radford et al. 2019, section 2.3: two projections per layer add to the residual stream.
        divisor = (2 * self.layers) ** 0.5 if into_residual else 1.0
        return (self.initializer_range / divisor,)

    def build_base(self) -> Transformer:
        lm_head = LanguageModelHead(self)
        if self.head == "language_model":
            return Transformer(self, lm_head)
        head = TokenHead(self.width, self.classes, bias=False)
        return Transformer(self, head, lm_head=lm_head)

    @classmethod
    def from_huggingface(cls, config: ConfigJson, tensors: Iterable[str] = ()) -> Self:
        """Reads the content of a `config.json`.

        Args:
            tensors: names of the checkpoint's tensors, to detect a task's head.

        Raises:
            ConfigError: it describes another kind of model, or lacks a key.
        """
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
        fields = huggingface.read_settings(config, names, fixed, cls.activations)
        ffn_width = config.get("n_inner") or 4 * config["n_embd"]
        head, labels = huggingface.read_task(
            config, tuple(tensors), {"classification": (cls._task_architecture(), "score.weight")}
        )
        own = {"ffn_width": ffn_width, "head": head, "labels": list(labels)}
        decoded: Self = decode(cls, {**fields, **own}, "config.json")
        return decoded

    @classmethod
    def _task_architecture(cls) -> str:
        return cls.architecture.replace("LMHeadModel", "ForSequenceClassification")

    def to_huggingface(self) -> ConfigJson:
        known = {ours: theirs for theirs, ours in self.activations.items()}
        if self.activation not in known:
            raise ConfigError(
                f"activation {self.activation} cannot be exported: {self.model_type} in "
                "transformers has no gated one. Train with another."
            )
        if self.head == "multiple_choice":
            raise ConfigError(
                f"a multiple_choice head cannot be exported: transformers' {self.model_type} has "
                "none. Export the model that it was fine-tuned from."
            )
        fields = {theirs: getattr(self, ours) for ours, theirs in _FIELDS.items()}
        is_task = self.head != "language_model"
        architecture = self._task_architecture() if is_task else self.architecture
        return {
            "architectures": [architecture],
            "model_type": self.model_type,
            **fields,
            "embd_pdrop": self.dropout,
            "n_inner": self.ffn_width,
            self.activation_key: known[self.activation],
            **huggingface.name_labels(self.labels),
        }

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            if _BUFFERS.fullmatch(name):
                continue
            # A checkpoint of the bare model (GPT2Model) has no "transformer." before its names.
            full = f"transformer.{name}" if name.startswith(_BARE) else name
            found[full] = _transpose(name, tensor)
        huggingface.keep_one(found, self.table_names["embeddings.tokens.weight"], "lm_head.weight")
        return huggingface.join_tensors(found, self.tensor_names(), self)

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        exported = huggingface.split_tensors(parameters, self.tensor_names(), self)
        return {name: _transpose(name, tensor) for name, tensor in exported.items()}

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        """Parameter name -> names of transformers' tensors that are concatenated in its rows."""
        table: dict[str, tuple[str, ...]] = {
            ours: (theirs,) for ours, theirs in self.table_names.items()
        }
        for layer in range(self.layers):
            for ours, theirs in _LAYER.items():
                for kind in ("weight", "bias"):
                    name = f"transformer.h.{layer}.{theirs}.{kind}"
                    table[f"layers.{layer}.{ours}.{kind}"] = (name,)
        if self.head != "language_model":
            table["head.classifier.weight"] = ("score.weight",)
        return table


def _transpose(name: str, tensor: Tensor) -> Tensor:
    """Converts a matrix between our layout and a Conv1D's."""
    return tensor.T.contiguous() if _TRANSPOSED.fullmatch(name) else tensor
