"""The parts that a task's head may have: a mean of all layers, LSTM layers, a random field."""

from __future__ import annotations

from typing import Protocol

from samestep.errors import ConfigError
from trainer.models.extras import Extra


class HasTaskParts(Protocol):
    """The configuration of a model with such parts.

    Attributes:
        scalar_mix: whether the head reads a learned mean of all layers instead of the last one.
        scalar_mix_l2: coefficient of the penalty on that mean's scores.
        head_lstm: number of bidirectional LSTM layers below the head.
        crf: whether transitions between tags have scores.
    """

    @property
    def head(self) -> str: ...
    @property
    def labels(self) -> tuple[str, ...]: ...
    @property
    def virtual_tokens(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def scalar_mix(self) -> bool: ...
    @property
    def scalar_mix_l2(self) -> float: ...
    @property
    def head_lstm(self) -> int: ...
    @property
    def crf(self) -> bool: ...


def check_task_parts(config: HasTaskParts) -> None:
    """Rejects parts that a model has no place for.

    Raises:
        ConfigError: names the part.
    """
    if config.head_lstm < 0:
        raise ConfigError(f"head_lstm is {config.head_lstm}. Use a number of layers, or 0.")
    if config.scalar_mix_l2 < 0 or (config.scalar_mix_l2 and not config.scalar_mix):
        raise ConfigError(
            f"scalar_mix_l2 is {config.scalar_mix_l2}. Use a coefficient such as 0.001 with "
            "scalar_mix=true, or 0."
        )
    if config.head == "language_model" or config.virtual_tokens:
        parts = {"scalar_mix": config.scalar_mix, "head_lstm": config.head_lstm}
        if given := [name for name, value in parts.items() if value]:
            raise ConfigError(
                f"{given[0]} is for a task's head, without a prompt or prefix. Set head to "
                "classification or another task, and model.peft, if there is any, to null or lora."
            )
    if config.crf and config.head != "tagging":
        raise ConfigError(f"crf is true, but head is {config.head}. Set head to tagging.")


def build_task_parts(config: HasTaskParts) -> list[Extra]:
    """Builds the parts that are set, in the order of their parameters in checkpoints."""
    parts: list[Extra] = []
    if config.scalar_mix:
        from trainer.models.extras.scalar_mix import ScalarMix

        parts.append(ScalarMix(config.layers + 1))
    if config.head_lstm:
        from trainer.models.extras.head_lstm import HeadLstm

        parts.append(HeadLstm(config.head_lstm, config.width, config.dropout))
    if config.crf:
        from trainer.models.extras.crf import TagTransitions

        parts.append(TagTransitions(len(config.labels)))
    return parts
