"""Accelerator types of Cloud TPU: their number of devices and their usual machine image."""

from __future__ import annotations

from launch.settings import chips_of
from samestep.errors import ConfigError

# By kind: what its number counts per XLA device, and the image. On v2 and v3 every core is a
# device. On v4 and v5p a chip is one, and the number counts its two cores: v4-8 has 4 devices.
_KINDS = {
    "v2": (1, "tpu-ubuntu2204-base"),
    "v3": (1, "tpu-ubuntu2204-base"),
    "v4": (2, "tpu-ubuntu2204-base"),
    "v5litepod": (1, "v2-alpha-tpuv5-lite"),
    "v5p": (2, "v2-alpha-tpuv5"),
    "v6e": (1, "v2-alpha-tpuv6e"),
}


def devices(accelerator_type: str, topology: str | None) -> int:
    """Number of XLA devices of a slice.

    Raises:
        ConfigError: there is no such slice.
    """
    kind, _, number = accelerator_type.partition("-")
    if kind not in _KINDS:
        known = ", ".join(f"{kind}-N" for kind in _KINDS)
        raise ConfigError(f"accelerator_type {accelerator_type} is unknown. Use one of {known}.")
    if topology is not None:
        chips = chips_of(topology)
        if number or not chips:
            raise ConfigError(
                f"topology {topology} does not fit accelerator_type {accelerator_type}. Write them "
                f"as 2x2x4 and {kind}, or remove topology."
            )
        return chips * 2 if kind in ("v2", "v3") else chips
    counted, _ = _KINDS[kind]
    if not number.isdecimal() or not int(number) or int(number) % counted:
        raise ConfigError(
            f"accelerator_type {accelerator_type} names no valid size. Write it as {kind}-8."
        )
    return int(number) // counted


def image(accelerator_type: str) -> str:
    """The usual runtime version for machines of a type."""
    return _KINDS[accelerator_type.partition("-")[0]][1]
