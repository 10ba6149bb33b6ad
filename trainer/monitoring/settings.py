"""Settings of the services that metrics go to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from samestep.errors import ConfigError


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
