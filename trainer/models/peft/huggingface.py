"""Reads and writes adapter folders of Hugging Face's `peft` library.

Such a folder holds the added parameters under the library's names, and a task's head, but not the
model they were added to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from samestep.config import Tree, kind_name
from samestep.errors import CheckpointError, ConfigError
from trainer.models import Model
from trainer.models.codecs import codec_of
from trainer.models.config import FEWEST_LABELS, Head
from trainer.models.peft.kinds import adapters, lora, prefix, prompt

AnyConfig: TypeAlias = Any
"""The `Config` of a module in trainer/models."""

_LORA = "base_model.model."
_PROMPT = "base_model."
_EMBEDDINGS = "prompt_embeddings"
_TASKS: dict[Head, str] = {
    "classification": "SEQ_CLS",
    "tagging": "TOKEN_CLS",
    "question_answering": "QUESTION_ANS",
}
_HEADS: dict[str | None, Head] = {task: head for head, task in _TASKS.items()}
_HEADS[None] = "multiple_choice"  # the library has no name for it
_Read: TypeAlias = tuple[AnyConfig, dict[str, Tensor], set[str]]
"""The `Config` of the model that was read, its added parameters, and the tensors used for them."""
_UNCHANGED_BASE = (True, False, "gaussian", "eva")
"""Initializations of LoRA that leave the base model's weights alone."""
_SUPPORTED = {
    "use_rslora": False,
    "use_dora": False,
    "bias": "none",
    "lora_bias": False,
    "trainable_token_indices": None,
    "layer_replication": None,
    "target_parameters": None,
    "megatron_config": None,
}
"""LoRA's settings in the library that would compute something else, and the supported values."""


def export_adapter(
    config: AnyConfig, tensors: Mapping[str, Tensor], base: str
) -> tuple[Tree, dict[str, Tensor]]:
    """Converts added and trained parameters for `peft.PeftModel.from_pretrained`.

    Args:
        config: of the model, with `peft`.
        tensors: the model's parameters.
        base: name or folder of the model without them.

    Returns:
        The content of adapter_config.json, and the tensors.

    Raises:
        ConfigError: the library, or transformers, does not support the model.
    """
    codec = codec_of(config)
    codec_of(replace(config, peft=None)).to_huggingface()  # rejects heads that transformers lacks
    added, names = config.peft, codec.tensor_names()
    # On the meta device: only names and shapes are needed, so no memory is allocated.
    with torch.device("meta"):
        model = config.build()
    head = _head_parameters(model) if config.head != "language_model" else []
    saved = {theirs: tensors[name] for name in head for theirs in names[name]}
    modules = list(dict.fromkeys(_saved_module(name) for name in saved))
    content: Tree = {
        "base_model_name_or_path": base,
        "task_type": _task_type(config),
        "inference_mode": True,
        "modules_to_save": modules or None,
    }
    if isinstance(added, lora.Config):
        own, found = _export_lora(config, model, names, tensors)
        own["fan_in_fan_out"] = codec.model_type in ("gpt2", "openai-gpt")  # Conv1D
        return content | own, _prefixed({**found, **saved}, _LORA)
    if not can_export(config):
        kind = kind_name(added)
        raise ConfigError(
            f"peft does not compute {kind} as samestep does for {codec.model_type} with a "
            f"{config.head} head. Use the checkpoint with samestep (evaluate, features, generate, "
            "init_from), or fine-tune with kind: lora."
        )
    is_prompt = isinstance(added, prompt.Config)
    content |= {
        "num_virtual_tokens": added.length,
        # A prompt is as wide as the token embeddings, a prefix as the layers.
        "token_dim": config.embedding_width if is_prompt else config.width,
        "num_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_transformer_submodules": 1,
    }
    if is_prompt:
        content |= {"peft_type": "PROMPT_TUNING", "prompt_tuning_init": "RANDOM"}
        embeddings = tensors[prompt.NAME]
    else:
        content |= {
            "peft_type": "PREFIX_TUNING",
            "prefix_projection": False,
            "encoder_hidden_size": config.width,
        }
        # The library stores a prefix as one matrix: keys and values of all layers side by side.
        embeddings = torch.cat(prefix.computed(model, tensors), 1)
    return content, {_EMBEDDINGS: embeddings, **_prefixed(saved, _PROMPT)}


def can_export(config: AnyConfig) -> bool:
    """Whether the library computes the same function with the added parameters.

    It inserts a prompt in place of token ids: heads of T5 and NeoBERT need these, and a GPT
    classifier would then pool the last position even if it is padding. It inserts a prefix into the
    key-value cache, which some families lack (GPT-1, DistilBERT, ALBERT, MPNet, ModernBERT,
    NeoBERT), and T5 and BART use differently. It ignores both if it has no name for the task, as
    for multiple choice and masked language modeling.
    """
    if isinstance(config.peft, lora.Config):
        return True
    if isinstance(config.peft, adapters.Config) or _task_type(config) is None:
        return False
    if isinstance(config.peft, prefix.Config):
        return codec_of(config).prefix_in_peft
    if not codec_of(config).prompt_in_peft:
        return False
    is_encoder = not (config.causal or config.encoder_decoder)
    return is_encoder or config.head in ("language_model", "tagging")


def import_adapter(
    content: Tree, tensors: Mapping[str, Tensor], base: AnyConfig
) -> tuple[AnyConfig, dict[str, Tensor]]:
    """Reads LoRA, a prompt or a prefix saved by the library.

    Args:
        content: of adapter_config.json.
        tensors: of adapter_model.safetensors.
        base: the `Config` of the model without them.

    Returns:
        The `Config` of the model with them, and the parameters that are added or replaced.

    Raises:
        CheckpointError: the folder belongs to another model, or is not supported.
    """
    kind = content.get("peft_type")
    if kind not in _READERS:
        raise CheckpointError(
            f"adapter_config.json has peft_type {kind!r}. Train one of {', '.join(_READERS)}."
        )
    begin, read = _READERS[kind]
    found = {name.removeprefix(begin): tensors[name].float() for name in tensors}
    base = _with_head(base, content, found)
    config, parameters, used = read(content, found, base)
    table = codec_of(base).tensor_names()
    with torch.device("meta"):
        plain = base.without_peft().build()
    head = {ours: table[ours] for ours in _head_parameters(plain)}
    # Every tensor must be understood: one that is ignored would silently change the predictions.
    known = used.union(*head.values())
    if others := sorted(found.keys() - known):
        raise CheckpointError(
            f"adapter_model.safetensors has the unsupported tensor {others[0]}: it is neither LoRA "
            "of a layer's projection nor a prompt, a prefix or part of a task's head. Train "
            "without it, or merge it into the model with peft."
        )
    for ours, theirs in head.items():
        # A fused projection of ours is several matrices of theirs, stacked along the rows.
        if found.keys() >= set(theirs):
            parameters[ours] = torch.cat([found[name] for name in theirs])
    return config, parameters


@dataclass(frozen=True)
class _SavedLora:
    """LoRA as the library saves it: one A and B per matrix of transformers.

    Attributes:
        found: the tensors.
        changes: module of transformers -> the parts of our projections that it holds. BERT's
            `query` is one part of our fused projection, GPT-2's `c_attn` all three.
        content: of adapter_config.json.
        base: the `Config` of the model without LoRA.
    """

    found: Mapping[str, Tensor]
    changes: Mapping[str, list[lora.Change]]
    content: Tree
    base: AnyConfig

    def rows(self, module: str, change: lora.Change) -> Tensor:
        """The rows of B that belong to a part."""
        name = f"{module}.weight"
        b = codec_of(self.base).import_rows(name, self.found[f"{module}.lora_B.weight"])
        rows: Tensor = b.chunk(change.parts)[change.part] if len(self.changes[module]) > 1 else b
        return rows

    def is_used(self, module: str, change: lora.Change) -> bool:
        """Whether a part is changed at all; a fused matrix may have rows of zeros."""
        return len(self.changes[module]) == 1 or bool(self.rows(module, change).any())

    def matrices(
        self, module: str, change: lora.Change, added: lora.Config, linear: nn.Linear
    ) -> tuple[Tensor, Tensor]:
        """A and B of a part, padded with zeros to the common rank and rescaled to our alpha."""
        a = torch.zeros(added.rank, linear.in_features)
        b = torch.zeros(linear.out_features // change.parts, added.rank)
        if f"{module}.lora_A.weight" in self.found:
            # Theirs adds alpha_i / rank_i * B A with a rank per module, ours scale * B A with one
            # rank for all. B is rescaled; the padding of zeros adds nothing.
            own = self.found[f"{module}.lora_A.weight"]
            rank, alpha = len(own), float(self._alpha(module))
            a[:rank] = own
            b[:, :rank] = self.rows(module, change) * (alpha / rank / added.scale)
        return a, b

    def _alpha(self, module: str) -> Any:
        """The library matches patterns with the end of a module's name, or as an expression."""
        patterns = self.content.get("alpha_pattern") or {}
        matches = (patterns[key] for key in patterns if re.match(rf"(.*\.)?({key})$", module))
        return next(matches, self.content["lora_alpha"])


def _import_lora(content: Tree, found: Mapping[str, Tensor], base: AnyConfig) -> _Read:
    for key, expected in _SUPPORTED.items():
        if content.get(key, expected) not in (expected, None):
            raise CheckpointError(
                f"adapter_config.json has {key} {content[key]!r}, which is not supported. Train "
                f"with {expected!r}."
            )
    if (initial := content.get("init_lora_weights", True)) not in _UNCHANGED_BASE:
        raise CheckpointError(
            f"adapter_config.json has init_lora_weights {initial!r}, which also changes the base "
            "model. Merge it into the model with peft, or train LoRA without it."
        )
    suffix = ".lora_A.weight"
    ranks = {name.removesuffix(suffix): len(found[name]) for name in found if suffix in name}
    if not ranks:
        raise CheckpointError(
            "adapter_model.safetensors has no lora_A. Export or download the folder again."
        )
    with torch.device("meta"):
        model = base.build_base()
    codec = codec_of(base)
    names = codec.tensor_names()
    # Start from LoRA of every projection, and keep the targets that the file changes.
    targets = (each for each in lora.known_targets(model) if each not in codec.targets_not_in_peft)
    everything = lora.Config(targets=tuple(targets))
    place: dict[str, list[lora.Change]] = {}
    for change in everything.changes(model):
        theirs = [name.removesuffix(".weight") for name in names[f"{change.linear}.weight"]]
        place.setdefault(theirs[change.part if len(theirs) > 1 else 0], []).append(change)
    if unknown := sorted(ranks.keys() - place.keys()):
        raise CheckpointError(
            f"LoRA of {unknown[0]} is not supported. Train it on linear layers, such as "
            f"{next(iter(place))}."
        )
    saved = _SavedLora(found, place, content, base)
    used = {c.target for module in ranks for c in place[module] if saved.is_used(module, c)}
    changed = tuple(target for target in everything.targets if target in used)
    added = lora.Config(
        max(ranks.values()), float(content["lora_alpha"]), changed or everything.targets[:1]
    )
    parameters: dict[str, Tensor] = {}
    for module, changes in place.items():
        for change in changes:
            if change.target in added.targets:
                linear = model.get_submodule(change.linear)
                a, b = saved.matrices(module, change, added, linear)
                parameters |= {change.name("a"): a, change.name("b"): b}
    tensors = {f"{module}.lora_{matrix}.weight" for module in ranks for matrix in "AB"}
    return replace(base, peft=added), parameters, tensors


def _import_virtual(content: Tree, found: Mapping[str, Tensor], base: AnyConfig) -> _Read:
    """A prompt or a prefix. If a network computed it, the library saves the network's output."""
    if _EMBEDDINGS not in found:
        raise CheckpointError(
            f"adapter_model.safetensors has no {_EMBEDDINGS}. Export or download the folder again."
        )
    is_prompt = content["peft_type"] == "PROMPT_TUNING"
    kind = prompt.Config if is_prompt else prefix.Config
    config = replace(base, peft=kind(int(content["num_virtual_tokens"])))
    if not can_export(config):
        raise CheckpointError(
            f"peft does not compute {content['peft_type']} as samestep does for "
            f"{codec_of(config).model_type} with a {config.head} head. Train LoRA."
        )
    with torch.device("meta"):
        model = config.build()
    names = [prompt.NAME] if is_prompt else prefix.names(model)
    length, width = model.get_parameter(names[0]).shape
    rows, columns = found[_EMBEDDINGS].shape
    if (rows, columns) != (length, width * len(names)):
        of_decoder = rows == 2 * length and codec_of(config).model_type in ("t5", "bart")
        fix = (
            "Train with num_transformer_submodules=1, without a prompt of the decoder"
            if of_decoder
            else "Export it again"
        )
        raise CheckpointError(
            f"{_EMBEDDINGS} in adapter_model.safetensors is {rows} x {columns}, not {length} x "
            f"{width * len(names)}. {fix}."
        )
    # A prefix of 2 layers: [length, 4 w] -> keys and values of layer 0, then of layer 1.
    parts = found[_EMBEDDINGS].chunk(len(names), 1)
    return config, dict(zip(names, parts, strict=True)), {_EMBEDDINGS}


_READERS: dict[str, tuple[str, Callable[[Tree, Mapping[str, Tensor], AnyConfig], _Read]]] = {
    "LORA": (_LORA, _import_lora),
    "PROMPT_TUNING": (_PROMPT, _import_virtual),
    "PREFIX_TUNING": (_PROMPT, _import_virtual),
}
"""peft_type -> the prefix of tensor names, and the function that reads it."""


def _export_lora(
    config: AnyConfig,
    model: nn.Module,
    names: Mapping[str, tuple[str, ...]],
    tensors: Mapping[str, Tensor],
) -> tuple[Tree, dict[str, Tensor]]:
    """Converts LoRA to one A and B per matrix of transformers."""
    found: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    added, codec = config.peft, codec_of(config)
    if unknown := [target for target in added.targets if target in codec.targets_not_in_peft]:
        raise ConfigError(
            f"model.peft.targets has {unknown[0]}, where {codec.model_type} in transformers has "
            "no linear layer, which peft needs. Export without --adapter: this merges LoRA."
        )
    changes = added.changes(model)
    for linear in dict.fromkeys(change.linear for change in changes):
        own = [change for change in changes if change.linear == linear]
        theirs = [name.removesuffix(".weight") for name in names[f"{linear}.weight"]]
        # (A, B) of each part of this projection that is trained, such as query and value.
        pairs = [[tensors[change.name(matrix)].float() for matrix in "ab"] for change in own]
        if len(theirs) > 1 or own[0].parts == 1:
            for change, (a, b) in zip(own, pairs, strict=True):
                module = theirs[change.part]
                ranks[module] = added.rank
                found[f"{module}.lora_A.weight"], found[f"{module}.lora_B.weight"] = a, b
            continue
        # Several parts are one matrix (GPT-2's c_attn): A's rows are stacked, and B is block
        # diagonal. LoRA of query and value with rank r becomes rank 2 r:
        #     A = [Aq; Av],   B = [[Bq, 0], [0, 0], [0, Bv]]   (rows: query, key, value)
        (module,) = theirs
        rows = len(pairs[0][1])
        merged = torch.zeros(rows * own[0].parts, added.rank * len(own))
        for column, (change, (_, b)) in enumerate(zip(own, pairs, strict=True)):
            block = merged[change.part * rows : (change.part + 1) * rows]
            block[:, column * added.rank : (column + 1) * added.rank] = b
        ranks[module] = added.rank * len(own)
        found[f"{module}.lora_A.weight"] = torch.cat([a for a, _ in pairs])
        found[f"{module}.lora_B.weight"] = codec.export_rows(f"{module}.weight", merged)
    other = {module: rank for module, rank in ranks.items() if rank != added.rank}
    content = {
        "peft_type": "LORA",
        "r": added.rank,
        "lora_alpha": added.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(ranks),
        "rank_pattern": other,
        # The library divides alpha by the rank; a larger rank must not change the scale.
        "alpha_pattern": {
            module: added.alpha * rank / added.rank for module, rank in other.items()
        },
    }
    return content, found


def _with_head(base: AnyConfig, content: Tree, found: Mapping[str, Tensor]) -> AnyConfig:
    """The base's `Config` with the head that was saved beside the added parameters.

    The library does not save the number of labels, so each length of a saved tensor is tried.
    """
    task = content.get("task_type")
    head = _HEADS.get(task)
    if head is None or base.head == head:
        return base
    # A classifier with 3 labels has a weight [3, w] and a bias [3], so 3 is among the lengths; a
    # wrong length gives shapes that no saved tensor has.
    for count in sorted({len(tensor) for name, tensor in found.items() if ".lora_" not in name}):
        labels = tuple(f"LABEL_{number}" for number in range(count))
        try:
            config = base.for_needs(frozenset({head}), labels if head in FEWEST_LABELS else ())
        except ConfigError:
            continue
        with torch.device("meta"):
            model = config.build_base()
        names = codec_of(config).tensor_names()
        if all(
            theirs in found and found[theirs].shape == model.get_parameter(name).shape
            for name in _head_parameters(model)
            for theirs in names[name]
        ):
            return config
    if task is None:  # multiple choice without its head, or masked language modeling
        return base
    raise CheckpointError(
        f"adapter_config.json has task_type {task}, but adapter_model.safetensors has no such "
        "head. Save it with modules_to_save, or use a base with the head."
    )


def _head_parameters(model: Model) -> list[str]:
    return [name for name, _ in model.named_parameters() if model.role(name).part == "head"]


def _saved_module(name: str) -> str:
    """The module of transformers that the library saves whole for a tensor of a head."""
    module = name.rpartition(".")[0]
    return "classifier" if module.startswith("classifier.") else module


def _task_type(config: AnyConfig) -> str | None:
    if config.head != "language_model":
        return _TASKS.get(config.head)
    return "SEQ_2_SEQ_LM" if config.encoder_decoder else "CAUSAL_LM" if config.causal else None


def _prefixed(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor.contiguous() for name, tensor in tensors.items()}
