"""The kinds of TPU: how accelerator types are counted, and the machines' usual images."""

from __future__ import annotations

import math
import re

from trainer.errors import ConfigError

# What the number of a type counts for each device of XLA, and the image. On v2 and v3 each core is a device; on v4 and
# v5p a chip is, and types count its two cores.
_KINDS = {
    "v2": (1, "tpu-ubuntu2204-base"),
    "v3": (1, "tpu-ubuntu2204-base"),
    "v4": (2, "tpu-ubuntu2204-base"),
    "v5litepod": (1, "v2-alpha-tpuv5-lite"),
    "v5p": (2, "v2-alpha-tpuv5"),
    "v6e": (1, "v2-alpha-tpuv6e"),
}
_TOPOLOGY = re.compile(r"[1-9]\d*(x[1-9]\d*){1,2}")


def devices(accelerator_type: str, topology: str | None) -> int:
    """Those that XLA sees on a slice.

    Raises:
        ConfigError: there is no such slice.
    """
    kind, _, number = accelerator_type.partition("-")
    if kind not in _KINDS:
        known = ", ".join(f"{kind}-N" for kind in _KINDS)
        raise ConfigError(
            f"accelerator_type {accelerator_type} is of no known kind; known: {known}"
        )
    if topology is not None:
        if number or not _TOPOLOGY.fullmatch(topology):
            raise ConfigError(
                f"topology {topology} with accelerator_type {accelerator_type}: write them as 2x2x4 and {kind}, or "
                "leave topology out"
            )
        chips = math.prod(map(int, topology.split("x")))
        return chips * 2 if kind in ("v2", "v3") else chips
    counted, _ = _KINDS[kind]
    if not number.isdecimal() or not int(number) or int(number) % counted:
        raise ConfigError(
            f"accelerator_type {accelerator_type} names no size; write it as {kind}-8"
        )
    return int(number) // counted


def image(accelerator_type: str) -> str:
    """The runtime version that machines of a type usually have."""
    return _KINDS[accelerator_type.partition("-")[0]][1]
