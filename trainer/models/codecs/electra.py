"""ELECTRA in Hugging Face files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from trainer.models import ModelConfig
from trainer.models.codecs import ConfigJson, bert
from trainer.models.families import electra
from trainer.models.generator import GENERATOR, PRETRAINING


class Codec(bert.Codec[electra.Config]):
    """ELECTRA in Hugging Face files."""

    model_type: ClassVar[str] = "electra"
    architecture: ClassVar[str] = "ElectraForMaskedLM"
    causal_architecture: ClassVar[str] = ""
    head_names: ClassVar[Mapping[str, str]] = {
        "dense": "generator_predictions.dense",
        "norm": "generator_predictions.LayerNorm",
        "bias": "generator_lm_head.bias",
        "decoder": "generator_lm_head",
    }
    nsp_names: ClassVar[Mapping[str, str]] = {}
    task_names: ClassVar[Mapping[str, Mapping[str, str]]] = {
        **bert.Codec.task_names,
        "classification": {"pooler": "classifier.dense", "classifier": "classifier.out_proj"},
        "multiple_choice": {"pooler": "sequence_summary.summary", "classifier": "classifier"},
    }
    their_settings: ClassVar[Mapping[str, str]] = {
        **{ours: name for ours, name in bert.Codec.their_settings.items() if ours != "causal"},
        "embedding_width": "embedding_size",
    }
    # How the heads of transformers drop and pool, of which ours has one way.
    their_constants: ClassVar[Mapping[str, object]] = {
        **bert.Codec.their_constants,
        "is_decoder": False,
        "classifier_dropout": None,
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_activation": "gelu",
    }
    embedding_names: ClassVar[Mapping[str, str]] = {
        **bert.Codec.embedding_names,
        "projection.weight": "embeddings_project.weight",
        "projection.bias": "embeddings_project.bias",
    }
    head_begins: ClassVar[tuple[str, ...]] = ("generator_", "discriminator_predictions.")
    bare_names: ClassVar[tuple[str, ...]] = ("embeddings.", "embeddings_project.", "encoder.")

    @classmethod
    def from_huggingface(
        cls, family: type[electra.Config], config: ConfigJson, tensors: Iterable[str] = ()
    ) -> electra.Config:
        names = list(tensors)
        found = super().from_huggingface(family, config, names)
        if found.head != "language_model":
            return found
        # By the tensors, if their names are known, as `architectures` may be absent.
        named = cls.architecture in (config.get("architectures") or ())
        generates = any(name.startswith("generator_") for name in names) if names else named
        return replace(found, masked_lm=generates)

    @classmethod
    def _heads(cls) -> dict[str, tuple[str, ...]]:
        parts = ("dense", "dense_prediction")
        own = tuple(f"discriminator_predictions.{part}" for part in parts)
        return super()._heads() | {"ElectraForPreTraining": own}

    def to_huggingface(self) -> ConfigJson:
        tree = super().to_huggingface()
        if self.config.predicts == "replaced":
            tree["architectures"] = ["ElectraForPreTraining"]
        return tree

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {name: each for name, each in parameters.items() if not name.startswith(PRETRAINING)}
        # As if it had been built without these, whose tensors would be missing.
        # With and without the choice to copy, the head for tokens is the same.
        head: electra.MainHead = "detector" if self.config.main_head == "detector" else "tokens"
        alone = type(self)(replace(self.config, generator_divisor=0, main_head=head))
        return super(Codec, alone).export_tensors(own)

    def export_parts(self) -> dict[str, tuple[ModelConfig, str]]:
        config = self.config
        if not config.generator_divisor or config.head != "language_model":
            return {}
        return {"generator": (config.generator, GENERATOR)}

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        # The table of a BERT with a masked-LM head; the discriminator has another head.
        table = super().tensor_names()
        if not self.config.projects_embeddings:
            table = {name: table[name] for name in table if ".projection." not in name}
        if self.config.predicts == "replaced":
            table = {name: table[name] for name in table if not name.startswith("head.")}
            for ours, theirs in (("dense", "dense"), ("out", "dense_prediction")):
                for kind in ("weight", "bias"):
                    name = f"discriminator_predictions.{theirs}.{kind}"
                    table[f"head.{ours}.{kind}"] = (name,)
        return table
