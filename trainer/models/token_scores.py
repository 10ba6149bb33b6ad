"""Scores of predicted tokens, with the logits of a chunk of positions at a time.

Logits [N, V] are the largest tensor of a step: 1 GB in float32 for 8,192 positions and BERT's
vocabulary. Here the last matrix product and the cross-entropy are one operation, which computes
logits chunk by chunk in one buffer. The gradients of hidden states and weights are computed in the
forward pass, while a chunk's softmax is there, so no product is computed twice (Hsu et al. 2024,
"Liger Kernel"; for a fused kernel that recomputes logits instead, see Wijmans et al. 2024, "Cut
Your Losses in Large-Vocabulary Language Models").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.accelerators.kernels import (
    autocast_dtype,
    computes_in_chunks,
    indexes_fast,
    numbers,
    without_autocast,
)

CHUNK_BYTES = 2**29
"""The most float32 logits that are computed at once: of 4,397 positions with 30,522 tokens.

Large, because every chunk adds to the gradient of the whole output matrix. The same on all devices,
so that losses have the same bits.
"""

# Exponentials below e^-64 add nothing to a sum of at least 1 in float32. At e^-64, their gradients
# are still normal numbers; CPUs take 15 times as long with denormal ones.
# (torch.set_flush_denormal does not reach the exponentials of MKL.)
_LEAST = -64.0


class TokenScore(NamedTuple):
    """Weighted sums over the predictions of a micro-batch: scalars in float32.

    Attributes:
        loss: the cross-entropies plus the z-loss; the only one with a gradient, which can be
            computed once.
        nll: of cross-entropies.
        correct: of predictions whose label has the highest score (ties count).
        weight: of weights: the number of predictions that count.
        log_z_squared: of log(Z)^2, Z the softmax's denominator.
    """

    loss: Tensor
    nll: Tensor
    correct: Tensor
    weight: Tensor
    log_z_squared: Tensor

    @classmethod
    def unpack(cls, sums: Tensor) -> TokenScore:
        """Restores the scores that `score_hidden` returned as one tensor."""
        return cls(sums[0], *sums[1:].detach().unbind())


@dataclass(frozen=True)
class Target:
    """The tokens that an output should predict.

    Attributes:
        labels: int64 [B, P], in [0, V).
        weights: float32 [B, P], of the predictions.
        z_loss: coefficient of log(Z)^2 in the loss.
    """

    labels: Tensor
    weights: Tensor
    z_loss: float = 0.0

    def chunks(self, vocabulary: int) -> int:
        """Number of chunks for the logits of a vocabulary; 1 is all logits at once."""
        if not computes_in_chunks(self.labels):
            return 1
        positions = max(1, CHUNK_BYTES // (4 * vocabulary))
        return max(1, -(-self.labels.numel() // positions))

    def sum(self, nll: Tensor, log_z: Tensor, correct: Tensor) -> TokenScore:
        """Sums the values of all predictions, [B * P] each."""
        weights = self.weights.flatten()
        loss, penalty = (nll * weights).sum(), (log_z.square() * weights).sum()
        total = loss + self.z_loss * penalty if self.z_loss else loss
        right = (correct * weights).sum()
        return TokenScore(total, loss.detach(), right, weights.sum(), penalty.detach())


def score_logits(logits: Tensor, target: Target) -> TokenScore:
    """Compares logits [B, P, V] with a target; may overwrite the logits."""
    return target.sum(*cross_entropy_(logits.flatten(0, 1), target.labels.flatten()))


def score_hidden(hidden: Tensor, matrix: Tensor, bias: Tensor | None, target: Target) -> Tensor:
    """Computes logits in chunks, and compares them with a target.

    Args:
        hidden: [B, P, E].
        matrix: [V, E].
        bias: [V].

    Returns:
        float32 [5], for `TokenScore.unpack`.
    """
    sums: Tensor = _ChunkedScores.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 1), matrix, bias, target, torch.is_grad_enabled()
    )
    return sums


class _ChunkedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        target: Target,
        is_differentiated: bool,
    ) -> Tensor:
        needs = ctx.needs_input_grad[:3] if is_differentiated else (False, False, False)
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden, matrix, bias)]
        dtype = autocast_dtype(hidden.device) or hidden.dtype
        # Explicit casts: autocast would cache one made here, which has no gradient, and use it for
        # another product with the same matrix.
        with without_autocast(hidden.device):
            bias = None if bias is None else bias.to(dtype)
            score, gradients = _score(hidden.to(dtype), matrix.to(dtype), bias, target, needs)
        ctx.save_for_backward(*gradients)
        return torch.stack(score)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # `_score` differentiated the loss; all that is missing is the factor of the loss.
        scaled = [
            None if each is None else each.float().mul_(grad[0]).to(dtype)
            for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None


def _score(
    hidden: Tensor, matrix: Tensor, bias: Tensor | None, target: Target, needs: Sequence[bool]
) -> tuple[TokenScore, list[Tensor | None]]:
    """Scores hidden states [N, E], chunk by chunk.

    Args:
        needs: whether hidden states, matrix and bias need a gradient.

    Returns:
        The scores, and the gradients of `TokenScore.loss`; of parameters in float32, as they are
        sums over chunks.
    """
    of_hidden = torch.empty_like(hidden) if needs[0] else None
    of_matrix = torch.zeros_like(matrix, dtype=torch.float32) if needs[1] else None
    of_bias = matrix.new_zeros(len(matrix), dtype=torch.float32) if needs[2] else None

    # Chunks of equal size: 5,000 positions are two of 2,500, not 4,397 and 603.
    size = -(-len(hidden) // target.chunks(len(matrix)))
    buffer = hidden.new_empty(size, len(matrix))
    buffer_fp32 = buffer if buffer.dtype == torch.float32 else buffer.float()
    columns = (hidden, target.labels.flatten(), target.weights.flatten())
    chunks = zip(*(torch.split(column, size) for column in columns), strict=True)
    found = []
    for number, (part, labels, weights) in enumerate(chunks):
        logits, exponentials = buffer[: len(part)], buffer_fp32[: len(part)]
        if bias is None:
            torch.mm(part, matrix.t(), out=logits)
        else:
            torch.addmm(bias, part, matrix.t(), out=logits)
        exponentials.copy_(logits)  # does nothing in fp32, where both are the same memory
        softmax = exponentiate_(exponentials, labels)
        found.append((softmax.nll, softmax.log_z, softmax.correct))
        if not any(needs):
            continue

        of_log_z = 2 * target.z_loss * softmax.log_z * weights
        differentiate_(exponentials, softmax.total, labels, weights, of_log_z)
        if of_bias is not None:
            of_bias += exponentials.sum(0)
        logits.copy_(exponentials)  # their gradient, in the precision of the products
        if of_hidden is not None:
            torch.mm(logits, matrix, out=of_hidden[number * size : number * size + len(part)])
        if of_matrix is not None and logits.dtype != torch.bfloat16:
            # In fp32 for fp16, too: its largest number is 65,504, and this is a sum over positions
            # before the loss is scaled.
            of_matrix.addmm_(logits.t().float(), part.float())
        elif of_matrix is not None:
            of_matrix += logits.t() @ part
    nll, log_z, correct = (torch.cat(values) for values in zip(*found, strict=True))
    return target.sum(nll, log_z, correct), [of_hidden, of_matrix, of_bias]


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
    if indexes_fast(logits.device):
        labeled = logits.gather(-1, labels[:, None])
    else:
        # Logits 3 1 2 with the label 2: 0 + 0 + 2.
        labeled = torch.where(_is_label(logits, labels), logits, 0).sum(-1, keepdim=True)
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
    if indexes_fast(softmax.device):
        return softmax.scatter_add_(-1, labels[:, None], -grad[:, None])
    return softmax.sub_(torch.where(_is_label(softmax, labels), grad[:, None], 0))


def _is_label(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether an element of [N, V] is the label's: bool [N, V]."""
    return labels[:, None] == numbers(logits.shape[-1], logits.device)


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
