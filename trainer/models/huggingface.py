"""Helpers for reading and writing the models of Hugging Face's `transformers`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from samestep.errors import CheckpointError, ConfigError
from trainer.models.config import FEWEST_LABELS, Activation, Head, TransformerConfig

ConfigJson: TypeAlias = dict[str, Any]
"""The content of a `config.json` of transformers."""

_MOST_LABELS = 2**20  # that a file may number without naming them

Names: TypeAlias = Mapping[str, tuple[str, ...]]
"""Parameter name -> names of the checkpoint's tensors that are concatenated in its rows."""

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read_settings(
    config: ConfigJson,
    fields: Mapping[str, str],
    fixed: Mapping[str, Any],
    activation: Mapping[str, str],
) -> dict[str, Any]:
    """Reads the settings of a `config.json`, under our names.

    Args:
        config: the content.
        fields: our name -> theirs.
        fixed: required values of keys, `model_type` among them; the keys may be absent.
        activation: their name -> ours.

    Raises:
        ConfigError: it describes another kind of model, or lacks a key.
    """
    # Absent keys have transformers' defaults, which are the required values.
    for key, expected in fixed.items():
        if config.get(key, expected) != expected:
            raise ConfigError(
                f"config.json has {key} {config[key]!r}, but this kind of {fixed['model_type']} "
                f"needs {expected!r}. Import another checkpoint."
            )
    missing = [theirs for theirs in fields.values() if theirs not in config]
    if missing:
        raise ConfigError(
            f"config.json lacks {', '.join(missing)}. Use the config.json of a transformers model."
        )
    key = fields["activation"]
    if str(config[key]) not in activation:
        raise ConfigError(
            f"config.json has {key} {config[key]!r}. Supported are {', '.join(activation)}."
        )
    return {ours: config[theirs] for ours, theirs in fields.items()} | {
        "activation": activation[str(config[key])]
    }


def read_task(
    config: ConfigJson, tensors: Collection[str], heads: Mapping[Head, tuple[str, str]]
) -> tuple[Head, tuple[str, ...]]:
    """Detects the head of a checkpoint, by default `language_model`, and its labels.

    Args:
        config: the content of `config.json`.
        tensors: names of the checkpoint's tensors. A head named in the content counts only if its
            tensor is there; without any names it always counts.
        heads: for each head, its architecture in transformers and one of its tensors.

    Raises:
        ConfigError: the labels are not numbered from 0, or a text may have several.
    """
    named = config.get("architectures") or ()
    head = next((head for head, (architecture, _) in heads.items() if architecture in named), None)
    if head is None or (tensors and heads[head][1] not in tensors):
        return "language_model", ()
    labels = read_labels(config) if head in FEWEST_LABELS else ()
    if head == "classification":
        _check_problem(config.get("problem_type"), labels)
    return head, labels


def check_head(config: ConfigJson, head: Head, needed: Mapping[str, object]) -> None:
    """Rejects a task's head that computes something else than ours.

    Args:
        config: the content of `config.json`.
        needed: required values of keys that may be absent.

    Raises:
        ConfigError: a key has another value.
    """
    for key, value in needed.items():
        if config.get(key, value) != value:
            raise ConfigError(
                f"config.json has {key} {config[key]!r}, but a {head} head needs {value!r} here. "
                "Fine-tune from a language model instead."
            )


def _check_problem(kind: str | None, labels: tuple[str, ...]) -> None:
    """Rejects a classifier whose outputs are not one number, or the logits of one softmax."""
    problem = {
        "multi_label_classification": "several labels for a text",
        "regression": f"{len(labels)} numbers for a text",
    }
    if kind == "multi_label_classification" or (kind == "regression" and len(labels) > 1):
        raise ConfigError(
            f"config.json has problem_type {kind!r}, which is {problem[kind]}, but a "
            "classification head predicts one class or one number. Import another checkpoint, or "
            "remove problem_type to fine-tune these weights on another task."
        )


def read_labels(config: ConfigJson) -> tuple[str, ...]:
    """Reads the labels of a `config.json`; without names, they are transformers' defaults.

    Raises:
        ConfigError: they are not numbered from 0, or too many to number without names.
    """
    names = config.get("id2label")
    if not names:
        count = int(config.get("num_labels", 2))
        if count > _MOST_LABELS:
            raise ConfigError(
                f"config.json has num_labels {count}, more than {_MOST_LABELS}. Use the file that "
                "belongs to the tensors, or name the labels in id2label."
            )
        return tuple(f"LABEL_{number}" for number in range(count))
    try:
        numbered = {int(number): str(name) for number, name in names.items()}
        return tuple(numbered[number] for number in range(len(names)))
    except (AttributeError, KeyError, ValueError):
        raise ConfigError(
            f"config.json has id2label {names!r}. Number the labels 0, 1, ..."
        ) from None


def name_labels(labels: tuple[str, ...]) -> dict[str, Any]:
    """The entries of a `config.json` for labels; a single label means regression."""
    if not labels:
        return {}
    names = {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }
    return names | ({"problem_type": "regression"} if len(labels) == 1 else {})


def join_tensors(
    found: Mapping[str, Tensor], names: Names, config: TransformerConfig
) -> dict[str, Tensor]:
    """Converts a checkpoint's tensors to parameters, in the checkpoint's precision.

    Raises:
        CheckpointError: tensors are missing, unexpected or have another shape.
    """
    # A fused QKV of [3 D, D] is three tensors of [D, D].
    expected = {}
    for ours, shape in _shapes(config).items():
        for theirs in names[ours]:
            expected[theirs] = (shape[0] // len(names[ours]), *shape[1:])
    _check(found, expected, config)
    # Only fused parameters are concatenated. Single tensors are not copied: a large model's
    # memory-mapped tensors stay on disk until used.
    parts = {ours: [found[name] for name in theirs] for ours, theirs in names.items()}
    return {ours: torch.cat(found) if len(found) > 1 else found[0] for ours, found in parts.items()}


def split_tensors(
    parameters: Mapping[str, Tensor], names: Names, config: TransformerConfig
) -> dict[str, Tensor]:
    """The inverse of `join_tensors`.

    Raises:
        CheckpointError: parameters are missing, unexpected or have another shape.
    """
    _check(parameters, _shapes(config), config)
    exported: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        exported.update(zip(theirs, parameters[ours].detach().chunk(len(theirs)), strict=True))
    return exported


def keep_one(found: dict[str, Tensor], name: str, *aliases: str) -> None:
    """Keeps a tied tensor of a checkpoint under one of its names.

    A checkpoint may store it under any of them: safetensors keeps the first in alphabetical order.

    Args:
        found: the checkpoint's tensors, changed in place.
        name: the name to keep.
        aliases: its other names.

    Raises:
        CheckpointError: it is stored twice, with other values.
    """
    for alias in aliases:
        copy = found.pop(alias, None)
        if copy is None:
            continue
        first = found.setdefault(name, copy)
        # NaN equals no number; whoever reads the tensor rejects it by name.
        if first is not copy and not torch.equal(first.nan_to_num(), copy.nan_to_num()):
            raise CheckpointError(
                f"{alias} differs from {name}, but config.json says that they are tied. Set "
                "tie_word_embeddings to false in config.json, or remove the wrong one."
            )


def _shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {
            name: tuple(parameter.shape)
            for name, parameter in config.build_base().named_parameters()
        }


def _check(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    config: TransformerConfig,
) -> None:
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    problems = [
        [f"{name} is missing" for name in missing],
        [f"{name} is unexpected" for name in unexpected],
        [
            f"{name} is {list(tensors[name].shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ],
    ]
    if not any(problems):
        return
    # Some of each: a missing name is often an unexpected one without its prefix.
    shown = [problem for kind in problems for problem in kind[:3]]
    hidden = sum(map(len, problems)) - len(shown)
    more = f" and {hidden} more" if hidden else ""
    prefix = next(
        (
            other.removesuffix(name)
            for name in missing
            for other in unexpected
            if other.endswith(f".{name}")
        ),
        None,
    )
    fix = "Use the config.json that belongs to them."
    if prefix:
        fix = f"Remove {prefix!r} from the names of the tensors."
    raise CheckpointError(
        f"the weights do not fit this {config.model_type} model: {'; '.join(shown)}{more}. {fix}"
    )
