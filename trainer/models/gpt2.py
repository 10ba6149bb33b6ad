"""GPT-2 (Radford et al. 2019), and the names it has in Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from trainer.config import decode
from trainer.errors import ConfigError
from trainer.models import huggingface
from trainer.models.config import Activation, Head
from trainer.models.family import Family
from trainer.models.heads import CellHead, LanguageModelHead
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
_TRANSPOSED = re.compile(r".*\.(attn|mlp)\.c_\w+\.weight")  # transformers' Conv1D holds [in, out]
_BUFFERS = re.compile(r".*\.attn\.(masked_)?bias")  # older versions stored them


@dataclass(frozen=True)
class Config(Family):
    """GPT-2 small.

    Attributes:
        max_positions: the longest sequence, in tokens.
        initializer_range: standard deviation of the initial weights; that of projections into the
            residual stream is divided by the root of their number, 2 * layers.
        head: what the model predicts: tokens (`language_model`); or, fine-tuned for a task, from
            the last cell of a sequence the class of its texts (`classification`), or a score that
            is compared with those of other texts (`multiple_choice`).
        labels: the names of classes; a `classification` of one label predicts a number.
    """

    model_type: ClassVar[str] = "gpt2"
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
            raise ConfigError(f"initializer_range must be above 0, not {self.initializer_range}")
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
        return (
            self.initializer_range / (2 * self.layers) ** 0.5
            if into_residual
            else self.initializer_range,
        )

    def build_base(self) -> Transformer:
        lm_head = LanguageModelHead(self)
        if self.head == "language_model":
            return Transformer(self, lm_head)
        head = CellHead(self, self.classes, bias=False)
        return Transformer(self, head, lm_head=lm_head)

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any], tensors: Iterable[str] = ()) -> Self:
        """Reads the content of a `config.json`.

        Args:
            config: the content.
            tensors: names of the checkpoint's tensors; a task's head that the content mentions is
                one if it is there.

        Raises:
            ConfigError: it describes another kind of model, or lacks a key.
        """
        fixed = {
            "model_type": cls.model_type,
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

    def to_huggingface(self) -> dict[str, Any]:
        """The content of a `config.json` from which transformers' `Auto` class for the head builds
        the same model.

        Raises:
            ConfigError: transformers has no such model.
        """
        known = {ours: theirs for theirs, ours in self.activations.items()}
        if self.activation not in known:
            raise ConfigError(
                f"activation {self.activation} cannot be exported: transformers' {self.model_type} "
                "has none that is "
                "gated; train with another"
            )
        if self.head == "multiple_choice":
            raise ConfigError(
                f"a multiple_choice head cannot be exported: transformers' {self.model_type} has "
                "none; export the "
                "model that it was fine-tuned from"
            )
        fields = {theirs: getattr(self, ours) for ours, theirs in _FIELDS.items()}
        return {
            "architectures": [
                self.architecture if self.head == "language_model" else self._task_architecture()
            ],
            "model_type": self.model_type,
            **fields,
            "embd_pdrop": self.dropout,
            "n_inner": self.ffn_width,
            self.activation_key: known[self.activation],
            **huggingface.name_labels(self.labels),
        }

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turns a checkpoint's tensors into this model's parameters, in the checkpoint's precision.

        Raises:
            CheckpointError: naming the tensors that are missing, unexpected or of another shape.
        """
        found = {}
        for name in tensors:
            if not _BUFFERS.fullmatch(name):
                full = (
                    name
                    if name.startswith(("transformer.", "lm_head.", "score."))
                    else f"transformer.{name}"
                )
                found[full] = (
                    tensors[name].T.contiguous() if _TRANSPOSED.fullmatch(name) else tensors[name]
                )
        huggingface.drop_copy(found, "lm_head.weight", self.table_names["embeddings.tokens.weight"])
        return huggingface.join_tensors(found, self.tensor_names(), self)

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `import_tensors`: the names and layout of transformers' current version.

        Raises:
            CheckpointError: naming the parameters that are missing, unexpected or of another shape.
        """
        exported = huggingface.split_tensors(parameters, self.tensor_names(), self)
        return {
            name: t.T.contiguous() if _TRANSPOSED.fullmatch(name) else t
            for name, t in exported.items()
        }

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        """Of each parameter the tensors in transformers that it consists of, end to end."""
        table: dict[str, tuple[str, ...]] = {
            ours: (theirs,) for ours, theirs in self.table_names.items()
        }
        for layer in range(self.layers):
            for ours, theirs in _LAYER.items():
                for kind in ("weight", "bias"):
                    table[f"layers.{layer}.{ours}.{kind}"] = (
                        f"transformer.h.{layer}.{theirs}.{kind}",
                    )
        if self.head != "language_model":
            table["head.classifier.weight"] = ("score.weight",)
        return table
