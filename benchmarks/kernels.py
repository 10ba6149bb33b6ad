"""The fused attention kernel beside PyTorch's and beside eager attention, forward and backward.

    python -m benchmarks.kernels

Needs a GPU. The shapes are those of a layer of BERT-base and BERT-large at 128 and 512, of RoBERTa
with four sequences packed in a row of 512, and of T5-base with sources of 512 and targets of 114,
in bf16. Times are the GPU's, without the launches, averages of repeated calls, of:

- kernel: `trainer.accelerators.flash.operator`, without and with attention dropout 0.1;
- SDPA: `scaled_dot_product_attention` with a mask where the model needs one, without and with
  dropout, whose masks are not reproducible elsewhere;
- eager: `Attention._eager` of the models, with dropout.

TFLOP/s counts two products forward and five backward for each score, masked ones included.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from trainer.accelerators.flash import attention, supports
from trainer.models.families import bert
from trainer.models.layers.attention import Attention, segment_mask
from trainer.models.layers.dropout import split_key

DROPOUT = 0.1
WIDTH = 64


@dataclass(frozen=True)
class Shape:
    """Attention of one layer.

    Attributes:
        packed: number of sequences in a row.
        bias: whether there is a relative bias, which is trained.
    """

    name: str
    batch: int
    heads: int
    queries: int
    keys: int
    packed: int = 1
    causal: bool = False
    bias: bool = False


SHAPES = [
    Shape("BERT-base 128", 256, 12, 128, 128),
    Shape("BERT-base 512", 64, 12, 512, 512),
    Shape("BERT-large 128", 128, 16, 128, 128),
    Shape("BERT-large 512", 32, 16, 512, 512),
    Shape("RoBERTa-base 512, packed", 64, 12, 512, 512, packed=4),
    Shape("T5-base encoder 512", 48, 12, 512, 512, packed=2, bias=True),
    Shape("T5-base decoder 114", 48, 12, 114, 114, packed=2, causal=True, bias=True),
    Shape("T5-base cross 114 x 512", 48, 12, 114, 512, packed=2),
]


def segments(shape: Shape, length: int, device: torch.device) -> Tensor | None:
    """Segments of equal length, int32 [B, length]; None if a row is one sequence."""
    if shape.packed == 1:
        return None
    place = torch.arange(length, device=device, dtype=torch.int32)
    return (place * shape.packed // length + 1).expand(shape.batch, -1).contiguous()


def build(shape: Shape, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """The contenders, each of which computes attention of the same inputs."""
    torch.manual_seed(0)

    def random(length: int) -> Tensor:
        size = (shape.batch, length, shape.heads, WIDTH)
        x = torch.randn(size, device=device, dtype=torch.bfloat16)
        return x.transpose(1, 2).requires_grad_()

    query, key, value = random(shape.queries), random(shape.keys), random(shape.keys)
    own, others = (segments(shape, n, device) for n in (shape.queries, shape.keys))
    distances = shape.queries + shape.keys - 1
    bias = None
    if shape.bias:
        bias = torch.randn(shape.heads, distances, device=device).bfloat16().requires_grad_()
    dropout_key = split_key(torch.arange(shape.batch, dtype=torch.int32, device=device), 1)[0]
    module = Attention(
        bert.Config(width=shape.heads * WIDTH, heads=shape.heads, attention_dropout=DROPOUT)
    )

    def mask() -> Tensor | None:
        """As the models build it, once for all layers; it is not part of what is timed."""
        if own is None or others is None:
            return None
        if shape.queries == shape.keys:
            allowed = segment_mask(own, shape.causal)
        else:
            allowed = own[:, None, :, None] == others[:, None, None, :]
        if bias is None:
            return allowed
        place = torch.arange(shape.keys, device=device)
        distance = place - place[: shape.queries, None] + shape.queries - 1
        return torch.where(allowed, bias[:, distance], float("-inf")).detach().requires_grad_()

    allowed = mask()
    fused = partial(
        attention,
        query,
        key,
        value,
        segments=own,
        key_segments=others,
        causal=shape.causal,
        bias=bias,
    )
    assert supports(query, key, value)
    return {
        "kernel": fused,
        "kernel, dropout": partial(fused, dropout=DROPOUT, dropout_key=dropout_key),
        "SDPA": (sdpa := partial(F.scaled_dot_product_attention, query, key, value, allowed)),
        "SDPA, dropout": partial(sdpa, dropout_p=DROPOUT),
        "eager, dropout": partial(module._eager, query, key, value, allowed, dropout_key),
    }


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """What the kernels of a call take on the GPU, after three calls that compile and warm up.

    The time of the host, which launches them, does not count: in training it is ahead of the GPU.
    """
    for _ in range(3):
        work()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    microseconds = sum(event.self_device_time_total for event in profiler.key_averages())
    return float(microseconds) / repeats / 1e3


def differentiate(result: Tensor, grad: Tensor) -> None:
    torch.autograd.backward(result, grad, retain_graph=True)


def measure(shape: Shape, device: torch.device, repeats: int) -> list[list[str]]:
    """A row of the table for each contender."""
    rows = []
    flops = 2 * shape.batch * shape.heads * shape.queries * shape.keys * WIDTH
    for name, work in build(shape, device).items():
        forward = milliseconds(work, repeats)
        result = work()
        both = forward + milliseconds(
            partial(differentiate, result, torch.randn_like(result)), repeats
        )
        teraflops = 7 * flops / both / 1e9
        rows.append([shape.name, name, f"{forward:.3f}", f"{both:.3f}", f"{teraflops:.0f}"])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=50)
    repeats = parser.parse_args(argv).repeats
    if not torch.cuda.is_available():
        print("benchmarks.kernels measures on a GPU, and torch finds none here.")
        return 1
    device = torch.device("cuda")
    table = Table(title=torch.cuda.get_device_name(device))
    for column in ("attention", "by", "forward, ms", "with backward, ms", "TFLOP/s"):
        table.add_column(column)
    for shape in SHAPES:
        for row in measure(shape, device, repeats):
            table.add_row(*row)
        table.add_section()
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
