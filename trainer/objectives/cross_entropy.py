"""Cross-entropy in the memory of the logits, which over a vocabulary are the largest tensor of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Less than e^-64 adds nothing to a sum of at least 1 in float32, and its share of a gradient is still no denormal
# number, with which CPUs take 15 times as long. (torch.set_flush_denormal does not reach the exponentials of MKL.)
_LEAST = -64.0


def cross_entropy_(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores predictions in float32; the logits hold something else afterwards.

    On a CPU most of the time of `torch.nn.functional.cross_entropy` goes into the first touch of new memory. This takes
    none, and gives the gradient in the same place.

    Args:
        logits: [N, V]; overwritten unless they are of lower precision.
        labels: int64 [N], in [0, V).

    Returns:
        The cross-entropies and the logarithms of the softmax's denominators, float32 [N], both to be differentiated
        once and together; and whether each label has the highest score (a tie counts), bool [N].
    """
    nll, log_z, correct = _CrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
    return nll, log_z, correct


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        exponentials = logits.detach().float()
        highest = exponentials.amax(-1, keepdim=True)
        labelled = exponentials.gather(-1, labels[:, None])
        total = exponentials.sub_(highest).clamp_(min=_LEAST).exp_().sum(-1, keepdim=True)
        correct = labelled == highest
        ctx.save_for_backward(exponentials, total, labels)
        ctx.mark_non_differentiable(correct)
        ctx.dtype = logits.dtype
        log_total = total.log()
        return (log_total + (highest - labelled))[:, 0], (log_total + highest)[:, 0], correct[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_log_z: Tensor, _: Tensor) -> tuple[Tensor, None]:
        exponentials, total, labels = ctx.saved_tensors
        softmax = exponentials.mul_((grad + grad_log_z)[:, None] / total)  # by its factor in both
        gradient = softmax.scatter_add_(-1, labels[:, None], -grad[:, None])
        return gradient.to(ctx.dtype), None
