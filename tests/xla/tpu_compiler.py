"""Compiles attention's kernel with the TPUs' own compiler, which needs no TPU."""

from __future__ import annotations

import json
import os
import re
import sys

os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_WORKER_ID="0",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)

import numpy as np
from jax._src import compiler
from jax._src.lib import xla_client
from jax.experimental import topologies
from torch_xla.core import xla_builder

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
        report(calls=[compiled(each) for each in (passes.forward, passes.backward)])


def compiled(module: bytes) -> list[str]:
    """The kernels of a module that was compiled for a chip."""
    place = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[:1]
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=1, device_assignment=np.array([[place[0].id]])
    )
    options.executable_build_options.use_shardy_partitioner = False
    text = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(module))
    made = place[0].client.compile(
        text.encode(),
        executable_devices=xla_client.DeviceList(tuple(place)),
        compile_options=options,
    )
    return re.findall('custom_call_target="(tpu[^"]*)"', made.hlo_modules()[0].to_string())


if __name__ == "__main__":
    main()
