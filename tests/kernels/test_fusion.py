"""torch.compile fuses dropout, residual sum and norm: one kernel between two matrix products.

The kernels are those that its scheduler makes for a GPU; see `lowering`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.kernels.lowering import Kernel, Lowering
from trainer.models.base import TransformerModel
from trainer.models.families import bert, modernbert, t5
from trainer.models.layers.dropout import split_key
from trainer.models.stack import Context

ROWS, LENGTH, WIDTH, HEADS = 8, 64, 128, 4
SHAPE: dict[str, Any] = {"vocab_size": 64, "width": WIDTH, "heads": HEADS, "ffn_width": 256}
DROPOUT: dict[str, Any] = {"dropout": 0.1, "attention_dropout": 0.1}
CONFIGS = {
    "bert": bert.Config(**SHAPE, **DROPOUT, layers=1, max_positions=LENGTH),
    "bert of pre-norm": bert.Config(**SHAPE, **DROPOUT, layers=1, max_positions=LENGTH, norm="pre"),
    "t5": t5.Config(**SHAPE, **DROPOUT, layers=1, head_width=32),
    "modernbert": modernbert.Config(**SHAPE, **DROPOUT, layers=2, max_positions=LENGTH),
}
NORM = {"var_mean", "rsqrt"}
DROP = {"bitwise_xor"}  # of the hash
# Casts of weights, and heads laid out for attention's products (with the scale of queries).
COPIES = {"prims", "view", "permute", "clone", "split", "unsqueeze", "mul"}


@cache
def lowered(name: str, residual: torch.dtype | None = None) -> Lowering:
    """The kernels of a model's last layer, with a mask, in training under bf16."""
    torch._dynamo.reset()
    config = CONFIGS[name]
    model = config.build()
    assert isinstance(model, TransformerModel)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            values = model.initial_values(parameter_name, 0, parameter.numel(), seed=0)
            parameter.copy_(values.view_as(parameter))
    model.residual_dtype = residual
    layer = next(iter(model.stacks().values()))[-1]
    keys = split_key(torch.arange(ROWS, dtype=torch.int32), len(config.dropout_sites))
    positions = {"positions": torch.arange(LENGTH).expand(ROWS, -1)}
    context = Context(
        sites=config.dropout_sites, keys=keys, columns=positions if config.reads_positions else {}
    )
    bias = torch.zeros(1, HEADS, LENGTH, LENGTH, requires_grad=True) if name == "t5" else None
    hidden = torch.randn(ROWS, LENGTH, WIDTH, dtype=residual or torch.float32, requires_grad=True)
    found = Lowering()
    compiled = torch.compile(layer, backend=found, dynamic=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(hidden, None, bias, context)
    out.float().square().mean().backward()
    return found


def between_products(kernels: list[Kernel]) -> list[list[Kernel]]:
    """Kernels before, between and after matrix products, without those that only copy or cast."""
    groups: list[list[Kernel]] = [[]]
    for kernel in kernels:
        if kernel.library:
            groups.append([])
        elif kernel.operations - COPIES:
            groups[-1].append(kernel)
    return groups


@pytest.mark.parametrize("name", CONFIGS)
def test_dropout_sum_and_norm_are_one_kernel(name: str) -> None:
    kernels = [each for each in lowered(name).forward if not each.library]
    drops = [each for each in kernels if each.operations & DROP]
    norms = [each for each in kernels if each.operations & NORM]
    # One kernel for each place of dropout: none computes masks alone, none is computed twice.
    sites = CONFIGS[name].dropout_sites
    assert len(drops) == len([site for site in sites if not site.startswith("cross")])
    assert len(norms) == 2
    # The norm of a layer's input has no dropout before it in this graph; all others do.
    first = 0 if CONFIGS[name].norm == "post" else 1
    for norm in norms[first:]:
        assert norm.operations >= DROP | {"add"}
    # Softmax and its dropout; the activation; dropout, sum and norm.
    most = 2 if name == "modernbert" else 1  # its window is a mask, computed beside
    assert all(len(group) <= most for group in between_products(lowered(name).forward))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bf16_stream_moves_fewer_bytes(name: str) -> None:
    def moved(kernels: list[Kernel], operations: set[str]) -> int:
        return sum(e.moved for e in kernels if not e.library and e.operations & operations)

    wide, narrow = lowered(name), lowered(name, torch.bfloat16)
    assert moved(narrow.forward, NORM) < 0.85 * moved(wide.forward, NORM)
    assert len(narrow.forward) <= len(wide.forward)
