"""The state of a run in a checkpoint's meta.json, and which settings may change on resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from trainer.config import Tree, differences
from trainer.errors import CheckpointError
from trainer.training.phases import MicroBatchSize

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


@dataclass(frozen=True)
class Description:
    """How a run is configured, as every checkpoint stores it.

    Attributes:
        config: the experiment.
        micro_batch_sizes: of each phase, after measuring if the setting is auto.
        teacher: identity of the teacher's weights; None without a teacher.
        base: path and identity of the weights of frozen parameters; None if nothing is frozen.
    """

    config: Tree
    micro_batch_sizes: tuple[MicroBatchSize, ...]
    teacher: str | None = None
    base: Mapping[str, str] | None = None

    def to_meta(self) -> dict[str, object]:
        """The keys for meta.json."""
        return {
            "config": self.config,
            **({} if self.base is None else {"base": self.base}),
            "micro_batch_sizes": self.micro_batch_sizes,
            "teacher": self.teacher,
        }


def changes_since(meta: Meta, description: Description) -> str:
    """Lists the settings that have changed since a checkpoint, as "key: old -> new".

    The model (except its dropout), the teacher and the weights of frozen parameters must not
    change: the run would no longer be one experiment.

    Raises:
        CheckpointError: one of these has changed.
    """
    before, now = meta.get("base"), description.base
    if before is not None and now is not None and before["identity"] != now["identity"]:
        raise CheckpointError(
            f"the run began with the frozen weights of {before['path']}, and init_from, "
            f"{now['path']}, has others; set init_from={before['path']}, and restore what it held "
            "if that has changed"
        )
    teacher = meta.get("teacher")
    if teacher is not None and description.teacher is None:
        raise CheckpointError(
            f"the run has learnt from a teacher until step {meta['step']}, and the objective has "
            "none now. Put it back, or start a new run with init_from"
        )
    if teacher != description.teacher:
        raise CheckpointError(
            "objective.teacher names other weights than the run has learnt from until step "
            f"{meta['step']}. Name those weights (by their own checkpoint if the teacher's run has "
            "gone on), or start a new run with init_from"
        )
    changes = differences(meta["config"], description.config)
    listed = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in changes.items())
    if any(key.startswith("model.") and "dropout" not in key for key in changes):
        raise CheckpointError(
            f"the checkpoint is of another model ({listed}). Use its settings, or another output"
        )
    return listed
