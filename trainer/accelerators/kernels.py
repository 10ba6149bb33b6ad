"""Properties of PyTorch's kernels on a device.

For code that has tensors but no `Accelerator`: models, optimizers, norms, checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

EAGER = ("cpu", "cuda")
"""Types of devices that compute each operation when it is called."""
_BLOCK = 1024


def is_eager(device: torch.device) -> bool:
    """Whether the device computes each operation when it is called.

    Torch has fused optimizers for these devices, and writing into memory again and again saves
    memory there. Other devices record operations into graphs, so a number that changes from step
    to step must be a tensor, and a compiler assigns memory.
    """
    return device.type in EAGER


def computes_in_chunks(x: Tensor) -> bool:
    """Whether computing with a chunk of x at a time saves memory; see `is_eager`.

    `is_xla` is asked apart, because plans answer for the tensors that stand in for XLA's.
    """
    return is_eager(x.device) and not x.is_xla  # type: ignore[attr-defined]


def has_fast_fp64(device: torch.device) -> bool:
    """Whether summing fp32 numbers in fp64 is as fast as reading them.

    It is 10 times slower on a CPU. TPUs emulate fp64 with fp32.
    """
    return device.type == "cuda"


def product_multiple(device: torch.device) -> int:
    """The number whose multiples are fast sizes of 16-bit matrix products.

    GPUs have slower kernels for sizes that are no multiples of 8, and use their tensor cores best
    with multiples of 64. BERT's vocabulary of 30,522 is even, and no more.
    """
    return 64 if device.type == "cuda" else 1


def adds_rows_in_order(device: torch.device) -> bool:
    """Whether `index_add_` sums rows in the same order each time; on GPUs it uses atomics."""
    return device.type != "cuda"


def indexes_fast(device: torch.device) -> bool:
    """Whether gathers and scatters along one dimension read and write only what they select.

    torch-xla lowers `take_along_dim` to an index for each number, and its gradient to a sort of all
    of them, with 12 KB of memory traffic for each on a TPU v5e; a scatter copies the whole tensor
    into another layout and back. Comparing with all indices is one fused pass.
    """
    return device.type != "xla"


def numbers(count: int, device: torch.device) -> Tensor:
    """Counts from 0: int32 [count].

    torch-xla writes every number of `torch.arange` into the graph, in each micro-batch. This way
    these are few: 2,500 are the first of 3 * 1,024, [[0], [1024], [2048]] + [0, 1, ..., 1023].
    """
    if is_eager(device) or count <= _BLOCK:
        return torch.arange(count, dtype=torch.int32, device=device)
    first = torch.arange(0, count, _BLOCK, dtype=torch.int32, device=device)
    rest = torch.arange(_BLOCK, dtype=torch.int32, device=device)
    return (first[:, None] + rest).flatten()[:count]


def fuses_trained_bias(bias: Tensor) -> bool:
    """Whether attention with a bias that needs a gradient has a fused kernel on its device.

    Otherwise, `scaled_dot_product_attention` materializes all scores, as unfused attention does.
    """
    return not bias.is_cpu


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The precision of matrix products under autocast; None without autocast."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> torch.autocast:
    """Disables autocast, for operations that choose their precision themselves."""
    return torch.autocast(device.type, enabled=False)


def block_size(device: torch.device) -> int | None:
    """Elements of a tensor whose temporary results fit into a cache; None: use the whole tensor."""
    return 2**16 if device.type == "cpu" else None
