"""TPUs under torch-xla: operations are recorded into graphs, which XLA compiles for all devices of
a host together.
"""

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

from trainer.accelerators import Accelerator, Precision, chips, version_of
from trainer.errors import ConfigError, SamestepError

_CHANGED = re.compile("number of different graphs|Reached the end of the function")
_ADVICE = (
    "what a step computes may not depend on its data; docs/tpu.md, on recompilation, tells how to "
    "find the cause"
)


@dataclass(frozen=True)
class Config(chips.Products):
    """Runs on the devices of XLA.

    TPU chips or, with PJRT_DEVICE=CPU, parts of this machine's processor.

    One process drives all devices of a machine, with strategy=xla_spmd. CPU_NUM_DEVICES says how
    many the processor is to be.
    """

    def build(self) -> XlaAccelerator:
        check_installed()
        if (chosen := os.environ.get("PJRT_DEVICE")) is None and not chips.count():
            raise ConfigError(
                "accelerator: xla finds no TPU on this machine; on a TPU VM look at /dev/accel* "
                "and /dev/vfio, which "
                "another process may hold, or set PJRT_DEVICE=CPU to try XLA on the processor"
            )
        os.environ.setdefault(
            "TF_CPP_MIN_LOG_LEVEL", "2"
        )  # or XLA tells with each graph what it will drop one day
        try:
            import torch_xla.backends
            import torch_xla.runtime

            torch_xla.runtime.use_spmd()
            logging.getLogger("torch_xla.backends").setLevel(
                logging.ERROR
            )  # it warns of second calls at the first
            torch_xla.backends.set_mat_mul_precision("default" if self.bf16_products else "highest")
            return XlaAccelerator()
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"accelerator: xla finds no {chosen or 'TPU'} device: {_first_line(error)}; is "
                "another process using it? PJRT_DEVICE=CPU tries XLA on the processor"
            ) from error


def check_installed() -> None:
    """Refuses to go on without a torch-xla that fits this torch.

    Raises:
        ConfigError: naming what to install.
    """
    if (version := version_of("torch-xla")) is None:
        raise ConfigError(
            "accelerator: xla needs torch-xla and its torch; in an environment of its own: pip "
            "install 'samestep[tpu]'"
        )
    wanted, found = (".".join(each.split(".")[:2]) for each in (version, torch.__version__))
    if wanted != found:
        raise ConfigError(
            f"torch-xla {version} works with torch {wanted} alone, and this is torch "
            f"{torch.__version__}; "
            f"pip install 'torch=={wanted}.*' 'torch-xla=={wanted}.*'"
        )


class XlaAccelerator(Accelerator):
    """All devices of this machine, as one.

    How much fits into them is not measured, as each try would be compiled.

    Attributes:
        devices: how many there are in this machine.
        platform: "tpu" or "cpu".
    """

    collective_backend = (
        "gloo"  # between machines, for numbers of the host; XLA moves what is on devices
    )
    precisions = ("fp32", "bf16")
    compiles = True

    def __init__(self) -> None:
        import torch_xla.runtime

        self.device = torch_xla.device()
        self.devices: int = torch_xla.runtime.addressable_runtime_device_count()
        self.compilations: dict[str, int] = {}
        self.platform: str = torch_xla.runtime.device_type().lower()
        self._watched: Iterator[str] = iter(())

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
        """Copies tensors to all devices.

        Not as `Tensor.to` does, which would be recorded in the graph.
        """
        from torch_xla.core.xla_model import send_cpu_data_to_device

        return dict(
            zip(batch, send_cpu_data_to_device(list(batch.values()), self.device), strict=True)
        )

    @contextmanager
    def graph(self, work: str) -> Iterator[None]:
        """Records what it surrounds as one graph, compiles that if it is new, and has it computed.

        Raises:
            SamestepError: it is another graph than the last one of that name: it would be compiled
                again and again.
            torch.OutOfMemoryError: it does not fit into the devices.
        """
        import torch_xla

        before = _compilations()
        self._watched = (f"{work}, part {part}, of {id(self)}" for part in count())
        self._watch()
        try:
            yield
            # refuses a graph that has become shorter
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
                    f"{work} is not the graph that was compiled: {_difference(error)}; {_ADVICE}"
                ) from None
            if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
                raise torch.OutOfMemoryError(_first_line(error)) from error
            raise
        compiled = _compilations() - before
        if compiled > (work not in self.compilations):
            raise SamestepError(
                f"{work} was compiled {self.compilations.get(work, 0) + compiled} times, although "
                "its operations and "
                "shapes are the same: a number in it has changed, or where a tensor lies; "
                f"{_ADVICE}"
            )
        self.compilations[work] = self.compilations.get(work, 0) + compiled

    def _compile(self) -> None:
        """Has a new graph computed; it has a name of its own because `Heartbeat` looks for it: this
        may take long.
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
        """Compares the operations recorded from here on with the last ones."""
        import torch_xla

        torch_xla._XLAC._dynamic_shape_detector_set_max_different_graphs(1)
        torch_xla._XLAC._dynamic_shape_detector_start_session(next(self._watched))


def _compilations() -> int:
    from torch_xla.debug import metrics

    data: Any = metrics.metric_data("CompileTime")
    return 0 if data is None else int(data[0])


def _difference(error: RuntimeError) -> str:
    """What the detector of changes has found, in a line."""
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
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if not {"torch", "torch_xla"} & set(Path(frame.filename).parts)
    ][-1]
    return f"{said} ({Path(own.filename).name}, line {own.lineno})"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
