"""The TPU chips of this machine, as Linux lists them.

Nothing has to be imported, started or asked over the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer import accelerators
from trainer.accelerators import Precision

DEVICES, PCI = Path("/dev"), Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
# Of each chip, by its number on the PCI bus: its name, and the dense TFLOP/s in bf16 of a device
# (docs.cloud.google.com/tpu/docs: v4, v5p, v5e, v6e, tpu7x). A chip is a device; of TPU7x, a half
# of one.
_CHIPS = {
    "0x0027": ("v2 or v3", None),
    "0x005e": ("v4", 275),
    "0x0062": ("v5p", 459),
    "0x0063": ("v5e", 197),
    "0x006f": ("v6e", 918),
    "0x0076": ("TPU7x", 2307 / 2),
}


@dataclass(frozen=True)
class Products(accelerators.Config):
    """What is set about matrix products, by whatever way to TPUs.

    Attributes:
        bf16_products: rounds the factors of fp32 matrix products to bfloat16, as TPUs do it by
            themselves: several times as fast, with 8 bits of mantissa. Off, because it leaves the
            tolerance within which runs on different hardware agree.
    """

    bf16_products: bool = False


def count() -> int:
    """How many there are that this process can reach.

    In a container there may be fewer than in the machine.
    """
    if _known() is None:
        return 0
    return len([*DEVICES.glob("accel[0-9]*"), *DEVICES.glob("vfio/[0-9]*")])


def name() -> str | None:
    """What Google calls them, such as v5e; None where there are none, or newer ones."""
    known = _known()
    return known and known[0]


def peak_flops(precision: Precision) -> float | None:
    """The data sheet's dense FLOP/s of one device, or None where there is no such figure."""
    known = _known()
    return known[1] * 1e12 if known and known[1] and precision == "bf16" else None


def _known() -> tuple[str, float | None] | None:
    for device in sorted(PCI.glob("*")):
        try:
            vendor, number = ((device / file).read_text().strip() for file in ("vendor", "device"))
        except OSError:
            continue
        if vendor == _GOOGLE and number in _CHIPS:  # Google's network cards have its number, too
            return _CHIPS[number]
    return None
