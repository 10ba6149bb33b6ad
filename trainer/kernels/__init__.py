"""Fused kernels of our own, for devices that Triton compiles for.

Callers ask `supports` first and compute unfused otherwise; the extra `gpu` installs Triton.
"""

from trainer.kernels.attention import WIDTHS, attention, supports

__all__ = ["WIDTHS", "attention", "supports"]
