"""What PyTorch's kernels offer on a device.

For code that is given tensors and no `Accelerator`: optimizers, norms, checkpoints.
"""

from __future__ import annotations

import torch

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
