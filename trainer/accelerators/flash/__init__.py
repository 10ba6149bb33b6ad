"""Fused kernels of our own, for devices that Triton compiles for.

Where `supports` says no, attention is computed unfused. The extra `gpu` installs Triton.
"""

from trainer.accelerators.flash.operator import WIDTHS, attention, fits, supports

__all__ = ["WIDTHS", "attention", "fits", "supports"]
