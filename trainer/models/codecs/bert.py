"""BERT in Hugging Face files."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar, TypeVar

from torch import Tensor

from samestep.config import decode
from samestep.errors import CheckpointError, ConfigError
from samestep.tasks import TASKS
from trainer.models import codecs
from trainer.models.base import POOLED
from trainer.models.codecs import ConfigJson, settings
from trainer.models.codecs.tensors import join_tensors, keep_one, split_tensors
from trainer.models.config import Activation, Head, TaskHead
from trainer.models.families import bert

logger = logging.getLogger(__name__)

_FIELDS = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_width": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "type_vocab": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "norm_eps": "layer_norm_eps",
    "activation": "hidden_act",
    "causal": "is_decoder",
    "tied": "tie_word_embeddings",
    "initializer_range": "initializer_range",
}
# transformers leaves settings with their default values out of config.json.
_OFTEN_ABSENT = {
    "is_decoder": False,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
_EMBEDDINGS = {
    "tokens.weight": "embeddings.word_embeddings.weight",
    "positions.weight": "embeddings.position_embeddings.weight",
    "types.weight": "embeddings.token_type_embeddings.weight",
    "norm.weight": "embeddings.LayerNorm.weight",
    "norm.bias": "embeddings.LayerNorm.bias",
}
# Query, key and value are one matrix here: their rows are concatenated.
_LAYER = {
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.out": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "ffn.up": ("intermediate.dense",),
    "ffn.down": ("output.dense",),
    "ffn_norm": ("output.LayerNorm",),
}
_TASKS: tuple[TaskHead, ...] = (
    "classification",
    "multiple_choice",
    "tagging",
    "question_answering",
)
# Many checkpoints have a next-sentence head that a model may lack, to which the pooler belongs:
# "bert.pooler.dense.weight".
_PAIR_HEAD = re.compile(r"(\w+\.)?(pooler\.dense|seq_relationship)\.\w+")
# Stored by older versions of transformers.
_BUFFERS = re.compile(r"(\w+\.)?embeddings\.(position|token_type)_ids")


C = TypeVar("C", bound=bert.Config)


class Codec(codecs.Codec[C]):
    """BERT in Hugging Face files."""

    model_type: ClassVar[str] = "bert"
    prefix: ClassVar[str] = ""  # of names in checkpoints, if it is not the model type
    prefix_in_peft: ClassVar[bool] = True
    architecture: ClassVar[str] = "BertForMaskedLM"
    causal_architecture: ClassVar[str] = "BertLMHeadModel"
    special_ids: ClassVar[Mapping[str, int]] = {"pad_token_id": 0}
    head_names: ClassVar[Mapping[str, str]] = {
        "dense": "cls.predictions.transform.dense",
        "norm": "cls.predictions.transform.LayerNorm",
        "bias": "cls.predictions.bias",
        "decoder": "cls.predictions.decoder",
    }
    nsp_names: ClassVar[Mapping[str, str]] = {
        "pooler": "bert.pooler.dense",
        "classifier": "cls.seq_relationship",
    }
    task_names: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "classification": {"pooler": "bert.pooler.dense", "classifier": "classifier"},
        "multiple_choice": {"pooler": "bert.pooler.dense", "classifier": "classifier"},
        "tagging": {"classifier": "classifier"},
        "question_answering": {"classifier": "qa_outputs"},
    }
    # What other families with BERT's modules replace: settings and parameters, our name -> theirs.
    their_settings: ClassVar[Mapping[str, str]] = _FIELDS
    their_constants: ClassVar[Mapping[str, object]] = {
        "position_embedding_type": "absolute",
        "add_cross_attention": False,
    }
    # What their heads that pool one position need besides.
    pooled_constants: ClassVar[Mapping[str, object]] = {}
    embedding_names: ClassVar[Mapping[str, str]] = _EMBEDDINGS
    layer_names: ClassVar[Mapping[str, tuple[str, ...]]] = _LAYER
    optional_names: ClassVar[re.Pattern[str]] = _PAIR_HEAD
    their_activations: ClassVar[Mapping[str, Activation]] = settings.ACTIVATIONS
    bare_names: ClassVar[tuple[str, ...]] = ("embeddings.", "encoder.", "pooler.")
    pooler: ClassVar[str] = "pooler.dense"  # of the model without a head
    # What names of tensors of a language model's head begin with, if not as in `head_names`.
    head_begins: ClassVar[tuple[str, ...]] = ()
    language_modules: ClassVar[tuple[str, ...]] = ()  # of that head, likewise

    @classmethod
    def from_huggingface(
        cls, family: type[C], config: ConfigJson, tensors: Iterable[str] = ()
    ) -> C:
        config, tensors = {**_OFTEN_ABSENT, **config}, [*tensors]
        fixed = {"model_type": cls.model_type, **cls.their_constants}
        if family.position_offset:  # transformers counts positions from the padding id
            fixed["pad_token_id"] = family.position_offset - 1
        fields = settings.read_settings(config, cls.their_settings, fixed, cls.their_activations)
        decoded: C = decode(family, fields, "config.json")
        names = {cls._canonical(name) for name in tensors}
        heads = cls._heads()
        if all(name.startswith(cls.bare_names) for name in tensors):
            # Without a prefix, `AutoModel` has saved them, and config.json may still have the class
            # of the model before: all-mpnet-base-v2 names MPNetForMaskedLM.
            tasks = {cls._task_architecture(head) for head in _TASKS}
            heads = {name: heads[name] for name in tasks & heads.keys()}
        settings.check_named(config, names, heads)
        # Other parts are detected by their tensors: many files name too little.
        head, labels = settings.read_task(
            config, {head: cls._task_architecture(head) for head in _TASKS}
        )
        begins = cls.head_begins or tuple(cls.head_names.values())
        if head == "language_model" and names and not any(n.startswith(begins) for n in names):
            head = "embedding"  # as `AutoModel` saves it
        if head in POOLED:
            settings.check_head(config, head, cls.pooled_constants)
        nsp = {f"{name}.weight" for name in cls.nsp_names.values()}
        return replace(
            decoded,
            max_positions=decoded.max_positions - family.position_offset,
            nsp=head == "language_model" and bool(nsp) and nsp <= names,
            head=head,
            labels=labels,
        )

    @classmethod
    def _heads(cls) -> dict[str, tuple[str, ...]]:
        """The modules of the head of each architecture."""
        own = cls.language_modules or (cls.head_names["dense"], cls.head_names["norm"])
        return {
            cls.causal_architecture: own,
            cls.architecture: own,
            cls.architecture.replace("MaskedLM", "PreTraining"): (*own, *cls.nsp_names.values()),
            **{
                cls._task_architecture(head): tuple(cls.task_names[head].values())
                for head in _TASKS
            },
        }

    @classmethod
    def _task_architecture(cls, head: Head) -> str:
        if head == "embedding":
            return re.sub("ForMaskedLM|LMHeadModel|Model", "", cls.architecture) + "Model"
        if head == "language_model":
            return cls.architecture
        return cls.architecture.replace("MaskedLM", TASKS[head].architecture)

    def to_huggingface(self) -> ConfigJson:
        config = self.config
        # These are computed by samestep alone; a config.json could not express them.
        self.check_export_of_head()
        if config.norm != "post" or config.gated:
            raise ConfigError(
                f"norm {config.norm} with activation {config.activation} cannot be exported: "
                f"{self.model_type} in transformers has norm post and no gated activation. Train "
                "with those."
            )
        if config.causal and not self.causal_architecture:
            raise ConfigError(
                f"causal is true, but transformers has no causal {self.model_type}. Use the "
                "checkpoint with samestep."
            )
        fields = {theirs: getattr(config, ours) for ours, theirs in self.their_settings.items()}
        if config.activation == "gelu_tanh":
            fields[self.their_settings["activation"]] = "gelu_pytorch_tanh"
        fields["max_position_embeddings"] += config.position_offset
        if config.head != "language_model":
            architecture = self._task_architecture(config.head)
        elif config.nsp:
            architecture = self.architecture.replace("MaskedLM", "PreTraining")
        else:
            architecture = self.causal_architecture if config.causal else self.architecture
        return {
            "architectures": [architecture],
            "model_type": self.model_type,
            **fields,
            **self.special_ids,
            **settings.name_labels(config.labels),
        }

    def check_export_of_head(self) -> None:
        """Rejects the export of a head that transformers lacks."""
        lacking = {
            "scalar_mix": "head that reads all layers",
            "head_lstm": "head with an LSTM",
            "crf": "conditional random field",
        }
        if self.config.head != "language_model":
            lacking["causal"] = "left-to-right model for such tasks"
        for name, part in lacking.items():
            if getattr(self.config, name):
                raise ConfigError(
                    f"{name} is set, but transformers has no {part}. Use the checkpoint with "
                    "samestep."
                )

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Names of older versions, and names without the family's prefix, are recognized.
        table = self.tensor_names()
        own = {name for names in table.values() for name in names}
        unused = [
            name
            for name in tensors
            if self.optional_names.fullmatch(name) and self._canonical(name) not in own
        ]
        # Buffers are numbers from 0 on, so nothing is lost with them.
        ignored = [n for n in tensors if _BUFFERS.fullmatch(n)] + unused
        kept = self.export_spare(self.import_spare(tensors))
        if lost := [name for name in unused if self._canonical(name) not in kept]:
            logger.info("left out, since the model has no such parameters: %s", ", ".join(lost))
        found = {
            self._canonical(name): self.import_rows(name, tensors[name])
            for name in tensors
            if name not in ignored
        }
        if self.config.head == "language_model":
            self._join_copies(found)
        return join_tensors(found, table, self.config)

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        config = self.config
        # transformers has no such heads; SpanBERT and TinyBERT were published without them, too.
        absent = ("span_head.", "fit_head.")
        known = {name: parameters[name] for name in parameters if not name.startswith(absent)}
        exported = {
            name: self.export_rows(name, rows)
            for name, rows in split_tensors(known, self.tensor_names(), config).items()
        }
        # An untied head of transformers has its bias twice, as `bias` and `decoder.bias`.
        if not config.tied and config.head == "language_model":
            bias = self.head_names["bias"]
            exported[f"{self.head_names['decoder']}.bias"] = exported[bias].clone()
        return exported

    def import_spare(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        name = self._pooler
        heads = [head for head in self.task_names if self.task_names[head].get("pooler") == name]
        if self.config.nsp or self.config.head in heads:
            return {}
        found = {self._canonical(each): tensors[each] for each in tensors}
        kinds = [kind for kind in ("weight", "bias") if f"{name}.{kind}" in found]
        parts = {f"head.pooler.{kind}": found[f"{name}.{kind}"] for kind in kinds}
        width = self.config.width
        shapes = [tuple(part.shape) for part in parts.values()]
        if parts and shapes != [(width, width), (width,)]:
            raise CheckpointError(
                f"{name} has the shapes {shapes}, and a pooler of this model has "
                f"{[(width, width), (width,)]}. Use the config.json that belongs to the weights"
            )
        return dict.fromkeys(heads, parts) if parts else {}

    def export_spare(self, spare: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        if self.config.head != "embedding":
            return {}
        parts = next(iter(spare.values()), {})
        return {name.replace("head.pooler", self._pooler): each for name, each in parts.items()}

    @property
    def _pooler(self) -> str:
        return f"{self.prefix or self.model_type}.{self.pooler}"

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        config = self.config
        table: dict[str, tuple[str, ...]] = {
            f"embeddings.{ours}": (f"{self.prefix or self.model_type}.{theirs}",)
            for ours, theirs in self.embedding_names.items()
        }
        modules: dict[str, tuple[str, ...]] = {}
        for layer, place in self.layer_places().items():
            begin = f"{self.prefix or self.model_type}.{place}"
            for ours, theirs in self.layer_names.items():
                modules[f"layers.{layer}.{ours}"] = tuple(f"{begin}.{name}" for name in theirs)
        heads = self.task_names.get(config.head, {})
        if config.head == "language_model":
            heads = {part: self.head_names[part] for part in ("dense", "norm")}
            table["head.bias"] = (self.head_names["bias"],)
            if not config.tied:
                table["head.decoder.weight"] = (f"{self.head_names['decoder']}.weight",)
        modules |= {f"head.{part}": (name,) for part, name in heads.items()}
        if config.nsp:
            modules |= {f"nsp_head.{part}": (name,) for part, name in self.nsp_names.items()}
        # Each of these modules has a weight and a bias.
        for ours, names in modules.items():
            for kind in ("weight", "bias"):
                table[f"{ours}.{kind}"] = tuple(f"{name}.{kind}" for name in names)
        return table

    def layer_places(self) -> dict[int, str]:
        """Our number of each distinct layer -> its module in transformers."""
        return {layer: f"encoder.layer.{layer}" for layer in range(self.config.layers)}

    @classmethod
    def _canonical(cls, name: str) -> str:
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        # A checkpoint of the bare encoder (BertModel) has no "bert." before its names.
        has_prefix = not name.startswith(cls.bare_names)
        return name if has_prefix else f"{cls.prefix or cls.model_type}.{name}"

    def _join_copies(self, found: dict[str, Tensor]) -> None:
        """Joins the names of a tied head's matrix, and of its bias.

        transformers adds `decoder.bias`: a copy of `bias` in a tied model, otherwise the bias that
        is used.
        """
        decoder, bias = self.head_names["decoder"], self.head_names["bias"]
        decoder_bias = f"{decoder}.bias"
        if not self.config.tied:
            # transformers uses `decoder.bias`, even if a stale `bias` is there.
            if decoder_bias in found:
                found[bias] = found.pop(decoder_bias)
            return
        if decoder_bias != bias:
            keep_one(found, bias, decoder_bias)
        (embedding,) = self.tensor_names()["embeddings.tokens.weight"]
        keep_one(found, embedding, f"{decoder}.weight")
