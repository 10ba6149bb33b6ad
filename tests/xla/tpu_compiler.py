"""Compiles attention's kernel with the TPUs' own compiler, which needs no TPU."""

from __future__ import annotations

import json
import re
import sys

from torch_xla.core import xla_builder

from benchmarks import libtpu
from tests.xla.interpreted_kernel import report
from trainer.accelerators.kinds import xla
from trainer.inspect.doctor.xla_devices import XlaTrial
from trainer.strategies.xla import flash, split


def main() -> None:
    xla_builder.computation_from_module_proto = lambda _, module: module
    trial = XlaTrial(xla.Config().build())
    for cells, width, causal, packed in json.loads(sys.argv[1]):
        shape = (4, 2, cells, width)
        number = flash._register(
            flash._Call(shape, packed, causal, 1.0, split.register(trial._mesh))
        )
        passes = flash._kernel(number)
        report(calls=[kernels(each) for each in (passes.forward, passes.backward)])


def kernels(module: bytes) -> list[str]:
    """The kernels of a module that was compiled for a chip."""
    made = libtpu.compiled(module, "v5e:2x2", chips=1)
    return re.findall('custom_call_target="(tpu[^"]*)"', made.hlo_modules()[0].to_string())


if __name__ == "__main__":
    main()
