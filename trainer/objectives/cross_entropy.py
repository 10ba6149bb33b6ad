"""Cross-entropy in the memory of the logits, which over a vocabulary are the largest tensor of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def cross_entropy_(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Scores predictions in float32; the logits hold something else afterwards.

    On a CPU most of the time of `torch.nn.functional.cross_entropy` goes into the first touch of new memory. This takes
    none, and gives the gradient in the same place.

    Args:
        logits: [N, V]; overwritten unless they are of lower precision.
        labels: int64 [N], in [0, V).

    Returns:
        The cross-entropies, float32 [N], to be differentiated once, and whether each label has the highest score (a tie
        counts), bool [N].
    """
    nll, correct = _CrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
    return nll, correct


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        exponentials = logits.detach().float()
        highest = exponentials.amax(-1, keepdim=True)
        labelled = exponentials.gather(-1, labels[:, None])
        total = exponentials.sub_(highest).exp_().sum(-1, keepdim=True)
        correct = labelled == highest
        ctx.save_for_backward(exponentials, total, labels)
        ctx.mark_non_differentiable(correct)
        ctx.dtype = logits.dtype
        return (total.log() + (highest - labelled))[:, 0], correct[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        exponentials, total, labels = ctx.saved_tensors
        gradient = exponentials.mul_(grad[:, None] / total).scatter_add_(-1, labels[:, None], -grad[:, None])
        return gradient.to(ctx.dtype), None
