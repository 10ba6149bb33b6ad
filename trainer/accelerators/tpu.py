"""TPUs under TorchTPU, one chip a process.

Tensors as on a GPU, and collectives, so that ddp and fsdp work as they are.

Written from the package torch_tpu 0.2.0 and its documentation; it has never run on a chip. What
could not be known without one is left out: how much memory there is and is used, and how long the
device takes for a part of a step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from trainer.accelerators import Accelerator, Precision, chips, local_device, version_of
from trainer.errors import ConfigError

# What TorchTPU's processes find each other's chips by; without them a process aborts when it first
# uses its chip.
_LAUNCH = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY")


@dataclass(frozen=True)
class Config(chips.Products):
    """Runs on the TPU chip of this process, by TorchTPU (the package torch_tpu), with strategy=ddp
    or fsdp.
    """

    def build(self) -> TpuAccelerator:
        check_installed()
        import torch_tpu  # noqa: F401 makes torch.device("tpu"), as `import torch` has done already, unless told not to

        found = torch.accelerator.current_accelerator()
        if found is None or found.type != "tpu":
            raise ConfigError(
                "accelerator: tpu was asked for and TorchTPU finds no chip on this machine; on a "
                "TPU VM look at "
                "/dev/vfio, and do not set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
            )
        # A process may see its own chip only, so those of the machine are counted where there is
        # something to count.
        local_device(chips.count() or torch.accelerator.device_count(), "TPU chip")
        missing = [variable for variable in _LAUNCH if variable not in os.environ]
        if missing and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"{' and '.join(missing)} must be set where TorchTPU runs in several processes; "
                "before you start "
                "them: eval \"$(python -m torch.tpu.distributed | sed 's/^/export /')\""
            )
        torch.set_float32_matmul_precision("medium" if self.bf16_products else "highest")
        return TpuAccelerator()


def check_installed() -> None:
    """Refuses to go on without a TorchTPU of the form that this module is written for.

    Raises:
        ConfigError: naming what to install.
    """
    install = "in an environment of its own: pip install samestep 'torch_tpu>=0.2'"
    if (version := version_of("torch_tpu")) is None:
        raise ConfigError(
            f"accelerator: tpu needs TorchTPU (torch 2.11 or newer), {install}; or use torch-xla: "
            "accelerator=xla"
        )
    if tuple(map(int, version.split(".")[:2])) < (0, 2):
        raise ConfigError(
            f"accelerator: tpu needs TorchTPU 0.2 or newer, and this is {version}; {install}"
        )


class TpuAccelerator(Accelerator):
    collective_backend = "tpu_dist"
    precisions = ("fp32", "bf16")

    def __init__(self) -> None:
        self.device = torch.device("tpu")  # the launcher has given each process its own

    @property
    def description(self) -> str:
        return f"TPU {chips.name() or 'chip'}, TorchTPU {version_of('torch_tpu')}"

    def peak_flops(self, precision: Precision) -> float | None:
        return chips.peak_flops(precision)
