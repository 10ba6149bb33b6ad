"""Checks of each device alone: kernels against fp64, passes against the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.findings import Finding
from trainer.accelerators import DTYPES, Accelerator, Precision
from trainer.inspect.certify import problem
from trainer.inspect.certify.ranks import Ranks, first_odd
from trainer.models.inputs import Inputs
from trainer.partition.digest import digests
from trainer.strategies import Replica

_REPEATS = 3
_FIX = "take this device out of use"
_TOLERANCES: Mapping[Precision, float] = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 5e-3}
"""Of a kernel's largest error, as a share of its largest result."""

_KERNELS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "matrix product": lambda x: x @ x.T,
    "batched matrix product": lambda x: torch.bmm(x.view(4, -1, 64), x.view(4, -1, 64).mT),
    "softmax": lambda x: F.softmax(x, -1),
    "log softmax": lambda x: F.log_softmax(x, -1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "GELU": F.gelu,
    "attention": lambda x: _attention(x.view(2, 4, -1, 64)),
    "sum": lambda x: x.sum(0),
}


def _attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def products(accelerator: Accelerator, ranks: Ranks, precision: Precision) -> Iterator[Finding]:
    """Checks a large matrix product of small integers, which no precision rounds.

    The check of Freivalds 1977: if C = A B, then C v = A (B v) for any vector v, and that takes
    two products with a vector. It is computed in fp64 on the host.
    """
    size = 4096 if accelerator.peak_flops(precision) else 512
    generator = torch.Generator().manual_seed(problem.SEED)
    # At most 256 ones in a row of A: sums stay below 2^8, which bf16 holds exactly.
    left = torch.zeros(size, size)
    left[:, :256] = torch.randint(-1, 2, (size, 256), generator=generator).float()
    right = torch.randint(0, 2, (size, size), generator=generator).float()
    vector = torch.randint(1, 2**20, (size,), generator=generator).double()
    expected = left.double() @ (right.double() @ vector)
    device, dtype = accelerator.device, DTYPES[precision]
    wrong = ""
    for _ in range(_REPEATS):
        product = left.to(device, dtype) @ right.to(device, dtype)
        rows = (product.double().cpu() @ vector != expected).nonzero().flatten().tolist()
        if rows:
            wrong = f"{len(rows)} of {size} rows are wrong, the first is row {rows[0]}"
            break
    yield ranks.verdict(f"{precision} product", wrong, f"{size} x {size}, exact", _FIX)


def against_fp64(accelerator: Accelerator, ranks: Ranks, precision: Precision) -> Iterator[Finding]:
    """Compares kernels with the same in fp64 on the host."""
    generator = torch.Generator().manual_seed(problem.SEED)
    rounded = torch.randn(256, 128, generator=generator).to(DTYPES[precision])
    worst, wrong = 0.0, ""
    for name, kernel in _KERNELS.items():
        expected = kernel(rounded.double())
        found = kernel(rounded.to(accelerator.device)).double().cpu()
        error = float((found - expected).abs().max() / expected.abs().max())
        worst = max(worst, error)
        if not error <= _TOLERANCES[precision] and not wrong:
            wrong = f"{name} has an error of {error:.1e} of its largest result"
    yield ranks.verdict(f"{precision} kernels", wrong, f"largest error {worst:.1e}", _FIX)


def passes(accelerator: Accelerator, ranks: Ranks, precision: Precision) -> Iterator[Finding]:
    """Computes the passes of one unit on each rank, without communication, and compares bits."""
    own = [_passes(accelerator, precision) for _ in range(_REPEATS)]
    changed = [name for name in own[0] if len({each[name] for each in own}) > 1]
    wrong = f"{changed[0]} has other bits when it is computed again" if changed else ""
    subject = f"{precision} passes"
    equal = f"{len(own[0])} tensors have the same bits on every rank"
    repeated = ranks.verdict(subject, wrong, equal, _FIX)
    odd = first_odd(ranks.gather(own[0]))
    if repeated.state == "failed" or odd is None:
        yield repeated
        return
    name, blamed = odd
    others = "the others" if len(blamed) < len(ranks.nodes) else "each other"
    yield Finding(
        subject,
        "failed",
        f"{ranks.named(blamed)}: {name} differs from {others}, with the same inputs",
        "compare their GPUs, drivers and torch; if they are equal, take the device out of use",
    )


def _passes(accelerator: Accelerator, precision: Precision) -> dict[str, str]:
    """Digests of hidden states and of gradients, in the order in which they are computed."""
    config, objective = problem.model_config(), problem.objective()
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device=accelerator.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = model.initial_values(name, 0, parameter.numel(), problem.SEED)
            parameter.copy_(values.view_as(parameter))
    batch = accelerator.to_device(problem.units(1, Replica(0, 1))[0])
    totals = {objective.denominator: batch["weights"].sum()}
    states = [f"layer.{index}" for index in range(config.layers + 1)]
    with accelerator.autocast(precision):
        with torch.no_grad():
            outputs = model(Inputs.of(batch), frozenset(states))
        loss = objective.loss(model, batch, totals).total
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {
        f"gradient of {name}": parameter.grad
        for name, parameter in reversed(list(model.named_parameters()))
        if parameter.grad is not None
    }
    hidden = {f"output of {name}": outputs[name] for name in states}
    return digests({**hidden, "loss": loss.detach(), **gradients})
