"""Compiles the attention kernels for GPUs that this machine does not have, and reads the result."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainer.accelerators.flash import kernels as flash
from trainer.accelerators.flash.tiles import Blocks, choose_plan

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
GENERATIONS = {"sm_90": "hopper", "gfx942": "amd"}
TENSOR_CORES = {
    "sm_80": r"\bmma\.sync",
    "sm_90": r"\bwgmma\.mma_async",
    "sm_100": r"\btcgen05\.mma",
    "gfx942": r"\bv_mfma",
}
"""Instructions of the tensor cores in the assembly of each target."""

KERNELS = {
    "forward": flash.forward_kernel,
    "query_gradient": flash.query_gradient_kernel,
    "key_gradient": flash.key_gradient_kernel,
}
VARIANTS = {
    "plain": {},
    "first dropout": {"SEGMENTS": True, "DROPOUT": 1},
    "packed": {"SEGMENTS": True, "DROPOUT": 2},
    "t5": {"SEGMENTS": True, "DROPOUT": 2, "BIAS": True, "BIAS_GRADIENT": True},
    "segments": {"SEGMENTS": True},
    "causal": {"CAUSAL": True, "SEGMENTS": True},
    "prefix": {"CAUSAL": True, "SEGMENTS": True, "PREFIX": True},
    "local": {"LOCAL": True, "SEGMENTS": True},
}
"""Flags of the kernels; the others are False. DROPOUT is a version."""

DTYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
_POINTERS = {
    **dict.fromkeys(("segments", "key_segments", "ranges", "dropout_key", "dropout_rows"), "*i32"),
    **dict.fromkeys(("bias", "normalizer", "delta", "partial", "bias_partial"), "*fp32"),
    "bias_grad": "*fp32",
    "prefix": "*i8",
}
_ACTIVATIONS = (
    *("query", "key", "value", "out", "grad"),
    *("query_grad", "key_grad", "value_grad"),
)
_FLOATS = ("scale", "keep_scale")


@dataclass(frozen=True)
class Code:
    """What a kernel became.

    Attributes:
        registers: of a thread.
        spilled: bytes (of NVIDIA GPUs' stack) or registers (of AMD's) that went to memory.
        shared: bytes of shared memory of a program.
        tensor_cores: number of their instructions in the assembly.
        loop: instructions of the longest loop with products, by operation; empty on AMD's GPUs.
        full_loop: instructions of the shortest, the one of tiles without masks where there are two.
        waits: for products of Hopper's tensor cores, in the code.
    """

    registers: int
    spilled: int
    shared: int
    tensor_cores: int
    loop: Counter[str]
    full_loop: Counter[str]
    waits: int


def blocks_of(target: str, kernel: str, width: int, dtype: torch.dtype = torch.bfloat16) -> Blocks:
    """The launch parameters of a call on the target."""
    plan = choose_plan(width, dtype, GENERATIONS.get(target, "other"))
    blocks: Blocks = getattr(plan, kernel)
    return blocks


def compile_kernel(
    target: str,
    kernel: str,
    variant: str,
    width: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    even: bool = True,
) -> Code:
    """Compiles a kernel with the launch parameters that a call on the target would use.

    Args:
        even: for lengths that are multiples of the tiles.
    """
    blocks = blocks_of(target, kernel, width, dtype)
    constants = {
        **VARIANTS[variant],
        "WIDTH": width,
        "PADDED": triton.next_power_of_2(width),
        "PRECISION": "ieee",
        "BLOCK_T": blocks.queries,
        "BLOCK_S": blocks.keys,
        "EVEN_T": even,
        "EVEN_S": even,
    }
    return compile_source(
        target,
        source(KERNELS[kernel], dtype, constants),
        blocks.warps,
        blocks.stages,
        blocks.registers,
    )


def compile_source(
    target: str, kernel: ASTSource, warps: int, stages: int, most: int | None = None
) -> Code:
    """Compiles a kernel; `most` are the registers that a thread may have."""
    options = {"num_warps": warps, "num_stages": stages}
    if most is not None:
        options["maxnreg"] = most
    compiled = triton.compile(kernel, target=TARGETS[target], options=options)
    amd = TARGETS[target].backend == "hip"
    assembly = compiled.asm["amdgcn" if amd else "ptx"]
    registers, spilled = _amd_usage(assembly) if amd else _nvidia_usage(compiled.asm["cubin"])
    listing = "" if amd else _nvidia_report("nvdisasm", "-c", compiled.asm["cubin"])
    loops = sorted(_loops(listing), key=Counter.total) or [Counter[str]()]
    return Code(
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        tensor_cores=len(re.findall(TENSOR_CORES[target], assembly)),
        loop=loops[-1],
        full_loop=loops[0],
        waits=len(re.findall(r"WARPGROUP\.DEPBAR", listing)),
    )


def scores_of_thread(target: str, kernel: str, width: int = 64) -> float:
    """Scores that a thread computes in one turn of the loop of a kernel, in bf16."""
    blocks = blocks_of(target, kernel, width)
    return blocks.queries * blocks.keys / (32 * blocks.warps)


def source(kernel: Any, dtype: torch.dtype, constants: dict[str, Any]) -> ASTSource:
    """A kernel with the types of its arguments; names in capitals are constants, or False.

    Tensors and strides are multiples of 16, as at most calls; lengths and numbers of heads are any.
    """
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name.isupper():
            signature[name], values[(place,)] = "constexpr", constants.get(name, False)
        elif name in _ACTIVATIONS:
            signature[name] = DTYPES[dtype]
        else:
            signature[name] = _POINTERS.get(name, "fp32" if name in _FLOATS else "i32")
        if signature[name].startswith("*") or name.endswith(("_b", "_h", "_t", "_s")):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, values, attributes)


def _nvidia_report(tool: str, option: str, cubin: bytes) -> str:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(folder / tool), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _loops(listing: str) -> list[Counter[str]]:
    """The operations of each loop with products: between a label and the furthest jump back."""
    labels: dict[str, int] = {}
    operations: list[str] = []
    loops: dict[str, Counter[str]] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(operations)
        # Address, predicate, operation: /*0010*/ @!P0 BRA `(.L_x_1) ;
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?\s*([A-Z0-9]+)(.*)", line):
            operations.append(found[1])
            target = re.search(r"\.L_x_\d+", found[2])
            if found[1] == "BRA" and target and target[0] in labels:
                loops[target[0]] = Counter(operations[labels[target[0]] :])
    return [loop for loop in loops.values() if any(name.endswith("MMA") for name in loop)]


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    report = _nvidia_report("cuobjdump", "-res-usage", cubin)
    registers, stack, local = (
        int(re.findall(rf"\b{name}:(\d+)", report)[0]) for name in ("REG", "STACK", "LOCAL")
    )
    return registers, stack + local


def _amd_usage(assembly: str) -> tuple[int, int]:
    vector, spilled = (
        int(re.findall(rf"\.{name}:\s+(\d+)", assembly)[0])
        for name in ("vgpr_count", "vgpr_spill_count")
    )
    return vector, spilled


def main() -> None:
    """Prints the table of docs/gpu_kernels.md."""
    print("| target | kernel | plain | segments, dropout | and T5's bias |")
    print("|---|---|---|---|---|")
    for target in TARGETS:
        for kernel in KERNELS:
            codes = [compile_kernel(target, kernel, v) for v in ("plain", "packed", "t5")]
            cells = [f"{c.registers} / {c.spilled} / {c.tensor_cores}" for c in codes]
            print(f"| {target} | {kernel} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
