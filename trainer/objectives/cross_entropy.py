"""Cross-entropy in the memory of the logits, the largest tensor of a step with a vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Exponentials below e^-64 add nothing to a sum of at least 1 in float32. At e^-64, their gradients
# are still normal numbers; CPUs take 15 times as long with denormal ones.
# (torch.set_flush_denormal does not reach the exponentials of MKL.)
_LEAST = -64.0


def cross_entropy_(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes cross-entropies in float32; overwrites the logits.

    On a CPU, `torch.nn.functional.cross_entropy` spends most of its time touching new memory. This
    allocates none: the exponentials replace the logits, and the gradient replaces the exponentials.

    Args:
        logits: [N, V]; overwritten unless they are of lower precision.
        labels: int64 [N], in [0, V).

    Returns:
        The cross-entropies and log(Z), Z the softmax's denominator, float32 [N], which can be
        differentiated once and together; and whether each label has the highest score (ties
        count), bool [N].
    """
    nll, log_z, correct = _CrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
    return nll, log_z, correct


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        exponentials = logits.detach().float()
        highest = exponentials.amax(-1, keepdim=True)
        # Taken before the next line replaces the logits by exponentials.
        labeled = exponentials.gather(-1, labels[:, None])
        exponentials.sub_(highest).clamp_(min=_LEAST).exp_()
        total = exponentials.sum(-1, keepdim=True)
        correct = labeled == highest
        ctx.save_for_backward(exponentials, total, labels)
        ctx.mark_non_differentiable(correct)
        ctx.dtype = logits.dtype
        log_total = total.log()
        return (log_total + (highest - labeled))[:, 0], (log_total + highest)[:, 0], correct[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_log_z: Tensor, _: Tensor) -> tuple[Tensor, None]:
        exponentials, total, labels = ctx.saved_tensors
        # d nll / d logits = softmax - one_hot(label), and d log(Z) / d logits = softmax.
        softmax = exponentials.mul_((grad + grad_log_z)[:, None] / total)
        gradient = softmax.scatter_add_(-1, labels[:, None], -grad[:, None])
        return gradient.to(ctx.dtype), None
