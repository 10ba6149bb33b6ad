"""Compiles for TPUs with libtpu, which needs no TPU.

Runs in the environment of `make test-xla`, with JAX and libtpu.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

CHIPS = {"v5e:2x2": "v5litepod-4", "v5e:4x4": "v5litepod-16", "v6e:2x2": "v6e-4"}
"""Topology -> the type of accelerator that libtpu asks for."""


def variables(python: str, topology: str) -> dict[str, str]:
    """Environment variables of a process of `python` that compiles for a slice."""
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_LIBRARY_PATH": str(Path(python).parents[1] / "tpu/libtpu/libtpu.so"),
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": CHIPS[topology],
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def compiled(module: bytes, topology: str, chips: int | None = None) -> Any:
    """The executable of a module for a slice.

    Args:
        module: an HloModuleProto; XLA's SPMD divides it over the chips.
        chips: the first ones of the slice; None: all.
    """
    import numpy as np
    from jax._src import compiler
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    slice_ = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    devices = slice_.devices[:chips]
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([[device.id for device in devices]]),
        use_spmd_partitioning=True,
    )
    options.executable_build_options.use_shardy_partitioner = False
    # As torch-xla compiles.
    options.executable_build_options.allow_spmd_sharding_propagation_to_output = [True]
    return devices[0].client.compile(
        _stablehlo(module),
        executable_devices=xla_client.DeviceList(tuple(devices)),
        compile_options=options,
    )


def _stablehlo(module: bytes) -> bytes:
    """The module; its donated arguments stay donated."""
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jaxlib.mlir import ir

    head = xla_client._xla.HloModule.from_serialized_hlo_module_proto(module).to_string()
    found = re.search(r"buffer_donor=\{(.*?)\}, entry", head.partition("\n")[0])
    donated = [int(each) for each in re.findall(r"\((\d+), \{\}\)", found[1] if found else "")]
    text = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(module))
    with mlir.make_ir_context():
        parsed = ir.Module.parse(text)
        main = next(
            each
            for each in parsed.body.operations
            if ir.StringAttr(each.attributes["sym_name"]).value == "main"
        )
        # The conversion loses these marks, and the state would count twice.
        attributes = [{a.name: a.attr for a in ir.DictAttr(each)} for each in main.arg_attrs]
        for number in donated:
            attributes[number]["jax.buffer_donor"] = ir.BoolAttr.get(True)
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(each) for each in attributes])
        code: bytes = mlir.module_to_bytecode(parsed)
        return code
