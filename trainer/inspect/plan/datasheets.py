"""Data sheets of devices: peaks, not what programs reach.

Sources: NVIDIA's data sheets of the A100 (80 GB SXM), H100 and H200 (SXM), and of the
HGX B200 (an eighth of it); their architecture white papers for integer rates, of one operation an
instruction; docs.cloud.google.com/tpu/docs (v4, v5e, v6e). Google publishes no integer rates: these
are lanes x clock of the vector unit as in "How to Scale Your Model" (jax-ml.github.io).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataSheet:
    """Peaks of a device.

    Attributes:
        name: of the device.
        tflops: dense, of bf16 and fp16, in 1e12 FLOP/s.
        fp32: of matrix products in fp32, in 1e12 FLOP/s; on TPUs six passes in bf16.
        terabytes: of memory traffic per second.
        gibibytes: of memory, which the plan fills.
        integer: 32-bit operations, in 1e12 a second.
        near, far: bytes that a device sends per second, in 1e9: to devices of its node, and to
            other nodes (one network card of 400 Gbit/s, or 200 with A100, for each GPU). The
            links of a TPU slice are near ones, and there are no others.
        node: devices of a node or slice.
        compiles: whether programs are always compiled as a whole, so that no eager mode exists.
    """

    name: str
    tflops: float
    fp32: float
    terabytes: float
    gibibytes: float
    integer: float
    near: float
    far: float
    node: int = 8
    compiles: bool = False


DEVICES = {
    "a100": DataSheet("A100-80 SXM", 312, 19.5, 2.039, 80, 9.7, near=300, far=25),
    "h100": DataSheet("H100 SXM", 989, 67, 3.35, 80, 16.7, near=450, far=50),
    "h200": DataSheet("H200", 989, 67, 4.8, 141, 16.7, near=450, far=50),
    "b200": DataSheet("B200", 2250, 75, 7.7, 180, 35, near=900, far=50),
    # 6 links of 50 GB/s, 4 of 50 GB/s, and 4 of 112 GB/s, in one direction; a ring uses two links.
    "v4": DataSheet("TPU v4", 275, 46, 1.2, 32, 4.3, 100, 100, 4096, compiles=True),
    "v5e": DataSheet("TPU v5e", 197, 33, 0.82, 16, 6.1, 100, 100, 256, compiles=True),
    "v6e": DataSheet("TPU v6e", 918, 153, 1.64, 32, 7.7, 224, 224, 256, compiles=True),
}
"""By the name that commands take."""
