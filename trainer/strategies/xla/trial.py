"""What `samestep doctor` tries out on the devices of XLA.

Their products, and a sum over all devices of the slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.accelerators import DTYPES, Precision
from trainer.accelerators.kinds.xla import XlaAccelerator
from trainer.strategies.xla.flash import FlashAttention
from trainer.strategies.xla.split import register


class XlaTrial:
    """The devices of a slice in a row, each with a part of every tensor.

    All machines of the slice must do the same.

    Attributes:
        devices: of the whole slice.
        machines: that drive them.
    """

    def __init__(self, accelerator: XlaAccelerator) -> None:
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
            FlashAttention(register(self._mesh), shortest=1),
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
        torch_xla.sync()
        wait_device_ops()
        return tensor

    def _parts(self, tensor: Tensor) -> list[tuple[Tensor, str]]:
        """What each device of this machine holds of a tensor, on the CPU, and the device."""
        import torch_xla

        parts: list[tuple[Tensor, str]] = torch_xla._XLAC._get_local_shards([tensor])[0]
        return [(part, device) for part, device in parts]
