"""What PyTorch's kernels offer on a device.

For code that is given tensors and no `Accelerator`: models, optimizers, norms, checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

FUSED = ("cpu", "cuda")
"""Types of devices that torch's fused optimizers support."""


def has_fused_optimizers(device: torch.device) -> bool:
    """Whether torch has fused optimizers for the device.

    On other devices operations are recorded into graphs, so a number that changes from step to
    step must be a tensor.
    """
    return device.type in FUSED


def has_fast_fp64(device: torch.device) -> bool:
    """Whether fp32 numbers are summed in fp64 as fast as they are read.

    On a CPU that is 10 times as slow; TPUs have no fp64 at all, it is put together from fp32.
    """
    return device.type == "cuda"


def fuses_trained_bias(bias: Tensor) -> bool:
    """Whether attention with a bias that needs a gradient has a fused kernel.

    Without one, `scaled_dot_product_attention` computes all scores, as unfused attention does.
    """
    return not bias.is_cpu


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The precision of matrix products under autocast; None outside of it."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
