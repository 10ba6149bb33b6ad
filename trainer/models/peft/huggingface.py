"""The folders of Hugging Face's `peft` library.

What was added to a model, under its names, without the model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from trainer.config import Tree
from trainer.errors import CheckpointError, ConfigError
from trainer.models import Model
from trainer.models.config import Head
from trainer.models.peft import adapters, lora, prefix, prompt

T = TypeVar("T")
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
_HEADS: dict[str | None, Head] = {task: head for head, task in _TASKS.items()} | {
    None: "multiple_choice"
}
_Read: TypeAlias = tuple[AnyConfig, dict[str, Tensor], set[str]]
"""The `Config` of a model with what was read, its parameters, and the tensors that they are made
from.
"""
_PLAIN = (True, False, "gaussian", "eva")  # ways to draw LoRA that leave the model as it is
_OTHER = {  # of LoRA's settings in peft, what would compute something else
    "use_rslora": False,
    "use_dora": False,
    "bias": "none",
    "lora_bias": False,
    "trainable_token_indices": None,
    "layer_replication": None,
    "target_parameters": None,
    "megatron_config": None,
}


def export_adapter(
    config: AnyConfig, tensors: Mapping[str, Tensor], base: str
) -> tuple[Tree, dict[str, Tensor]]:
    """What was added to a model and trained, as `peft.PeftModel.from_pretrained` reads it.

    Args:
        config: of the model, with `peft`.
        tensors: its parameters.
        base: the name or folder of the model that it was added to.

    Returns:
        The content of adapter_config.json, and the tensors.

    Raises:
        ConfigError: the library, or transformers, has nothing of the kind.
    """
    dataclasses.replace(
        config, peft=None
    ).to_huggingface()  # refuses a head that transformers has not
    added, names = config.peft, config.tensor_names()
    with torch.device("meta"):
        model = config.build()
    head = _of_head(model) if config.head != "language_model" else []
    saved = {theirs: tensors[name] for name in head for theirs in names[name]}
    modules = list(dict.fromkeys(_saved_module(name) for name in saved))
    content: Tree = {
        "base_model_name_or_path": base,
        "task_type": _task_type(config),
        "inference_mode": True,
        "modules_to_save": modules or None,
    }
    if isinstance(added, lora.Config):
        own, found = _export_lora(added, model, names, tensors)
        transposed = config.model_type in ("gpt2", "openai-gpt")
        return (
            content | own | {"fan_in_fan_out": transposed},
            _named({**found, **saved}, _LORA),
        )
    if not can_export(config):
        kind = type(added).__module__.rpartition(".")[2]
        raise ConfigError(
            f"with {kind}, peft does not compute what samestep does for {config.model_type} with a "
            f"{config.head} head, "
            "so it is not exported; use the checkpoint with samestep (evaluate, features, "
            "generate, init_from), or "
            "fine-tune with kind: lora"
        )
    virtual = {
        "num_virtual_tokens": added.length,
        "token_dim": config.width,
        "num_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_transformer_submodules": 1,
    }
    if isinstance(added, prompt.Config):
        own = {"peft_type": "PROMPT_TUNING", "prompt_tuning_init": "RANDOM"}
        found = {_EMBEDDINGS: tensors[prompt.NAME]}
    else:
        own = {
            "peft_type": "PREFIX_TUNING",
            "prefix_projection": False,
            "encoder_hidden_size": config.width,
        }
        layers = [tensors[name] for name in prefix.names(model)]
        found = {_EMBEDDINGS: torch.cat([each.float() for each in layers], 1)}
    return content | virtual | own, {**found, **_named(saved, _PROMPT)}


def can_export(config: AnyConfig) -> bool:
    """Whether the library computes what a model does with what was added to it.

    A prompt's embeddings go where tokens would: T5's heads need these, and a GPT's then reads the
    last cell, be it padding. A prefix goes where keys and values are cached, which GPT-1 has no
    place for and T5 another. Both are passed over where the library has no name for the task, as
    for multiple choice and masked words.
    """
    if isinstance(config.peft, lora.Config):
        return True
    if isinstance(config.peft, adapters.Config) or _task_type(config) is None:
        return False
    if isinstance(config.peft, prefix.Config):
        return config.model_type not in ("t5", "openai-gpt")
    is_encoder = not (config.causal or config.encoder_decoder)
    return is_encoder or config.head in ("language_model", "tagging")


def import_adapter(
    content: Tree, tensors: Mapping[str, Tensor], base: AnyConfig
) -> tuple[AnyConfig, dict[str, Tensor]]:
    """Reads LoRA, a prompt or a prefix as the library has saved it.

    Args:
        content: of adapter_config.json.
        tensors: of adapter_model.safetensors.
        base: the `Config` of the model that it was added to.

    Returns:
        The `Config` of the model with it, and the parameters that it adds or replaces.

    Raises:
        CheckpointError: it is of another model or kind, or computes something else.
    """
    kind = content.get("peft_type")
    if kind not in _READERS:
        raise CheckpointError(
            f"adapter_config.json has peft_type {kind!r}, and {', '.join(_READERS)} can be read; "
            "train one of these"
        )
    begin, read = _READERS[kind]
    found = {name.removeprefix(begin): tensors[name].float() for name in tensors}
    base = _with_head(base, content, found)
    config, parameters, used = read(content, found, base)
    table = base.tensor_names()
    with torch.device("meta"):
        plain = base.without_peft().build()
    names = {ours: table[ours] for ours in _of_head(plain)}
    if others := sorted(
        found.keys() - used - {each for theirs in names.values() for each in theirs}
    ):
        raise CheckpointError(
            f"adapter_model.safetensors holds {others[0]}, which is neither LoRA of a layer's "
            "projections nor a prompt "
            "or prefix nor part of a task's head, and is not supported; train without it, or merge "
            "it into the model "
            "with peft"
        )
    for ours, theirs in names.items():
        if all(name in found for name in theirs):
            parameters[ours] = torch.cat([found[name] for name in theirs])
    return config, parameters


def _import_lora(content: Tree, found: Mapping[str, Tensor], base: AnyConfig) -> _Read:
    for key, expected in _OTHER.items():
        if content.get(key, expected) not in (expected, None):
            raise CheckpointError(
                f"adapter_config.json has {key} {content[key]!r}, which is not supported; train it "
                f"with {expected!r}"
            )
    if (initial := content.get("init_lora_weights", True)) not in _PLAIN:
        raise CheckpointError(
            f"adapter_config.json has init_lora_weights {initial!r}, which changes the model "
            "beneath as well; merge it "
            "into the model with peft, or train LoRA without"
        )
    names = base.tensor_names()
    wide = {
        name.removesuffix(".lora_A.weight"): len(found[name])
        for name in found
        if name.endswith(".lora_A.weight")
    }
    if not wide:
        raise CheckpointError(
            "adapter_model.safetensors holds no lora_A; export or download it again"
        )
    with torch.device("meta"):
        model = base.build_base()
    everything = dataclasses.replace(lora.Config(), targets=lora.known_targets(model))
    place: dict[
        str, list[lora.Change]
    ] = {}  # of each of their modules, the parts of ours that it is
    for change in everything.changes(model):
        theirs = [name.removesuffix(".weight") for name in names[f"{change.linear}.weight"]]
        place.setdefault(theirs[change.part if len(theirs) > 1 else 0], []).append(change)
    if unknown := sorted(wide.keys() - place.keys()):
        raise CheckpointError(
            f"LoRA of {unknown[0]} is not supported; those of a layer's projections are"
        )
    used = {
        change.target
        for module in wide
        for change in place[module]
        if not _is_zero(found, module, change, place)
    }
    targets = (
        tuple(target for target in everything.targets if target in used) or everything.targets[:1]
    )
    added = lora.Config(max(wide.values()), float(content["lora_alpha"]), targets)
    config = dataclasses.replace(base, peft=added)
    parameters: dict[str, Tensor] = {}
    for module, changes in place.items():
        for change in changes:
            if change.target in targets:
                a, b = _matrices(found, module, change, place, content, added, model)
                parameters |= {change.name("a"): a, change.name("b"): b}
    return (
        config,
        parameters,
        {f"{module}.lora_{matrix}.weight" for module in wide for matrix in "AB"},
    )


def _import_virtual(content: Tree, found: Mapping[str, Tensor], base: AnyConfig) -> _Read:
    """A prompt or a prefix; one that is made by a network is saved as what that has made."""
    if _EMBEDDINGS not in found:
        raise CheckpointError(
            f"adapter_model.safetensors holds no {_EMBEDDINGS}; export or download it again"
        )
    added = prompt.Config if content["peft_type"] == "PROMPT_TUNING" else prefix.Config
    config = dataclasses.replace(base, peft=added(int(content["num_virtual_tokens"])))
    with torch.device("meta"):
        model = config.build()
    names = [prompt.NAME] if added is prompt.Config else prefix.names(model)
    rows, columns = found[_EMBEDDINGS].shape
    shape = model.get_parameter(names[0]).shape
    if not can_export(config):
        raise CheckpointError(
            f"with {content['peft_type']}, peft does not compute what samestep does for "
            f"{config.model_type} with a "
            f"{config.head} head; train LoRA"
        )
    if (rows, columns) != (expected := (shape[0], shape[1] * len(names))):
        of_decoder = rows == 2 * shape[0] and config.model_type == "t5"
        fix = (
            "train with num_transformer_submodules=1: the decoder has no prompt here"
            if of_decoder
            else "export it anew"
        )
        raise CheckpointError(
            f"adapter_model.safetensors holds {_EMBEDDINGS} of {rows} x {columns}, and "
            f"{expected[0]} x {expected[1]} "
            f"are expected; {fix}"
        )
    return (
        config,
        dict(zip(names, found[_EMBEDDINGS].chunk(len(names), 1), strict=True)),
        {_EMBEDDINGS},
    )


_READERS: dict[str, tuple[str, Callable[[Tree, Mapping[str, Tensor], AnyConfig], _Read]]] = {
    "LORA": (_LORA, _import_lora),
    "PROMPT_TUNING": (_PROMPT, _import_virtual),
    "PREFIX_TUNING": (_PROMPT, _import_virtual),
}
"""How what the library calls so is read, and what its names of tensors begin with."""


def _export_lora(
    added: lora.Config,
    model: nn.Module,
    names: Mapping[str, tuple[str, ...]],
    tensors: Mapping[str, Tensor],
) -> tuple[Tree, dict[str, Tensor]]:
    """The library has one A and B for each matrix of transformers, which may be several parts, as
    GPT-2's is.
    """
    found: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    changes = added.changes(model)
    for linear in dict.fromkeys(change.linear for change in changes):
        own = [change for change in changes if change.linear == linear]
        theirs = [name.removesuffix(".weight") for name in names[f"{linear}.weight"]]
        if len(theirs) > 1 or own[0].parts == 1:
            for change in own:
                module = theirs[change.part]
                ranks[module] = added.rank
                found[f"{module}.lora_A.weight"] = tensors[change.name("a")].float()
                found[f"{module}.lora_B.weight"] = tensors[change.name("b")].float()
            continue
        # All A's below each other, and of B's each in rows and columns of its own.
        (module,), zeros = theirs, torch.zeros(len(tensors[own[0].name("b")]), added.rank)
        columns = [
            torch.cat(
                [
                    tensors[c.name("b")].float() if part == c.part else zeros
                    for part in range(c.parts)
                ]
            )
            for c in own
        ]
        ranks[module] = added.rank * len(own)
        found[f"{module}.lora_A.weight"] = torch.cat(
            [tensors[change.name("a")].float() for change in own]
        )
        found[f"{module}.lora_B.weight"] = torch.cat(columns, 1)
    other = {module: rank for module, rank in ranks.items() if rank != added.rank}
    content = {
        "peft_type": "LORA",
        "r": added.rank,
        "lora_alpha": added.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(ranks),
        "rank_pattern": other,
        "alpha_pattern": {
            module: added.alpha * rank / added.rank for module, rank in other.items()
        },
    }
    return content, found


def _matrices(
    found: Mapping[str, Tensor],
    module: str,
    change: lora.Change,
    place: Mapping[str, list[lora.Change]],
    content: Tree,
    added: lora.Config,
    model: nn.Module,
) -> tuple[Tensor, Tensor]:
    """A and B of a part, with rows and columns of zeros up to the common rank.

    Scaled as ours are.
    """
    linear = model.get_submodule(change.linear)
    assert isinstance(linear, nn.Linear)
    a = torch.zeros(added.rank, linear.in_features)
    b = torch.zeros(linear.out_features // change.parts, added.rank)
    if f"{module}.lora_A.weight" in found:
        own_a, own_b = found[f"{module}.lora_A.weight"], _own_rows(found, module, change, place)
        rank = len(own_a)
        alpha = float(_matching(content.get("alpha_pattern") or {}, module, content["lora_alpha"]))
        a[:rank], b[:, :rank] = own_a, own_b * (alpha / rank / added.scale)
    return a, b


def _own_rows(
    found: Mapping[str, Tensor],
    module: str,
    change: lora.Change,
    place: Mapping[str, list[lora.Change]],
) -> Tensor:
    b = found[f"{module}.lora_B.weight"]
    return b.chunk(change.parts)[change.part] if len(place[module]) > 1 else b


def _is_zero(
    found: Mapping[str, Tensor],
    module: str,
    change: lora.Change,
    place: Mapping[str, list[lora.Change]],
) -> bool:
    """Whether this part of several in a matrix is not changed at all."""
    return len(place[module]) > 1 and not _own_rows(found, module, change, place).any()


def _matching(pattern: Mapping[str, T], module: str, default: T) -> T:
    """The setting of a module in one of the library's patterns.

    By ends of names, or expressions for them.
    """
    return next(
        (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default
    )


def _with_head(base: Any, content: Tree, found: Mapping[str, Tensor]) -> AnyConfig:
    """The base's `Config`, with the head that was saved beside what was added."""
    task = content.get("task_type")
    head = _HEADS.get(task)
    if head is None or base.head == head:
        return base
    for count in sorted({len(tensor) for name, tensor in found.items() if ".lora_" not in name}):
        labels = (
            tuple(f"LABEL_{number}" for number in range(count))
            if head in ("classification", "tagging")
            else ()
        )
        try:
            config = base.for_needs(frozenset({head}), labels)
        except ConfigError:
            continue
        with torch.device("meta"):
            model = config.build_base()
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        names = config.tensor_names()
        own = _of_head(model)
        if all(
            theirs in found and tuple(found[theirs].shape) == shapes[name]
            for name in own
            for theirs in names[name]
        ):
            return config
    if task is None:  # the library has no name for choices, nor for what fills masks
        return base
    raise CheckpointError(
        f"adapter_config.json has task_type {task}, and adapter_model.safetensors no such head; "
        "save "
        "it with modules_to_save, or start from a base that has the head"
    )


def _of_head(model: Model) -> list[str]:
    """The parameters of a model's head."""
    return [name for name, _ in model.named_parameters() if model.role(name).part == "head"]


def _saved_module(name: str) -> str:
    """The module of transformers that the library saves whole.

    A head, or a part of one, by the name of a tensor.
    """
    module = name.rpartition(".")[0]
    return "classifier" if module.startswith("classifier.") else module


def _task_type(config: AnyConfig) -> str | None:
    if config.head != "language_model":
        return _TASKS.get(config.head)
    return "SEQ_2_SEQ_LM" if config.encoder_decoder else "CAUSAL_LM" if config.causal else None


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor.contiguous() for name, tensor in tensors.items()}
