"""Whether a run goes on with what it began with, or with other settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config import Tree, differences
from trainer.errors import CheckpointError
from trainer.training.phases import MicroBatchSize
from trainer.training.state import Meta


@dataclass(frozen=True)
class Description:
    """What all checkpoints of a run say about it.

    Attributes:
        config: the experiment.
        micro_batch_sizes: of each phase, as they were measured if they are to be.
        teacher: identity of the teacher's weights; None where there is no teacher.
        base: path and identity of the weights of frozen parameters; None where nothing is frozen.
    """

    config: Tree
    micro_batch_sizes: tuple[MicroBatchSize, ...]
    teacher: str | None = None
    base: Mapping[str, str] | None = None

    @property
    def output(self) -> str:
        """The run's folder."""
        return str(self.config["output"])

    def to_meta(self) -> dict[str, object]:
        """As in the meta.json of a checkpoint."""
        return {
            "config": self.config,
            **({} if self.base is None else {"base": self.base}),
            "micro_batch_sizes": self.micro_batch_sizes,
            "teacher": self.teacher,
        }


def changes_since(meta: Meta, description: Description) -> str:
    """Which settings have changed since a checkpoint.

    The model's may not, dropout excepted, nor may the teacher, nor the weights that frozen parameters are of.

    Args:
        meta: what the checkpoint says.
        description: of the run that goes on.

    Raises:
        CheckpointError: one of these has.
    """
    before, now = meta.get("base"), description.base
    if before is not None and now is not None and before["identity"] != now["identity"]:
        raise CheckpointError(
            f"the run began with the frozen weights of {before['path']}, and those of init_from, {now['path']}, are "
            f"others; set init_from={before['path']}, and bring back what it held if it has been changed"
        )
    if meta.get("teacher") is not None and description.teacher is None:
        raise CheckpointError(
            f"the run has learnt from a teacher until step {meta['step']}, and the objective has none now; put it "
            "back, or start a new run with init_from"
        )
    if meta.get("teacher") != description.teacher:
        raise CheckpointError(
            f"objective.teacher names other weights than those that the run has learnt from until step {meta['step']}; "
            "name these, by their own checkpoint if the teacher's run has gone on, or start a new run with init_from"
        )
    changes = differences(meta["config"], description.config)
    said = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in changes.items())
    if any(key.startswith("model.") and "dropout" not in key for key in changes):
        raise CheckpointError(
            f"the checkpoint is of another model ({said}); use its settings, or another output"
        )
    return said
