"""Cross-entropy in the memory of the logits, the largest tensor of a step with a vocabulary.

`token_scores` computes it without the logits of all positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Softmax(NamedTuple):
    """Results of `exponentiate_` for N rows of logits, besides the exponentials.

    Attributes:
        total: of exponentials, float32 [N, 1].
        nll, log_z: cross-entropies and log(Z), float32 [N].
        correct: whether the label has the highest score, bool [N].
    """

    total: Tensor
    nll: Tensor
    log_z: Tensor
    correct: Tensor


def exponentiate_(logits: Tensor, labels: Tensor) -> Softmax:
    """Replaces float32 logits [N, V] by their exponentials, of which the highest of a row is 1."""
    highest = logits.amax(-1, keepdim=True)
    # Taken before the next line replaces the logits by exponentials.
    labeled = logits.gather(-1, labels[:, None])
    total = logits.sub_(highest).clamp_(min=_LEAST).exp_().sum(-1, keepdim=True)
    log_total = total.log()
    nll, log_z = log_total + (highest - labeled), log_total + highest
    return Softmax(total, nll[:, 0], log_z[:, 0], (labeled == highest)[:, 0])


def differentiate_(
    exponentials: Tensor, total: Tensor, labels: Tensor, grad: Tensor, grad_log_z: Tensor
) -> Tensor:
    """Replaces exponentials [N, V] by the gradient of the logits.

    Args:
        grad, grad_log_z: float32 [N], gradients of the cross-entropies and of log(Z).
    """
    # d nll / d logits = softmax - one_hot(label), and d log(Z) / d logits = softmax.
    softmax = exponentials.mul_((grad + grad_log_z)[:, None] / total)
    return softmax.scatter_add_(-1, labels[:, None], -grad[:, None])


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        exponentials = logits.detach().float()
        found = exponentiate_(exponentials, labels)
        ctx.save_for_backward(exponentials, found.total, labels)
        ctx.mark_non_differentiable(found.correct)
        ctx.dtype = logits.dtype
        return found.nll, found.log_z, found.correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_log_z: Tensor, _: Tensor) -> tuple[Tensor, None]:
        exponentials, total, labels = ctx.saved_tensors
        gradient = differentiate_(exponentials, total, labels, grad, grad_log_z)
        return gradient.to(ctx.dtype), None
