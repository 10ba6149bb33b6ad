"""The checks of `samestep doctor` on XLA's devices: products, attention, a sum over all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.findings import Finding, tried
from trainer.accelerators import DTYPES, Precision
from trainer.accelerators.kinds import xla
from trainer.inspect.doctor.measurements import REDUCE_BYTES, compared, exact, reduced
from trainer.strategies import Config
from trainer.strategies.kinds import xla_spmd
from trainer.strategies.xla import flash
from trainer.strategies.xla.split import register

_ATTENTION_ERROR = 0.02  # of numbers with 8 bits


def examine(
    config: xla.Config, strategy: Config | None, precision: Precision | None
) -> Iterator[Finding]:
    """Tries out the devices; all machines of a slice have to do so together.

    Args:
        config: the accelerator.
        strategy: the experiment's; None takes the default settings of `xla_spmd`.
        precision: the experiment's; None takes the fastest.
    """
    accelerator = config.build()
    trial = XlaTrial(accelerator)
    yield Finding("devices", "ok", accelerator.description)
    strategy = strategy or xla_spmd.Config()
    if not isinstance(strategy, xla_spmd.Config):
        yield Finding(
            "topology",
            "failed",
            f"{trial.topology}; the strategy is for other devices",
            "strategy=xla_spmd",
        )
    # Found here, before a slice of many machines has compiled anything.
    elif trial.devices % strategy.replicas:
        fix = f"use a divisor of {trial.devices}"
        yield Finding(
            "topology", "failed", f"strategy.replicas={strategy.replicas} on {trial.topology}", fix
        )
    else:
        mesh = f"{strategy.replicas} (replicate) x {trial.devices // strategy.replicas} (shard)"
        yield Finding("topology", "ok", f"{trial.topology}; mesh {mesh}")
    chosen: Precision = precision or ("bf16" if accelerator.peak_flops("bf16") else "fp32")
    peak = accelerator.peak_flops(chosen)
    yield from tried(
        "products", lambda: _products(trial, chosen, peak and peak / accelerator.devices)
    )
    if flash.usable(accelerator):
        yield from tried("attention", lambda: _attention(trial))
    # Large where there is a peak to compare with; on a CPU the sum is only checked.
    if trial.devices > 1:
        yield from tried(
            "all-reduce", lambda: _sum(trial, 4 * REDUCE_BYTES if peak else REDUCE_BYTES // 16)
        )


def _products(trial: XlaTrial, precision: Precision, peak: float | None) -> Iterator[Finding]:
    left, expected = exact().to(DTYPES[precision]), exact() @ exact().T
    if wrong := ", ".join(trial.wrong(left, left.T.contiguous(), expected)):
        yield Finding("products", "failed", f"wrong on {wrong}", "take this machine out of use")
        return
    speed = trial.product_speed(8192 if peak else 512, precision, 1.0 if peak else 0.2)
    found = f"right results, {speed / 1e12:.3g} TFLOP/s in {precision} on each device"
    yield compared("products", found, speed, peak, "compare with another machine of its kind")


def _attention(trial: XlaTrial) -> Iterator[Finding]:
    error = trial.attention_error(640, 64)
    found = f"by JAX's kernel, gradients included: within {error:.1%} of fp32 on the host"
    if error < _ATTENTION_ERROR:
        yield Finding("attention", "ok", found)
    else:
        yield Finding(
            "attention",
            "failed",
            found,
            "strategy.flash_attention_from=null does without the kernel",
        )


def _sum(trial: XlaTrial, size: int) -> Iterator[Finding]:
    right, speed = trial.sum_speed(size)
    yield reduced(f"{trial.devices} devices by XLA", right, speed)


class XlaTrial:
    """The devices of a slice in a row, each with a part of every tensor.

    All machines of the slice must do the same.

    Attributes:
        devices: of the whole slice.
        machines: that drive them.
    """

    def __init__(self, accelerator: xla.XlaAccelerator) -> None:
        import numpy as np
        import torch_xla.runtime
        from torch_xla.distributed.spmd import Mesh

        self._device = accelerator.device
        self.devices: int = torch_xla.runtime.global_runtime_device_count()
        self.machines: int = torch_xla.runtime.process_count()
        self._mesh = Mesh(np.arange(self.devices), (1, self.devices), ("replicate", "shard"))

    @property
    def topology(self) -> str:
        """How many machines and devices there are, and how chips are laid out."""
        import torch_xla.runtime

        machines, devices = ("" if number == 1 else "s" for number in (self.machines, self.devices))
        found = f"{self.machines} machine{machines}, {self.devices} device{devices}"
        places = [
            each.get("coords") for each in torch_xla.runtime.global_runtime_device_attributes()
        ]
        if not all(places):
            return found
        torus = " x ".join(str(max(along) - min(along) + 1) for along in zip(*places, strict=True))
        return f"{found}, chips in a torus of {torus}"

    def wrong(self, left: Tensor, right: Tensor, expected: Tensor) -> list[str]:
        """The devices of this machine that get another product.

        Args:
            left, right: CPU tensors whose product each device computes.
            expected: their product, from the host.
        """
        rows = self._on_each(left)
        products = self._computed(rows @ right.to(self._device), "shard")
        return [
            device
            for part, device in self._parts(products)
            if not torch.equal(part.to(expected.dtype), expected)
        ]

    def product_speed(self, size: int, precision: Precision, seconds: float) -> float:
        """FLOP/s of one device in products of square matrices, when all compute at the same time.

        Args:
            size: rows and columns.
            precision: of the matrices.
            seconds: how long to measure.
        """
        factor = torch.full((size, size), 1 / size, dtype=DTYPES[precision]).to(self._device)
        rows = self._computed(self._for_each(factor), "shard")
        chain = 8  # of products in each graph, so that starting it counts for little

        def run(times: int) -> float:
            nonlocal rows
            began = time.perf_counter()
            for _ in range(times):
                for _ in range(chain):
                    rows = rows @ factor
                rows = self._computed(rows, "shard")
            return time.perf_counter() - began

        run(1)  # compiles it
        times = max(1, round(seconds / run(1)))
        return times * chain * 2 * size**3 / run(times)

    def sum_speed(self, size: int) -> tuple[bool, float]:
        """Sums a tensor of fp32 over all devices.

        Args:
            size: its bytes.

        Returns:
            Whether the sum was right on all devices of this machine, and the bus bandwidth as
            nccl-tests define it.
        """
        # Device i has i + 1 in all elements, so the sum tells whether all took part.
        numbers = torch.arange(1, self.devices + 1, dtype=torch.float32).to(self._device)
        parts = self._computed(numbers.unsqueeze(1).expand(-1, size // 4) * 1, "shard")
        expected = self.devices * (self.devices + 1) / 2
        sums = self._parts(self._computed(parts.sum(0), None))
        began, repeats = time.perf_counter(), 5
        for _ in range(repeats):
            self._computed(parts.sum(0), None)
        seconds = (time.perf_counter() - began) / repeats
        right = all(bool((each == expected).all()) for each, _ in sums)
        return right, 2 * (self.devices - 1) / self.devices * size / seconds

    def attention_error(
        self, length: int, width: int, causal: bool = True, packed: bool = True
    ) -> float:
        """The error of the attention kernel and its gradients on this machine's devices.

        Args:
            length: of a sequence.
            width: of a head.
            causal: whether positions attend only to earlier ones.
            packed: whether there are three segments.

        Returns:
            The largest error relative to the largest value, in fp32 on the host.
        """
        generator = torch.Generator().manual_seed(0)
        shape = (1, 2, length, width)
        inputs = [torch.randn(shape, generator=generator).bfloat16() for _ in range(4)]
        segments = torch.zeros(1, length).int()
        if packed:
            segments = (torch.arange(length) * 3 // length)[None].int()
        mask = segments[:, None, :, None] == segments[:, None, None, :]

        def results(
            attention: Callable[..., Tensor], tensors: list[Tensor], **settings: object
        ) -> list[Tensor]:
            *qkv, gradient = (each.requires_grad_() for each in tensors)
            out = attention(*qkv, **settings)
            return [out, *torch.autograd.grad(out, qkv, gradient)]

        expected = results(
            F.scaled_dot_product_attention,
            [each.float() for each in inputs],
            attn_mask=mask.tril() if causal else mask,
        )
        found = results(
            flash.FlashAttention(register(self._mesh), shortest=1),
            [self._on_each(each) for each in inputs],
            attn_mask=self._on_each(segments) if packed else None,
            is_causal=causal,
        )
        return max(
            float((part - whole).abs().max() / whole.abs().max())
            for tensor, whole in zip(found, expected, strict=True)
            for part, _ in self._parts(self._computed(tensor.detach(), "shard"))
        )

    def _on_each(self, tensor: Tensor) -> Tensor:
        """The host's tensor on every device, as a row of its own."""
        return self._computed(self._for_each(tensor.to(self._device)), "shard")

    def _for_each(self, tensor: Tensor) -> Tensor:
        return tensor.expand(self.devices, *tensor.shape).reshape(-1, *tensor.shape[1:])

    def _computed(self, tensor: Tensor, rows: str | None) -> Tensor:
        """Has a tensor computed, its rows split over the devices, or (None) whole on each."""
        import torch_xla
        from torch_xla.core.xla_model import wait_device_ops
        from torch_xla.distributed.spmd import mark_sharding

        mark_sharding(tensor, self._mesh, (rows, *[None] * (tensor.ndim - 1)))
        # Marks the end of a graph, starts it, and waits: otherwise nothing is computed yet.
        torch_xla.sync()
        wait_device_ops()
        return tensor

    def _parts(self, tensor: Tensor) -> list[tuple[Tensor, str]]:
        """What each device of this machine holds of a tensor, on the CPU, and the device."""
        import torch_xla

        parts: list[tuple[Tensor, str]] = torch_xla._XLAC._get_local_shards([tensor])[0]
        return [(part, device) for part, device in parts]
