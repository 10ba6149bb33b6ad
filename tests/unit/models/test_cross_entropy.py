import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.models.token_scores import cross_entropy_

LABELS = torch.arange(40) * 7 % 1000


def scored(logits: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropies, hits, and the gradient of a weighted sum for `logits`, a leaf."""
    nll, _, correct = cross_entropy_(
        logits * 1, LABELS
    )  # of a copy, as a leaf must not be overwritten
    (nll * weights).sum().backward()
    return nll, correct, logits.grad


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4])
def test_equals_torchs(scale: float):
    torch.manual_seed(0)
    logits, weights = torch.randn(40, 1000) * scale, torch.rand(40).round()
    logits[::3, LABELS[::3]] += scale * 5
    nll, correct, gradient = scored(logits.clone().requires_grad_(), weights)
    reference = logits.clone().requires_grad_()
    expected = F.cross_entropy(reference, LABELS, reduction="none")
    (expected * weights).sum().backward()
    torch.testing.assert_close(nll, expected)
    torch.testing.assert_close(gradient, reference.grad, rtol=1e-5, atol=1e-7)
    if scale:
        assert torch.equal(correct, logits.argmax(-1) == LABELS)


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_log_z_and_its_share_of_the_gradient_equal_torchs(scale: float):
    torch.manual_seed(0)
    logits, weights = torch.randn(40, 1000) * scale, torch.rand(40)
    ours, reference = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    nll, log_z, _ = cross_entropy_(ours * 1, LABELS)
    (nll * weights + 1e-2 * log_z.square()).sum().backward()
    expected = reference.logsumexp(-1)
    (
        F.cross_entropy(reference, LABELS, reduction="none") * weights + 1e-2 * expected.square()
    ).sum().backward()
    torch.testing.assert_close(log_z, expected)
    torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-5, atol=1e-7)


def test_no_gradient_is_a_denormal_number():
    """With logits too far apart for exponentials in float32, and the factor of a large batch."""
    torch.manual_seed(0)
    logits = torch.randn(40, 1000) * 30
    nll, _, gradient = scored(logits.clone().requires_grad_(), torch.full((40,), 1e-5))
    assert not ((gradient != 0) & (gradient.abs() < torch.finfo(torch.float32).tiny)).any()
    expected = F.cross_entropy(logits.double(), LABELS, reduction="none")
    torch.testing.assert_close(nll.double(), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_lower_precision_are_scored_in_float32(dtype: torch.dtype):
    logits = (torch.randn(40, 1000) * 4).to(dtype)
    weights = torch.ones(40)
    nll, _, gradient = scored(logits.clone().requires_grad_(), weights)
    exact, _, exact_gradient = scored(logits.float().requires_grad_(), weights)
    assert nll.dtype == torch.float32
    assert torch.equal(nll, exact)
    assert torch.equal(gradient, exact_gradient.to(dtype))


def test_the_gradient_lies_where_the_logits_were():
    logits = torch.randn(40, 1000, requires_grad=True) * 1
    places: list[int] = []
    logits.register_hook(lambda gradient: places.append(gradient.data_ptr()))
    cross_entropy_(logits, LABELS)[0].sum().backward()
    assert places == [logits.data_ptr()]


def test_is_differentiated_once():
    nll, _, _ = cross_entropy_(torch.randn(40, 1000, requires_grad=True) * 1, LABELS)
    nll.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        nll.sum().backward()
