"""Fused attention beside the models' eager attention: `python -m tests.kernels.checks DEVICE`.

A program, because Triton reads TRITON_INTERPRET when it is imported. It prints one JSON object: the
results of each function of CHECKS, or the traceback of its failure. On "cpu" it needs
TRITON_INTERPRET=1 in the environment; on "cuda" a GPU.

The interpreter computes bf16 with numpy's integers, so bf16 is compared on GPUs only.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.accelerators.flash import attention, launch, supports
from trainer.accelerators.flash.ranges import FEW
from trainer.accelerators.flash.tiles import choose_plan
from trainer.models.families import modernbert
from trainer.models.layers.attention import segment_mask
from trainer.models.layers.dropout import attention_dropout, split_key
from trainer.models.layers.relative import RelativeBias
from trainer.models.layers.rotary import RotaryAttention

ON_GPU = sys.argv[1:] == ["cuda"]


@dataclass(frozen=True)
class Case:
    """One call. Lengths that are no multiples of a block (16, 32, 64, 128) have ragged tiles."""

    queries: int
    keys: int
    width: int = 32
    dtype: str = "float32"
    segments: bool = False
    causal: bool = False
    prefix: bool = False
    window: int | None = None
    bias: str | None = None
    dropout: float = 0.0
    version: int = 2
    scale: float | None = None

    @property
    def name(self) -> str:
        """The settings that differ from the defaults."""
        given = {k: v for k, v in asdict(self).items() if v != getattr(Case(1, 1), k)}
        return " ".join(k if v is True else f"{k}={v}" for k, v in given.items())


CASES = [
    Case(75, 75),
    Case(75, 75, segments=True),
    Case(75, 75, causal=True),
    Case(70, 70, causal=True, segments=True, prefix=True),
    Case(70, 70, window=5),
    Case(100, 100, window=20, segments=True, causal=True, bias="float32"),
    Case(40, 75),
    Case(75, 40, segments=True),
    Case(40, 75, bias="float32"),
    Case(75, 40, bias="float32", segments=True),
    Case(64, 64, bias="float32", causal=True, dropout=0.1),
    Case(75, 75, dropout=0.1, segments=True),
    Case(40, 75, dropout=0.5, bias="bfloat16"),
    Case(40, 75, dropout=0.1, version=1),
    Case(1, 40, bias="float32", segments=True),
    Case(33, 33, width=64, scale=0.25, dropout=0.1, bias="float32"),
    Case(33, 20, width=80, segments=True, bias="float32"),
    Case(20, 33, width=96, causal=True, dropout=0.1),
    Case(20, 20, width=128, segments=True, dropout=0.1),
    # Long enough for tiles without masks, which have a loop of their own.
    Case(33, 200),
    Case(170, 170, causal=True, dropout=0.1),
    Case(170, 170, window=110),
    Case(16, 96, width=80, dropout=0.1),
    Case(150, 150, dtype="float16", segments=True, dropout=0.1),
    Case(70, 140, dtype="float16", segments=True, bias="float16"),
    Case(140, 140, dtype="float16", causal=True, window=30, bias="float32", dropout=0.1),
]
if ON_GPU:
    CASES += [replace(case, dtype="bfloat16") for case in CASES]
BATCH, HEADS = 2, 2


def place_segments(length: int) -> Tensor:
    """Segments of a batch, int32 [B, length]: of three, and of two with padding after them."""
    place = torch.arange(length)
    first = place * 3 // length + 1
    second = torch.where(place > length * 4 // 5, 0, place * 2 // length + 1)
    return torch.stack([first, second]).int()


def errors(case: Case) -> dict[str, float]:
    """The largest error of the result and of each gradient, relative to the largest number."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    config = modernbert.Config(
        width=HEADS * case.width, heads=HEADS, attention_dropout=case.dropout
    )
    module = RotaryAttention(config, 10_000.0, case.window)
    module.scale, module.dropout_version = case.scale, case.version

    # Views of fused projections, as layers have them.
    inputs = {
        "query": torch.randn(BATCH, case.queries, HEADS * case.width).to(dtype),
        "key_value": torch.randn(BATCH, case.keys, 2 * HEADS * case.width).to(dtype),
    }
    if case.bias:
        numbers = torch.randn(HEADS, case.queries + case.keys - 1)
        inputs["bias"] = numbers.to(getattr(torch, case.bias))
    grad = torch.randn(BATCH, HEADS, case.queries, case.width).to(dtype)
    segments = place_segments(case.queries) if case.segments else None
    key_segments = place_segments(case.keys) if case.segments else None
    prefix = torch.rand(BATCH, case.keys) < 0.2 if case.prefix else None
    dropout_key = split_key(torch.arange(BATCH, dtype=torch.int32), 3)[2]

    def fused(query: Tensor, key_value: Tensor, bias: Tensor | None = None) -> Tensor:
        (q,) = module.split(query, 1)
        k, v = module.split(key_value, 2)
        assert supports(q, k, v)
        return attention(
            q,
            k,
            v,
            segments=segments,
            key_segments=key_segments,
            causal=case.causal,
            prefix=prefix,
            window=case.window,
            bias=bias,
            scale=case.scale,
            dropout=case.dropout,
            dropout_key=dropout_key,
            dropout_version=case.version,
        )

    def eager(query: Tensor, key_value: Tensor, bias: Tensor | None = None) -> Tensor:
        (q,) = module.split(query, 1)
        k, v = module.split(key_value, 2)
        place, key_place = torch.arange(case.queries)[:, None], torch.arange(case.keys)
        if segments is not None and case.queries == case.keys:
            mask = segment_mask(segments, case.causal, prefix)
        else:
            mask = torch.ones(BATCH, 1, case.queries, case.keys, dtype=torch.bool)
            if case.causal:
                mask = mask & (key_place <= place)
            if segments is not None and key_segments is not None:
                mask = mask & (segments[:, None, :, None] == key_segments[:, None, None, :])
        if module.window is not None:
            mask = mask & ((place - key_place).abs() <= module.window)
        if bias is not None:
            distance = key_place - place + case.queries - 1
            mask = torch.where(mask, bias.float()[:, distance], float("-inf"))
        return module._eager(q, k, v, mask, dropout_key)

    # The eager reference is in fp32 always: what is measured is the error of the kernels.
    found = differentiated(fused, inputs, grad)
    expected = differentiated(eager, {name: x.float() for name, x in inputs.items()}, grad.float())
    assert {x.dtype for name, x in found.items() if name != "bias"} == {dtype}
    return {name: relative(found[name], expected[name]) for name in expected}


def differentiated(
    function: Callable[..., Tensor], inputs: dict[str, Tensor], grad: Tensor
) -> dict[str, Tensor]:
    """The result of a function and the gradient of each input, by name."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    result = function(**leaves)
    gradients = torch.autograd.grad(result, tuple(leaves.values()), grad)
    return {"result": result.detach(), **dict(zip(leaves, gradients, strict=True))}


def relative(found: Tensor, expected: Tensor) -> float:
    error = (found.detach().float() - expected.detach()).abs().max()
    return float(error / expected.detach().abs().max())


def cases() -> dict[str, dict[str, float]]:
    return {case.name: errors(case) for case in CASES}


def relative_bias() -> dict[str, float]:
    """T5's bias: the gradient of the table of buckets, through the vector by distance."""
    torch.manual_seed(1)
    length, width = 150, 32
    module = RelativeBias(32, 128, HEADS, bidirectional=True)
    torch.nn.init.normal_(module.weight)
    shape = (BATCH, HEADS, length, width)
    q, k, v, grad = (torch.randn(shape) for _ in range(4))
    q *= width**-0.5  # T5 has that in its initial weights, and no scale
    segments = place_segments(length)

    distance = torch.arange(1 - length, length)
    by_distance = F.embedding(module._bucket(distance), module.weight).T
    fused = attention(q, k, v, segments=segments, bias=by_distance, scale=1.0)
    bias = module(length, length, segment_mask(segments))
    eager = (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v
    gradients = [torch.autograd.grad(each, module.weight, grad)[0] for each in (fused, eager)]
    return {"result": relative(fused, eager), "table": relative(*gradients)}


def dropout_masks() -> dict[str, bool]:
    """With values of the unit matrix, the result is the probabilities after dropout."""
    found = {}
    queries, keys = 50, 64
    for rate, version in ((0.1, 1), (0.1, 2), (0.5, 2)):
        dropout_key = split_key(torch.tensor([7, -(2**31)], dtype=torch.int32), 2)[1]
        shape = (BATCH, 3, queries, keys)
        query, key = torch.zeros(shape), torch.zeros(BATCH, 3, keys, keys)
        value = torch.eye(keys).expand_as(key)
        fused = attention(
            query, key, value, dropout=rate, dropout_key=dropout_key, dropout_version=version
        )
        eager = attention_dropout(torch.full(shape, 1 / keys), rate, dropout_key, version)
        found[f"keep {rate}, version {version}"] = bool((fused != 0).equal(eager != 0))
        found[f"scale {rate}, version {version}"] = bool(torch.allclose(fused, eager, rtol=1e-6))
    return found


def empty_rows() -> dict[str, bool]:
    """Queries of a segment without keys get zeros, and give none of the gradients a NaN."""
    torch.manual_seed(2)
    shape = (1, 1, 40, 32)
    leaves = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    bias = torch.randn(1, 79, requires_grad=True)
    segments = torch.ones(1, 40, dtype=torch.int32)
    segments[:, 30:] = 0
    key_segments = torch.ones_like(segments)
    result = attention(*leaves, segments=segments, key_segments=key_segments, bias=bias)
    gradients = torch.autograd.grad(result.sum(), [*leaves, bias])
    return {
        "zeros": not result[:, :, 30:].any() and not gradients[0][:, :, 30:].any(),
        "finite": all(bool(x.isfinite().all()) for x in (result, *gradients)),
    }


def deterministic() -> bool:
    """Two backward passes give the same bits."""
    torch.manual_seed(3)
    leaves = [torch.randn(2, 2, 70, 32, requires_grad=True) for _ in range(3)]
    leaves.append(torch.randn(2, 139, requires_grad=True))
    key = torch.arange(2, dtype=torch.int32)
    first, second = (
        torch.autograd.grad(
            attention(*leaves[:3], bias=leaves[3], dropout=0.1, dropout_key=key).square().sum(),
            leaves,
        )
        for _ in range(2)
    )
    return all(a.equal(b) for a, b in zip(first, second, strict=True))


def attend(segments: Tensor, key_segments: Tensor, **settings: Any) -> dict[str, Tensor]:
    """The result and the gradients of one head's attention to random keys."""
    torch.manual_seed(6)
    queries, keys = segments.shape[1], key_segments.shape[1]
    shapes = {"query": queries, "key": keys, "value": keys}
    inputs = {name: torch.randn(1, 1, n, 32) for name, n in shapes.items()}
    if settings.pop("bias", False):
        inputs["bias"] = torch.randn(1, queries + keys - 1)
    function = partial(
        attention,
        segments=segments,
        key_segments=key_segments,
        dropout=0.1,
        dropout_key=torch.tensor([5], dtype=torch.int32),
        **settings,
    )
    return differentiated(function, inputs, torch.randn(1, 1, queries, 32))


def skipping() -> dict[str, bool]:
    """Results and gradients have the bits that they have if no block is skipped."""
    packed = documents([50, 170, 20], 256)
    scattered = packed[:, torch.randperm(256, generator=torch.Generator().manual_seed(0))]
    calls: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
        "packed": (packed, packed, {}),
        "any order": (scattered[:, :96], scattered[:, :96], {}),
        "cross-attention": (packed[:, 40:90], packed, {"bias": True}),
        "window": (packed[:, 20:150], packed[:, 20:150], {"window": 40}),
        "causal": (packed[:, :150], packed[:, :150], {"causal": True, "bias": True}),
        "no key": (packed[:, :40] + 7, packed, {}),
    }
    ranges = launch.segment_ranges

    def whole(segments: Tensor, key_segments: Tensor, block: int) -> Tensor:
        found = ranges(segments, key_segments, block)
        assert found is not None
        found[..., 0], found[..., 1] = 0, key_segments.shape[1]
        return found

    def masked(segments: Tensor, key_segments: Tensor, block: int) -> Tensor:
        found = whole(segments, key_segments, block)
        found[..., 2:] = 0
        return found

    equal = {}
    for name, (segments, key_segments, settings) in calls.items():
        found = attend(segments, key_segments, **settings)
        with patch.object(launch, "segment_ranges", whole):
            expected = attend(segments, key_segments, **settings)
        equal[name] = all(found[key].equal(expected[key]) for key in expected)
    # 170 positions have tiles without masks. They come first, so sums are rounded otherwise.
    found = attend(packed, packed)
    with patch.object(launch, "segment_ranges", masked):
        expected = attend(packed, packed)
    equal["in the loop without masks"] = not found["result"].equal(expected["result"]) and all(
        relative(found[key], expected[key]) < (1e-5 if ON_GPU else 2e-6) for key in expected
    )
    return equal


def unread() -> dict[str, bool]:
    """NaN in a document reaches no other one, which masks alone would not prevent: 0 * NaN."""
    segments = documents([64, 128], 224)
    inputs = {name: torch.randn(1, 1, 224, 32) for name in ("query", "key", "value")}
    grad = torch.randn(1, 1, 224, 32)
    for x in (*inputs.values(), grad):
        x[:, :, 64:192] = float("nan")
    found = differentiated(partial(attention, segments=segments), inputs, grad)
    return {
        name: bool(x[:, :, :64].isfinite().all() and x[:, :, 192:].isfinite().all())
        for name, x in found.items()
    }


def documents(lengths: Iterable[int], total: int) -> Tensor:
    """Segments of documents in a row and of the padding after them, int32 [1, total]."""
    numbers = [n for n, length in enumerate(lengths, 1) for _ in range(length)][:total]
    return torch.tensor([numbers + [0] * (total - len(numbers))], dtype=torch.int32)


def visited() -> dict[str, float]:
    """Tiles that the kernels compute for packed rows, as a share of all."""
    plan = choose_plan(64, torch.bfloat16, "hopper")
    rows = {
        "8,192": (1, 8_192, (500, 2_001)),
        "512": (8, 512, (50, 401)),
        "one document": (1, 512, (512, 513)),
    }
    shares = {}
    for name, (batch, total, lengths) in rows.items():
        generator = torch.Generator().manual_seed(7)
        drawn = torch.randint(*lengths, (batch, 20), generator=generator).tolist()
        segments = torch.cat([documents(row, total) for row in drawn])
        for kernel, own, other in (
            ("forward", plan.forward.queries, plan.forward.keys),
            ("query gradient", plan.query_gradient.queries, plan.query_gradient.keys),
            ("key gradient", plan.key_gradient.keys, plan.key_gradient.queries),
        ):
            ranges = launch.segment_ranges(segments, segments, own)
            assert ranges is not None
            first, end, full_first, full_end = ranges.unbind(-1)
            tiles = -(-end // other) - first // other
            full = full_end // other + -full_first // other
            full = full.where(full >= FEW.value, 0)
            every = ranges[..., 0].numel() * total / other
            shares[f"{name}, {kernel}"] = float(tiles.sum()) / every
            shares[f"{name}, {kernel}, without masks"] = float(full.sum()) / every
    return shares


def operator() -> dict[str, str]:
    """PyTorch's own checks of the schema, the fake implementations and the gradient."""
    torch.manual_seed(4)
    query, key, value = (
        torch.randn(2, n, 2, 32).transpose(1, 2).requires_grad_() for n in (20, 33, 33)
    )
    bias = torch.randn(2, 52, requires_grad=True)
    segments, key_segments = place_segments(20), place_segments(33)
    dropout_key = torch.arange(2, dtype=torch.int32)
    masks = (segments, key_segments, None, bias, dropout_key)
    found: dict[str, str] = torch.library.opcheck(
        torch.ops.samestep.attention.default,
        (query, key, value, *masks, False, -1, 1.0, 0.1, 2),
    )
    return found


def compiled() -> dict[str, float]:
    """A compiled function that asks whether the kernel is there: one graph, the same numbers."""
    torch.manual_seed(5)
    inputs = {name: torch.randn(2, 2, 40, 32) for name in ("query", "key", "value")}
    segments = place_segments(40)

    def mix(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not supports(query, key, value):
            return query
        mixed = attention(query * 2, key, value, segments=segments, causal=True)
        return mixed.transpose(1, 2).flatten(2) + 1

    grad = torch.randn(2, 40, 64)
    found = differentiated(torch.compile(mix, backend="aot_eager", fullgraph=True), inputs, grad)
    expected = differentiated(mix, inputs, grad)
    return {name: relative(found[name], expected[name]) for name in expected}


CHECKS: list[Callable[[], object]] = [
    cases, relative_bias, dropout_masks, empty_rows, deterministic, skipping, unread,
    visited, operator, compiled,
]  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_device("cuda" if ON_GPU else "cpu")
    found = {}
    for check in CHECKS:
        try:
            found[check.__name__] = check()
        except Exception:
            found[check.__name__] = traceback.format_exc()
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
