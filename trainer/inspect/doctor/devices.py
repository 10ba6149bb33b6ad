"""The checks of `samestep doctor` on this machine's devices: each alone, then all together."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException

from samestep.errors import install_command
from samestep.findings import Check, Finding
from trainer import accelerators, strategies
from trainer.accelerators import Accelerator, Precision, chips, detect
from trainer.accelerators.kinds import cpu, cuda, tpu, xla
from trainer.inspect.doctor import xla_devices
from trainer.inspect.doctor.measurements import REDUCE_BYTES, product, reduced
from trainer.strategies.world import World

_SPAWN_SECONDS = 120.0


def checks(
    wanted: accelerators.Config | None,
    strategy: strategies.Config | None,
    precision: Precision | None,
    processes: int | None,
) -> list[Check]:
    """The checks of this machine's devices, in order.

    Args:
        wanted: the experiment's accelerator; None: the best device.
        strategy: the experiment's; None without an experiment.
        precision: of matrix products; None: the fastest.
        processes: number of processes in the all-reduce; None: one per GPU, or two on the CPU.
    """
    config = wanted or detect.best()
    if isinstance(config, xla.Config):
        return [("devices", lambda: xla_devices.examine(config, strategy, precision))]
    found: list[Check] = [("devices", lambda: available(wanted))]
    if isinstance(config, tpu.Config):
        return [*found, ("device", lambda: product(config.build(), "device", "bf16"))]
    gpus = 0 if isinstance(wanted, cpu.Config) else torch.cuda.device_count()
    chosen: Precision = precision or ("bf16" if gpus else "fp32")
    if not gpus:
        found.append(("processor", lambda: product(cpu.CpuAccelerator(), "processor", chosen)))
    for index in range(gpus):
        found.append((f"device {index}", partial(_product_on_gpu, index, chosen)))
    return [*found, ("all-reduce", lambda: all_reduce(gpus, processes or gpus or 2))]


def available(wanted: accelerators.Config | None) -> Iterator[Finding]:
    """Reports the devices that a training run would use.

    Args:
        wanted: the experiment's accelerator; None: the best device.
    """
    if isinstance(wanted, cpu.Config):
        yield Finding("devices", "ok", "the CPU, as the experiment asks for it")
    elif torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = cuda.CudaAccelerator(index)
            major, minor = torch.cuda.get_device_capability(index)
            found = f"{gpu.description}, {gpu.memory() / 2**30:.0f} free, sm_{major}{minor}"
            yield Finding(f"device {index}", "ok", found)
    elif not isinstance(config := wanted or detect.best(), cpu.Config):
        # `build` raises the reason if the device is not available.
        yield Finding("devices", "ok", config.build().description)
    # GPUs that torch cannot use: without this, training would be slow and say nothing.
    elif reason := cuda.unusable():
        yield Finding("devices", "failed", f"training would run on the CPU: {reason}")
    elif chips.count():
        found = "training would run on the CPU, although this machine has TPUs"
        fix = f"{install_command('tpu')}, in an environment of its own"
        yield Finding("devices", "failed", found, fix)
    else:
        yield Finding("devices", "ok", "no GPU: training would run on the CPU")


def _product_on_gpu(index: int, precision: Precision) -> Iterator[Finding]:
    return product(cuda.CudaAccelerator(index), f"device {index}", precision)


def all_reduce(gpus: int, processes: int) -> Iterator[Finding]:
    """Sums a tensor over new processes, each with a GPU, or on the CPU if there are no GPUs."""
    if processes == 1:
        yield Finding("all-reduce", "ok", "one process has nobody to reduce with")
        return
    if gpus and processes > gpus:
        found = f"{processes} processes want a GPU each, and there are {gpus}"
        yield Finding("all-reduce", "failed", found, f"ask for at most {gpus} processes")
        return
    backend = "nccl" if gpus else "gloo"
    with socket.socket() as free:
        # Port 0 lets the system choose one that is free.
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results: SimpleQueue[tuple[bool, float]] = mp.get_context("spawn").SimpleQueue()
    workers = mp.spawn(  # type: ignore[attr-defined,no-untyped-call]
        _reduce, (processes, port, bool(gpus), results), processes, join=False
    )
    deadline = time.monotonic() + _SPAWN_SECONDS
    try:
        # A collective that hangs has no end of its own.
        while not workers.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{processes} processes did not reduce a tensor over {backend} in two minutes"
                )
    except Exception as error:  # mp.spawn also raises what a worker has raised
        fix = "look at firewalls of the loopback"
        if gpus:
            fix = "NCCL_DEBUG=INFO tells more; look at /dev/shm and firewalls"
        if isinstance(error, ProcessExitedException):
            fix = "look into the kernel's log (dmesg): the system may have killed it for its memory"
        yield Finding("all-reduce", "failed", str(error).strip().splitlines()[-1], fix)
        return
    finally:
        for worker in workers.processes:
            worker.kill()
            worker.join()
    right, speed = results.get()
    yield reduced(f"{processes} processes over {backend}", right, speed)


def _reduce(
    rank: int, processes: int, port: int, on_gpu: bool, results: SimpleQueue[tuple[bool, float]]
) -> None:
    """Sums a tensor as one of the processes.

    Rank 0 puts into `results` whether its sums are right, and the bus bandwidth in bytes/s as
    nccl-tests define it.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    accelerator: Accelerator = cuda.CudaAccelerator(rank) if on_gpu else cpu.CpuAccelerator()
    world = World.start(_SPAWN_SECONDS)
    world.connect(accelerator.collective_backend, accelerator.collective_device)
    tensor = torch.full((REDUCE_BYTES // 4,), float(rank + 1), device=accelerator.device)
    # The first all-reduce connects the processes, and is checked but not timed.
    dist.all_reduce(tensor)
    # 1 + 2 + ... + processes: exact in fp32.
    right = bool((tensor == processes * (processes + 1) / 2).all())
    begin, repeats = accelerator.mark(), 5
    for _ in range(repeats):
        dist.all_reduce(tensor)
    seconds = accelerator.seconds(begin, accelerator.mark()) / repeats
    if rank == 0:
        results.put((right, 2 * (processes - 1) / processes * REDUCE_BYTES / seconds))
    world.close()
