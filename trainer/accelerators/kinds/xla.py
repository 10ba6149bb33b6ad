"""TPUs under torch-xla: XLA compiles graphs of operations for all devices of a machine."""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep import log
from samestep.errors import ConfigError, SamestepError, install_command
from trainer.accelerators import Accelerator, Precision, chips, version_of

_CHANGED = re.compile("number of different graphs|Reached the end of the function")
_ADVICE = (
    "What a step computes may not depend on its data. docs/tpu.md, on recompilation, tells how to "
    "find the cause."
)


@dataclass(frozen=True)
class Config(chips.Products):
    """Runs on the devices of XLA: TPU chips or, with PJRT_DEVICE=CPU, parts of this machine's CPU.

    One process drives all devices of a machine, with strategy=xla_spmd. CPU_NUM_DEVICES is the
    number of devices that the CPU is divided into.
    """

    def build(self) -> XlaAccelerator:
        check_installed()
        if (chosen := os.environ.get("PJRT_DEVICE")) is None and not chips.count():
            raise ConfigError(
                "accelerator: xla finds no TPU on this machine. On a TPU VM look at /dev/accel* "
                "and /dev/vfio, which another process may hold, or set PJRT_DEVICE=CPU to try XLA "
                "on the CPU."
            )
        if chosen == "CPU":
            # XLA's threads wait inside of collectives, and it may begin two at once. With a thread
            # for each device, these can wait for each other, and XLA aborts after ten seconds.
            devices = os.environ.get("CPU_NUM_DEVICES", "")
            threads = 4 * int(devices) if devices.isdecimal() else 1
            os.environ.setdefault("NPROC", str(max(threads, os.cpu_count() or 1)))
        # Otherwise XLA logs a list of deprecated features with each graph.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        try:
            import torch_xla.backends
            import torch_xla.runtime

            torch_xla.runtime.use_spmd()
            # `set_mat_mul_precision` warns, even at the first call, that it is not the first.
            logging.getLogger("torch_xla.backends").setLevel(logging.ERROR)
            torch_xla.backends.set_mat_mul_precision("default" if self.bf16_products else "highest")
            # 3 of 362 runs that ended soon after XLA had started aborted when Python was through.
            log.end_at_once()
            return XlaAccelerator()
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"accelerator: xla finds no {chosen or 'TPU'} device: {_first_line(error)}. Check "
                "whether another process uses it, or set PJRT_DEVICE=CPU to try XLA on the CPU."
            ) from error


def check_installed() -> None:
    """Checks for a torch-xla that fits the installed torch, before an import that would crash.

    Raises:
        ConfigError: naming the package to install.
    """
    if (version := version_of("torch-xla")) is None:
        raise ConfigError(
            "accelerator: xla needs torch-xla and its torch. In an environment of its own: "
            f"{install_command('tpu')}"
        )
    wanted, found = (".".join(each.split(".")[:2]) for each in (version, torch.__version__))
    if wanted != found:
        raise ConfigError(
            f"torch-xla {version} works with torch {wanted} alone, and this is torch "
            f"{torch.__version__}. Run pip install 'torch=={wanted}.*' 'torch-xla=={wanted}.*'"
        )


class XlaAccelerator(Accelerator):
    """All devices of this machine, as one.

    Their memory is not measured: each trial of a batch size would be compiled.

    Attributes:
        devices: number of devices of this machine.
        platform: "tpu" or "cpu".
    """

    # Between machines, for numbers on the host. XLA itself communicates between devices.
    collective_backend = "gloo"
    precisions = ("fp32", "bf16")
    compiles = True

    def __init__(self) -> None:
        import torch_xla.runtime

        self.device = torch_xla.device()
        self.devices: int = torch_xla.runtime.addressable_runtime_device_count()
        self.compilations: dict[str, int] = {}
        self.platform: str = torch_xla.runtime.device_type().lower()
        self._sessions: Iterator[str] = iter(())

    @property
    def description(self) -> str:
        kind = (
            f"TPU {chips.name() or ''}".strip() if self.platform == "tpu" else self.platform.upper()
        )
        return f"XLA on {self.devices} {kind} device{'s' if self.devices > 1 else ''}"

    def peak_flops(self, precision: Precision) -> float | None:
        peak = chips.peak_flops(precision) if self.platform == "tpu" else None
        return self.devices * peak if peak else None

    def to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies tensors to all devices, outside of the graph that `Tensor.to` would record."""
        from torch_xla.core.xla_model import send_cpu_data_to_device

        return dict(
            zip(batch, send_cpu_data_to_device(list(batch.values()), self.device), strict=True)
        )

    @contextmanager
    def graph(self, work: str) -> Iterator[None]:
        """Records the operations inside as one graph, compiles it if it is new, and runs it.

        Raises:
            SamestepError: it differs from the last graph of that name, so it would be compiled
                again and again.
            torch.OutOfMemoryError: the devices have too little memory for it.
        """
        import torch_xla

        before = _compilations()
        # Each uninterrupted sequence of operations is a session of torch-xla's detector, compared
        # with the session of the same name in the previous graph.
        self._sessions = (f"{work}, part {part}, of {id(self)}" for part in count())
        self._watch()
        try:
            yield
            # Inside of `try`: the end of a session raises if the graph has become shorter.
            torch_xla._XLAC._dynamic_shape_detector_end_session()
            if work in self.compilations:
                torch_xla.sync()
            else:
                self._compile()
        except BaseException as error:
            with suppress(RuntimeError):
                torch_xla._XLAC._dynamic_shape_detector_end_session()
            if isinstance(error, RuntimeError) and _CHANGED.search(str(error)):
                raise SamestepError(
                    f"{work} is not the graph that was compiled: {_difference(error)}. {_ADVICE}"
                ) from None
            if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
                raise torch.OutOfMemoryError(_first_line(error)) from error
            raise
        compiled = _compilations() - before
        if compiled > (work not in self.compilations):
            raise SamestepError(
                f"{work} was compiled {self.compilations.get(work, 0) + compiled} times, although "
                "its operations and shapes are the same: a number in it has changed, or the device "
                f"of a tensor. {_ADVICE}"
            )
        self.compilations[work] = self.compilations.get(work, 0) + compiled

    def _compile(self) -> None:
        """Compiles and runs a new graph.

        A method of its own, because `Heartbeat` finds it on the stack: it may take long.
        """
        import torch_xla

        torch_xla.sync()

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Surrounds operations inside a graph that are recorded the first time only."""
        import torch_xla

        torch_xla._XLAC._dynamic_shape_detector_end_session()
        try:
            yield
        finally:
            self._watch()

    def _watch(self) -> None:
        """Starts to compare recorded operations with the previous graph's."""
        import torch_xla

        torch_xla._XLAC._dynamic_shape_detector_set_max_different_graphs(1)
        torch_xla._XLAC._dynamic_shape_detector_start_session(next(self._sessions))


def _compilations() -> int:
    from torch_xla.debug import metrics

    data: Any = metrics.metric_data("CompileTime")
    return 0 if data is None else int(data[0])


def _difference(error: RuntimeError) -> str:
    """The change that torch-xla's detector has found, in a line, with the line of code."""
    lines = [
        line.replace("[] ", "").replace(", dynamic_dims: ()", "").strip()
        for line in str(error).splitlines()
    ]
    found = {key: rest for key, _, rest in (line.partition(": ") for line in lines)}
    if "Got" not in found:
        said = " ".join(filter(None, lines))
    elif found["Got"] == found.get("Expected"):
        said = f"{found['Got']}, with another number in it"
    else:
        said = f"{found['Got']}, where it had {found.get('Expected', 'others')}"
    # The innermost frame outside of torch and torch_xla is the model's or objective's code.
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if not {"torch", "torch_xla"} & set(Path(frame.filename).parts)
    ][-1]
    return f"{said} ({Path(own.filename).name}, line {own.lineno})"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
