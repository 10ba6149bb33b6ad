"""`samestep doctor` on a machine whose third device adds up wrongly."""

from __future__ import annotations

import sys

from torch import Tensor

from samestep.cli import main
from trainer.inspect.doctor.xla_devices import XlaTrial

sound = XlaTrial._parts


def sick(trial: XlaTrial, tensor: Tensor) -> list[tuple[Tensor, str]]:
    return [(part + (device == "CPU:2"), device) for part, device in sound(trial, tensor)]


if __name__ == "__main__":
    XlaTrial._parts = sick  # type: ignore[method-assign]
    sys.exit(main(["doctor"]))
