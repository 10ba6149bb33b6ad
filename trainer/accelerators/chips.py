"""The TPU chips of this machine, as Linux lists them.

Nothing has to be imported or initialized, and nothing is requested over the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer import accelerators
from trainer.accelerators import Precision

DEVICES, PCI = Path("/dev"), Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
# By PCI device number: the chip's name, and the dense bf16 TFLOP/s of one device by its data sheet
# (docs.cloud.google.com/tpu/docs: v4, v5p, v5e, v6e, tpu7x). A chip is one device, but a TPU7x is
# two, so its figure is halved.
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
    """Settings of matrix products on TPUs, shared by both ways to drive them.

    Attributes:
        bf16_products: rounds the factors of fp32 matrix products to bfloat16, the default of TPUs:
            several times as fast, with 8 bits of mantissa. Off, because runs on different hardware
            would no longer agree within the tolerance.
    """

    bf16_products: bool = False


def count() -> int:
    """Number of chips that this process can use; in a container, maybe not all of the machine."""
    if _known() is None:
        return 0
    return len([*DEVICES.glob("accel[0-9]*"), *DEVICES.glob("vfio/[0-9]*")])


def name() -> str | None:
    """Google's name of the chips, such as v5e; None without chips, or for unknown ones."""
    known = _known()
    return known and known[0]


def peak_flops(precision: Precision) -> float | None:
    """Dense FLOP/s of one device by the data sheet; None if there is no figure."""
    known = _known()
    return known[1] * 1e12 if known and known[1] and precision == "bf16" else None


def _known() -> tuple[str, float | None] | None:
    """The entry of `_CHIPS` for this machine's chips."""
    for device in sorted(PCI.glob("*")):
        try:
            vendor, number = ((device / file).read_text().strip() for file in ("vendor", "device"))
        except OSError:
            continue
        if vendor == _GOOGLE and number in _CHIPS:  # Google's network cards have its vendor ID too
            return _CHIPS[number]
    return None
