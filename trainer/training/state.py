"""The state of a run in a checkpoint's meta.json, and which settings may change on resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from trainer.config import differences
from trainer.config.tree import of_kinds
from trainer.errors import CheckpointError
from trainer.optim import groups

Meta: TypeAlias = Mapping[str, Any]
"""The content of a checkpoint's meta.json. Older versions have written fewer keys."""


@dataclass
class TrainState:
    """Counts since the first step of the run, over all its restarts.

    Attributes:
        step: optimizer steps taken.
        examples: examples consumed; rows that only pad a batch are not counted.
        tokens: positions of these examples (examples x sequence length), padding included.
    """

    step: int = 0
    examples: int = 0
    tokens: int = 0

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.examples, self.tokens = state["step"], state["examples"], state["tokens"]


def state_tensors(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, frozen: bool = False
) -> dict[str, Tensor]:
    """The state that steps change, by name; with `frozen`, the frozen parameters as well.

    Checkpoints leave frozen parameters out: they name the weights that have them instead.
    """
    tensors: dict[str, Tensor] = {
        f"model/{name}": parameter.detach()
        for name, parameter in parameters.items()
        if frozen or parameter.requires_grad
    }
    moments = groups.state_tensors(optimizer, parameters.items())
    return tensors | {f"optimizer/{name}": tensor for name, tensor in moments.items()}


def changes_since(meta: Meta, description: Meta) -> str:
    """Lists the settings that have changed since a checkpoint, as "key: old -> new".

    The model (except its dropout), the teacher and the weights of frozen parameters must not
    change: the run would no longer be one experiment.

    Args:
        description: the keys config, base and teacher as they are now.

    Raises:
        CheckpointError: one of these has changed.
    """
    # By identity, not by path: the same weights may have been moved.
    before, now = meta.get("base"), description.get("base")
    if before is not None and now is not None and before["identity"] != now["identity"]:
        raise CheckpointError(
            f"the run began with the frozen weights of {before['path']}, and init_from, "
            f"{now['path']}, has others; set init_from={before['path']}, and restore what it held "
            "if that has changed"
        )
    teacher, new_teacher = meta.get("teacher"), description["teacher"]
    if teacher is not None and new_teacher is None:
        raise CheckpointError(
            f"the run has learnt from a teacher until step {meta['step']}, and the objective has "
            "none now. Put it back, or start a new run with init_from"
        )
    if teacher != new_teacher:
        raise CheckpointError(
            "objective.teacher names other weights than the run has learnt from until step "
            f"{meta['step']}. Name those weights (by their own checkpoint if the teacher's run has "
            "gone on), or start a new run with init_from"
        )
    changes = differences(meta["config"], description["config"])
    shown = of_kinds(changes)
    listed = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in shown.items())
    if any(key.startswith("model.") and "dropout" not in key for key in changes):
        raise CheckpointError(
            f"the checkpoint is of another model ({listed}). Use its settings, or another output"
        )
    return listed
