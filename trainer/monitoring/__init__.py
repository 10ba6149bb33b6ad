"""Measures a run and records the metrics.

`metrics.jsonl` is the record; the terminal, TensorBoard, W&B and plots show what is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from samestep.errors import ConfigError

Level: TypeAlias = Literal["INFO", "WARN", "ERROR"]
"""Severity of an alert."""


class Tracker(Protocol):
    """A destination of metrics; exists on rank 0 only."""

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
    ) -> None:
        """Writes metrics, named like `train/loss`, after `step` updates. Steps never decrease."""
        ...

    def alert(self, level: Level, title: str, text: str) -> None:
        """Notifies people, within seconds or not at all. The default does nothing.

        An ERROR ends the run. It may come from another thread, because the training thread may
        hang.
        """
        return

    def close(self) -> None:
        """Flushes and closes."""
        ...

    def complete(self) -> bool:
        """Sends again, after `close`, if rows of metrics.jsonl were lost, as on a full disk.

        Returns:
            Whether the destination has all rows now. The default loses none.
        """
        return True


@dataclass(frozen=True)
class WeightsAndBiases:
    """Weights & Biases.

    Attributes:
        project: the W&B project.
        entity: user or team; None takes the account's default.
        group: group of the run in the W&B interface.
        name: name of the run; None takes the name of the run folder.
        tags: labels of the run.
        mode: online, offline or disabled; auto takes WANDB_MODE if that is set, else online if an
            API key is found (in WANDB_API_KEY or netrc), else offline.
        log_checkpoints: log committed checkpoints as artifacts; those in object stores as
            references.
        alerts: notify people when the run fails or hangs, skips a step, or was restarted.
        required: end with an error if the package wandb is not installed, instead of a warning.
    """

    project: str = "samestep"
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    log_checkpoints: bool = False
    alerts: bool = True
    required: bool = False

    def __post_init__(self) -> None:
        if self.required and self.mode == "disabled":
            raise ConfigError("required is true and mode is disabled. Change one of them.")


@dataclass(frozen=True)
class TensorBoard:
    """TensorBoard event files in RUN/tensorboard."""
