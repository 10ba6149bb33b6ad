"""Norms of whole tensors."""

from __future__ import annotations

import torch

from trainer.partition import whole_norms


def test_norms_are_exact_for_millions_of_elements() -> None:
    """They must not depend on how a tensor is split; adding up squares in fp32 gives 1e-4 here."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((8192, 768), (50_000,), (3, 5, 7), (0, 4))]
    tensors.append(torch.tensor(-2.0))
    exact = torch.stack([tensor.double().square().sum().sqrt() for tensor in tensors])
    torch.testing.assert_close(whole_norms(tensors), exact, rtol=1e-8, atol=0)
    assert abs(float(torch._foreach_norm(tensors[:1])[0]) / float(exact[0]) - 1) > 1e-5  # why there is this function
