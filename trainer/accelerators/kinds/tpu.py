"""TPUs under TorchTPU, one chip per process.

Tensors and collectives work as on a GPU, so ddp and fsdp need no code of their own.

Written from the package torch_tpu 0.2.0 and its documentation; it has never run on a chip. Values
that only a chip could have confirmed are left out: available and used memory, and device time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import MappingProxyType

import torch

from samestep.environment import number
from samestep.errors import ConfigError
from trainer.accelerators import Accelerator, Precision, chips, local_device, version_of

# TorchTPU's processes find each other's chips by these. Without them, a process aborts at the first
# use of its chip.
_LAUNCH = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY")


@dataclass(frozen=True)
class Config(chips.Products):
    """Runs on this process's TPU chip by TorchTPU (torch_tpu), with strategy=ddp or fsdp."""

    def build(self) -> TpuAccelerator:
        check_installed()
        # Registers the device type "tpu". `import torch` has done so already, unless
        # TORCH_DEVICE_BACKEND_AUTOLOAD=0.
        import torch_tpu  # noqa: F401

        found = torch.accelerator.current_accelerator()
        if found is None or found.type != "tpu":
            raise ConfigError(
                "accelerator: tpu was asked for, and TorchTPU finds no chip on this machine. On a "
                "TPU VM look at /dev/vfio, and do not set TORCH_DEVICE_BACKEND_AUTOLOAD=0."
            )
        # torch may see this process's own chip only, so chips are counted by Linux if possible.
        local_device(chips.count() or torch.accelerator.device_count(), "TPU chip")
        missing = [variable for variable in _LAUNCH if variable not in os.environ]
        if missing and number("WORLD_SIZE", 1) > 1:
            raise ConfigError(
                f"{' and '.join(missing)} must be set if TorchTPU runs in several processes. Before"
                " you start them: eval \"$(python -m torch.tpu.distributed | sed 's/^/export /')\""
            )
        torch.set_float32_matmul_precision("medium" if self.bf16_products else "highest")
        return TpuAccelerator()


def check_installed() -> None:
    """Checks for a version of TorchTPU that this module supports.

    Raises:
        ConfigError: naming the package to install.
    """
    install = "in an environment of its own: pip install samestep 'torch_tpu>=0.2'"
    if (version := version_of("torch_tpu")) is None:
        raise ConfigError(
            f"accelerator: tpu needs TorchTPU (torch 2.11 or newer), {install}. Or use torch-xla: "
            "accelerator=xla."
        )
    if tuple(map(int, version.split(".")[:2])) < (0, 2):
        raise ConfigError(
            f"accelerator: tpu needs TorchTPU 0.2 or newer, and this is {version}. Install it "
            f"{install}"
        )


class TpuAccelerator(Accelerator):
    collective_backend = "tpu_dist"
    precisions = ("fp32", "bf16")
    # XLA compiles a graph for each shape.
    compile_options = MappingProxyType({"backend": "tpu", "dynamic": False})

    def __init__(self) -> None:
        self.device = torch.device("tpu")  # the launcher makes one chip visible to each process

    @property
    def description(self) -> str:
        return f"TPU {chips.name() or 'chip'}, TorchTPU {version_of('torch_tpu')}"

    def peak_flops(self, precision: Precision) -> float | None:
        return chips.peak_flops(precision)
