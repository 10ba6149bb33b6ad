"""What the families share in reading and writing the models of Hugging Face's `transformers`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from trainer.errors import CheckpointError, ConfigError
from trainer.models.config import FEWEST_LABELS, Head

Names: TypeAlias = Mapping[str, tuple[str, ...]]
"""Parameter name -> the tensors of a checkpoint that it consists of, end to end."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read_settings(
    config: Mapping[str, Any],
    fields: Mapping[str, str],
    fixed: Mapping[str, Any],
    activation: Mapping[str, str],
) -> dict[str, Any]:
    """The settings in a `config.json`, under our names.

    Args:
        config: the content.
        fields: our name -> theirs.
        fixed: what the content must say, as far as it says anything; `model_type` among it.
        activation: their name -> ours.

    Raises:
        ConfigError: it describes another kind of model, or lacks a key.
    """
    for key, expected in fixed.items():
        if config.get(key, expected) != expected:
            raise ConfigError(
                f"config.json has {key} {config[key]!r}, and a {fixed['model_type']} model of this "
                "kind "
                f"needs {expected!r}; import another checkpoint"
            )
    missing = [theirs for theirs in fields.values() if theirs not in config]
    if missing:
        raise ConfigError(
            f"config.json lacks {', '.join(missing)}; use the config.json of a transformers model"
        )
    key = fields["activation"]
    if str(config[key]) not in activation:
        raise ConfigError(
            f"config.json has {key} {config[key]!r}, which is not supported; known: "
            f"{', '.join(activation)}"
        )
    return {ours: config[theirs] for ours, theirs in fields.items()} | {
        "activation": activation[str(config[key])]
    }


def read_task(
    config: Mapping[str, Any], tensors: Collection[str], heads: Mapping[Head, tuple[str, str]]
) -> tuple[Head, tuple[str, ...]]:
    """The head of a checkpoint, which is a language model's unless it is one of `heads`, and its
    labels.

    Args:
        config: the content of its `config.json`.
        tensors: the names of its tensors: a head that the content mentions is one if it is there.
            Without any names it is taken to be.
        heads: of each head the architecture that has it, and one of its tensors.

    Raises:
        ConfigError: the labels are not numbered from 0.
    """
    named = config.get("architectures") or ()
    head = next((head for head, (architecture, _) in heads.items() if architecture in named), None)
    if head is None or (tensors and heads[head][1] not in tensors):
        return "language_model", ()
    return head, read_labels(config) if head in FEWEST_LABELS else ()


def read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of classes in a `config.json`, in order.

    As transformers has them where it names none.

    Raises:
        ConfigError: they are not numbered from 0.
    """
    names = config.get("id2label")
    if not names:
        return tuple(f"LABEL_{number}" for number in range(int(config.get("num_labels", 2))))
    try:
        numbered = {int(number): str(name) for number, name in names.items()}
        return tuple(numbered[number] for number in range(len(names)))
    except (AttributeError, KeyError, ValueError):
        raise ConfigError(
            f"config.json has id2label {names!r}, which does not name the labels 0, 1, ...; "
            "correct it"
        ) from None


def name_labels(labels: tuple[str, ...]) -> dict[str, Any]:
    """What a `config.json` says of the labels of a head, if it has any.

    A single one is that of a number.
    """
    if not labels:
        return {}
    names = {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }
    return names | ({"problem_type": "regression"} if len(labels) == 1 else {})


class Family(Protocol):
    """The `Config` of a family that `transformers` has, too."""

    model_type: ClassVar[str]

    def build_base(self) -> nn.Module:
        """Makes the module without what fine-tuning adds."""
        ...


def join_tensors(found: Mapping[str, Tensor], names: Names, config: Family) -> dict[str, Tensor]:
    """Turns a checkpoint's tensors into parameters, in the checkpoint's precision.

    Raises:
        CheckpointError: naming the tensors that are missing, unexpected or of another shape.
    """
    expected = {}
    for ours, shape in _shapes(config).items():
        for theirs in names[ours]:
            expected[theirs] = (shape[0] // len(names[ours]), *shape[1:])
    _check(found, expected, config)
    # What needs no joining is not copied: a large model's tensors stay on the disk until they are
    # used.
    parts = {ours: [found[name] for name in theirs] for ours, theirs in names.items()}
    return {ours: torch.cat(found) if len(found) > 1 else found[0] for ours, found in parts.items()}


def split_tensors(
    parameters: Mapping[str, Tensor], names: Names, config: Family
) -> dict[str, Tensor]:
    """The inverse of `join_tensors`.

    Raises:
        CheckpointError: naming the parameters that are missing, unexpected or of another shape.
    """
    _check(parameters, _shapes(config), config)
    exported: dict[str, Tensor] = {}
    for ours, theirs in names.items():
        exported.update(zip(theirs, parameters[ours].detach().chunk(len(theirs)), strict=True))
    return exported


def drop_copy(found: dict[str, Tensor], copy: str, original: str) -> None:
    """Drops a matrix that a checkpoint of a tied model holds a second time.

    Raises:
        CheckpointError: it is another matrix.
    """
    matrix, embedding = found.pop(copy, None), found.get(original)
    if matrix is not None and embedding is not None and not torch.equal(matrix, embedding):
        raise CheckpointError(
            f"{copy} differs from the word embeddings, and the configuration says that they are "
            "one; "
            "set tie_word_embeddings to false in config.json"
        )


def _shapes(config: Family) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {
            name: tuple(parameter.shape)
            for name, parameter in config.build_base().named_parameters()
        }


def _check(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], config: Family
) -> None:
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is unexpected" for name in tensors if name not in expected]
    problems += [
        f"{name} is {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"these weights are not of this {config.model_type} model: "
            f"{'; '.join(problems[:5])}{more}; "
            "use the config.json that belongs to them"
        )
