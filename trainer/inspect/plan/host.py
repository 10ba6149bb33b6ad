"""The rates of this machine's CPU, measured in a second or two.

In CPU time of this process, divided by its threads, because other programs disturb that less than
wall time. Tensors of a few MiB are in the cache; 64 MiB are not, and the C library asks
the operating system for new memory for each of these, which it has to clear page by page. That
takes longer than the arithmetic.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trainer.accelerators import DTYPES, Precision
from trainer.inspect.plan.fusion import Implementation, Kernel

_CACHED, _STREAMED = 2**20, 2**24  # elements: 4 and 64 MiB
_CACHE = 16 * 2**20  # bytes of a kernel that stay in the cache
_FRESH = 32 * 2**20  # glibc's largest DEFAULT_MMAP_THRESHOLD_MAX: larger tensors get new memory
_aten = torch.ops.aten


@dataclass(frozen=True)
class HostRates:
    """Measured rates of the CPU.

    Attributes:
        products, batched: FLOP/s of large products, and of many small ones as in attention.
        cached, streamed: bytes per second of simple operators, in the cache and beyond.
        fresh: bytes per second of new memory that is written the first time.
        elements: elements per second of operators that compute more than they read.
        dispatch: seconds of the smallest operator.
        enqueue: 0, because the host is the device.
    """

    products: float
    batched: float
    cached: float
    streamed: float
    fresh: float
    elements: Mapping[str, float]
    dispatch: float
    name: str = "CPU"
    enqueue: float = 0.0

    def peak(self, precision: Precision) -> float:
        """The measured rate: there is no data sheet."""
        return self.products

    def seconds(self, kernel: Kernel, precision: Precision, how: Implementation) -> float:
        """Time of a kernel, dispatch included."""
        name = kernel.operators[0]
        rate = self.batched if kernel.kind == "attention" else self.products
        arithmetic = kernel.flops / rate
        slow = self.elements.get(name.removesuffix("_"))
        if slow is not None:
            arithmetic = kernel.largest / 4 / slow
        in_cache = kernel.nbytes < _CACHE
        traffic = kernel.nbytes / (self.cached if in_cache else self.streamed)
        is_new = kernel.largest >= _FRESH and not name.endswith("_")
        fresh = kernel.largest / self.fresh if is_new else 0.0
        return max(arithmetic, traffic) + fresh + self.dispatch * kernel.launches


def measure(precision: Precision = "fp32") -> HostRates:
    """Measures the CPU with torch's current number of threads."""
    dtype = DTYPES[precision]
    left, right = torch.randn(1024, 512, dtype=dtype), torch.randn(512, 1024, dtype=dtype)
    many = torch.randn(64, 128, 64, dtype=dtype)
    scores = torch.randn(64, 128, 128, dtype=dtype)
    x, y = torch.randn(_CACHED), torch.randn(_CACHED)
    large, other = torch.randn(_STREAMED), torch.randn(_STREAMED)
    in_place = 12 * _STREAMED / _seconds(lambda: large.add_(other))
    new = _seconds(lambda: large + other)
    rows, weight = x.view(-1, 256), torch.ones(256)
    grad = y.view(-1, 256)
    _, mean, spread = _aten.native_layer_norm(rows, [256], weight, weight, 1e-5)
    soft = rows.softmax(-1)
    mask = x > 1
    slow: dict[str, Callable[[], object]] = {
        "gelu": lambda: F.gelu(x),
        "gelu_backward": lambda: _aten.gelu_backward(y, x),
        "tanh": lambda: x.tanh(),
        "exp": lambda: x.exp(),
        "_softmax": lambda: rows.softmax(-1),
        "_softmax_backward_data": lambda: _aten._softmax_backward_data(grad, soft, -1, x.dtype),
        "native_layer_norm": lambda: F.layer_norm(rows, (256,), weight, weight),
        "native_layer_norm_backward": lambda: _aten.native_layer_norm_backward(
            grad, rows, [256], mean, spread, weight, weight, [True, True, True]
        ),
        "masked_fill": lambda: x.masked_fill(mask, 0.0),
    }
    return HostRates(
        products=2 * 1024 * 512 * 1024 / _seconds(lambda: left @ right),
        batched=2 * 2 * 64 * 128**2 * 64 / _seconds(lambda: (many @ many.mT, scores @ many)),
        cached=12 * _CACHED / _seconds(lambda: x + y),
        streamed=in_place,
        fresh=4 * _STREAMED / max(new - 12 * _STREAMED / in_place, 1e-9),
        elements={name: _CACHED / _seconds(work) for name, work in slow.items()},
        dispatch=_seconds(lambda: weight + weight),
    )


def _seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """Median CPU time of a thread for some work, which is repeated for at least 2 ms a round."""
    threads, times = torch.get_num_threads(), []
    work()
    began, count = time.process_time(), 0
    while time.process_time() - began < 2e-3:
        work()
        count += 1
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(count):
            work()
        times.append((time.process_time() - began) / count / threads)
    return statistics.median(times)
