"""Helpers to convert between the tensors of Hugging Face checkpoints and parameters."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from samestep.config import kind_name
from samestep.errors import CheckpointError
from trainer.models.codecs import Names
from trainer.models.config import TransformerConfig

logger = logging.getLogger(__name__)


def join_tensors(
    found: Mapping[str, Tensor], names: Names, config: TransformerConfig
) -> dict[str, Tensor]:
    """Converts a checkpoint's tensors to parameters, in the checkpoint's precision.

    Tensors of a head that the model lacks are left out, with a warning that names them.

    Raises:
        CheckpointError: tensors are missing, unexpected or have another shape.
    """
    # A fused QKV of [3 D, D] is three tensors of [D, D].
    expected = {}
    for ours, shape in _shapes(config).items():
        for theirs in names[ours]:
            expected[theirs] = (shape[0] // len(names[ours]), *shape[1:])
    body = {
        theirs.partition(".")[0]
        for ours, every in names.items()
        if not ours.startswith(("head.", "nsp_head."))
        for theirs in every
    }
    others = [name for name in found if name not in expected and name.partition(".")[0] not in body]
    known = {name: found[name] for name in found if name not in others}
    # With something missing, an unexpected name is a clue to the error.
    _check(known if known.keys() >= expected.keys() else found, expected, config)
    if others:
        logger.warning(
            "left out, since this %s model has no such head: %s",
            *(kind_name(config), ", ".join(others)),
        )
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
    # Before any name is translated, so that a message has our names.
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
        f"the weights do not fit this {kind_name(config)} model: {'; '.join(shown)}{more}. {fix}"
    )
