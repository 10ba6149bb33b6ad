"""Helpers to read and write a `config.json` of `transformers`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from samestep.errors import CheckpointError, ConfigError
from trainer.models.codecs import ConfigJson
from trainer.models.config import FEWEST_LABELS, Activation, Head

_MOST_LABELS = 2**20  # that a file may number without naming them

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read_settings(
    config: ConfigJson,
    fields: Mapping[str, str],
    fixed: Mapping[str, object],
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
    # The name of an activation is a value, and has its own table.
    key = fields["activation"]
    if str(config[key]) not in activation:
        raise ConfigError(
            f"config.json has {key} {config[key]!r}. Supported are {', '.join(activation)}."
        )
    return {ours: config[theirs] for ours, theirs in fields.items()} | {
        "activation": activation[str(config[key])]
    }


def renamed(config: ConfigJson, model_type: str, before: str, after: str) -> ConfigJson:
    """A `config.json` under the names of another family with the same architecture.

    Args:
        config: the content.
        model_type: of the other family.
        before, after: the beginnings of the two families' names of classes.
    """
    named = config.get("architectures")
    if isinstance(named, list):
        named = [str(name).replace(before, after, 1) for name in named]
    return {**config, "model_type": model_type, "architectures": named}


def write_activation(
    activation: Activation, known: Mapping[str, Activation], model_type: str
) -> str:
    """The name of an activation in a `config.json`.

    Args:
        activation: under our name.
        known: their name -> ours; of several names, the last one is written.
        model_type: of the model, for the error.

    Raises:
        ConfigError: transformers has no such activation in these models.
    """
    # Later entries win: of gelu_new and gelu_pytorch_tanh, the second is written.
    names = {ours: theirs for theirs, ours in known.items()}
    if activation not in names:
        raise ConfigError(
            f"activation {activation} cannot be exported: {model_type} in transformers has no "
            "gated one. Train with another."
        )
    return names[activation]


def read_task(config: ConfigJson, heads: Mapping[Head, str]) -> tuple[Head, tuple[str, ...]]:
    """Reads the head that a `config.json` names, by default `language_model`, and its labels.

    Args:
        config: the content of `config.json`.
        heads: for each head, its architecture in transformers.

    Raises:
        ConfigError: the labels are not numbered from 0, or a text may have several.
    """
    named = config.get("architectures") or ()
    head = next((head for head, architecture in heads.items() if architecture in named), None)
    if head is None:
        return "language_model", ()
    labels = read_labels(config) if head in FEWEST_LABELS else ()
    if head == "classification":
        _check_problem(config.get("problem_type"), labels)
    return head, labels


def check_named(
    config: ConfigJson, tensors: Collection[str], modules: Mapping[str, tuple[str, ...]]
) -> None:
    """Rejects weights without the head that `architectures` names: it would be a random one.

    Args:
        config: the content of `config.json`.
        tensors: names of the checkpoint's tensors; without any, nothing is checked.
        modules: for each architecture, the modules of its head.

    Raises:
        CheckpointError: with the modules without tensors.
    """
    # Modules, not tensors: a tied or older file may have another name for a weight or bias. A
    # prefix of all names is found, and named, later.
    needed = (modules.get(name, ()) for name in config.get("architectures") or ())
    missing = [
        name
        for names in needed
        for name in names
        if not any(f".{name}." in f".{tensor}" for tensor in tensors)
    ]
    if tensors and missing:
        raise CheckpointError(
            f"architectures in config.json names a model with {', '.join(missing)}, which the "
            "weights lack. Copy all files of the model again, or remove architectures from "
            "config.json to read the weights without this head"
        )


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


def name_labels(labels: tuple[str, ...]) -> ConfigJson:
    """The entries of a `config.json` for labels; a single label means regression."""
    if not labels:
        return {}
    names = {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }
    return names | ({"problem_type": "regression"} if len(labels) == 1 else {})
