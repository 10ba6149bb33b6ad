"""`samestep doctor`: does this machine do what a run will ask of it? Each answer was tried out, not looked up."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from trainer import __version__, accelerators, storage
from trainer.accelerators import Accelerator, Precision, chips, cpu, cuda, tpu, version_of, xla
from trainer.accelerators.detect import best
from trainer.errors import SamestepError
from trainer.inspect.findings import Finding, State
from trainer.metrics import check_installed
from trainer.monitoring import wandb
from trainer.strategies import xla_spmd
from trainer.strategies.world import World
from trainer.strategies.xla import flash
from trainer.strategies.xla.trial import XlaTrial
from trainer.training.experiment import Experiment

Check: TypeAlias = tuple[str, Callable[[], Iterator[Finding]]]  # what is looked at, and what does that

_REDUCE_BYTES = 64 * 2**20
_DISK_BYTES = 64 * 2**20
_SLOW_DISK = 50e6  # bytes per second
_SPAWN_SECONDS = 120.0
_NETWORK_SECONDS = 5.0
_ATTENTION_ERROR = 0.02  # of numbers with 8 bits
_BYTES_PER_PARAMETER = 12  # of a checkpoint: the weight and Adam's two moments in fp32


def examine(experiment: Experiment | None, processes: int | None) -> Iterator[Finding]:
    """Looks at everything a run needs, one after the other; a check that breaks is a finding, too.

    Args:
        experiment: what is to be run here; None looks at the machine alone.
        processes: how many are to meet for the all-reduce; None takes one a GPU, or two on the CPU.
    """
    wanted = None if experiment is None else experiment.accelerator
    checks: list[Check] = [("software", _software)]
    if isinstance(config := wanted or best(), xla.Config):
        checks.append(("devices", lambda: _xla(config, experiment)))
    elif isinstance(config, tpu.Config):
        checks += [("devices", lambda: _devices(config)), ("device", lambda: _matmul(config.build(), "device", "bf16"))]
    else:
        checks += _checks_of_devices(wanted, experiment, processes)
    if experiment is None:
        checks.append(("disk", lambda: _disk("disk", Path.cwd(), 0)))
    else:
        checks += _checks_of(experiment)
    checks += [("W&B", lambda: _wandb(experiment)), ("Hugging Face", _hugging_face)]
    for check in checks:
        yield from _tried(*check)


def _tried(subject: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except SamestepError as error:
        yield Finding(subject, "failed", str(error))
    except Exception as error:
        yield Finding(subject, "failed", f"{type(error).__name__}: {error}")


def _checks_of_devices(
    wanted: accelerators.Config | None, experiment: Experiment | None, processes: int | None
) -> list[Check]:
    gpus = 0 if isinstance(wanted, cpu.Config) else torch.cuda.device_count()
    precision: Precision = "bf16" if gpus else "fp32"
    if experiment is not None:
        precision = experiment.training.precision
    checks: list[Check] = [
        ("devices", lambda: _devices(wanted)),
        *((f"device {i}", lambda i=i: _matmul(cuda.CudaAccelerator(i), f"device {i}", precision)) for i in range(gpus)),
    ]
    if not gpus:
        checks.append(("processor", lambda: _matmul(cpu.CpuAccelerator(), "processor", precision)))
    return [*checks, ("all-reduce", lambda: _all_reduce(gpus, processes or gpus or 2))]


def _checks_of(experiment: Experiment) -> list[Check]:
    checkpoints = experiment.checkpoint.folder
    with torch.device("meta"):
        parameters = sum(each.numel() for each in experiment.build_model().parameters() if each.requires_grad)
    kept = experiment.checkpoint.keep_last + (experiment.training.best is not None)
    needed = parameters * _BYTES_PER_PARAMETER * (kept + 1)
    checks: list[Check] = [("dataset", lambda: _dataset(experiment))]
    checks.append(("output", lambda: _disk("output", Path(experiment.output), 0 if checkpoints else needed)))
    if checkpoints and storage.is_url(checkpoints):
        checks.append(("checkpoints", lambda: _object_store(checkpoints)))
    elif checkpoints:
        checks.append(("checkpoints", lambda: _disk("checkpoints", Path(checkpoints), needed)))
    if metrics := experiment.objective.task.metrics:
        checks.append(("metrics", lambda: _metrics(metrics)))
    if any(storage.is_url(path) for path in experiment.data.paths):
        cache = experiment.data.cache or os.environ.get("SAMESTEP_CACHE") or Path.home() / ".cache" / "samestep"
        checks.append(("cache", lambda: _disk("cache", Path(cache), 0)))
    return checks


def _software() -> Iterator[Finding]:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    if torch.cuda.is_available() and dist.is_nccl_available():
        build += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"  # type: ignore[no-untyped-call]
    versions = f"samestep {__version__}, torch {torch.__version__} ({build})"
    for package in ("torch-xla", "torch_tpu", "libtpu", "jax"):
        if version := version_of(package):
            versions += f", {package} {version}"
    yield Finding("software", "ok", f"{versions}, Python {platform.python_version()}")
    if version_of("samestep") is None:  # it runs from the folder of its source
        return
    extras: dict[str, list[str]] = {}
    for requirement in metadata.requires("samestep") or ():
        if match := re.match(r"([\w.-]+).*; *extra *== *['\"](\w+)", requirement):
            extras.setdefault(match[2], []).append(match[1])
    extras.pop("dev", None)
    extras.pop("tpu", None)  # which needs an environment of its own
    missing = [extra for extra, packages in extras.items() if not all(map(version_of, packages))]
    there = ", ".join(extra for extra in extras if extra not in missing)
    fix = f"if you need them: pip install 'samestep[{','.join(missing)}]'" if missing else ""
    yield Finding("extras", "ok", f"{there or 'none'}{'; not there: ' * bool(missing)}{', '.join(missing)}", fix)


def _devices(wanted: accelerators.Config | None) -> Iterator[Finding]:
    """What training would run on, given the experiment's accelerator; None leaves it to the machine."""
    if isinstance(wanted, cpu.Config):
        yield Finding("devices", "ok", "the CPU, as the experiment asks for it")
    elif torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            accelerator = cuda.CudaAccelerator(index)
            major, minor = torch.cuda.get_device_capability(index)
            free = accelerator.memory() / 2**30
            yield Finding(f"device {index}", "ok", f"{accelerator.description}, {free:.0f} free, sm_{major}{minor}")
    elif not isinstance(config := wanted or best(), cpu.Config):
        yield Finding("devices", "ok", config.build().description)  # or why it cannot be had
    elif reason := cuda.unusable():
        yield Finding("devices", "failed", f"training would run on the CPU: {reason}")
    elif chips.count():
        fix = "pip install 'samestep[tpu]', in an environment of its own"
        yield Finding("devices", "failed", "training would run on the CPU, although this machine has TPUs", fix)
    else:
        yield Finding("devices", "ok", "no GPU: training would run on the CPU")


def _xla(config: xla.Config, experiment: Experiment | None) -> Iterator[Finding]:
    """The devices of XLA. Those of several machines are tried out together, so all of them have to run this."""
    accelerator = config.build()
    trial = XlaTrial(accelerator)
    yield Finding("devices", "ok", accelerator.description)
    strategy = xla_spmd.Config() if experiment is None else experiment.strategy
    if not isinstance(strategy, xla_spmd.Config):
        yield Finding("topology", "failed", f"{trial.topology}; the strategy is for other devices", "strategy=xla_spmd")
    elif trial.devices % strategy.replicas:
        fix = f"use a divisor of {trial.devices}"
        yield Finding("topology", "failed", f"strategy.replicas={strategy.replicas} on {trial.topology}", fix)
    else:
        mesh = f"{strategy.replicas} (replicate) x {trial.devices // strategy.replicas} (shard)"
        yield Finding("topology", "ok", f"{trial.topology}; mesh {mesh}")
    fastest: Precision = "bf16" if accelerator.peak_flops("bf16") else "fp32"
    precision = fastest if experiment is None else experiment.training.precision
    peak = accelerator.peak_flops(precision)
    yield from _tried("products", lambda: _products(trial, precision, peak and peak / accelerator.devices))
    if flash.usable(accelerator):
        yield from _tried("attention", lambda: _attention(trial))
    if trial.devices > 1:
        yield from _tried("all-reduce", lambda: _sum(trial, 4 * _REDUCE_BYTES if peak else _REDUCE_BYTES // 16))


def _products(trial: XlaTrial, precision: Precision, peak: float | None) -> Iterator[Finding]:
    left, expected = _exact().to(accelerators.DTYPES[precision]), _exact() @ _exact().T
    if wrong := ", ".join(trial.wrong(left, left.T.contiguous(), expected)):
        yield Finding("products", "failed", f"wrong on {wrong}", "take this machine out of use")
        return
    speed = trial.product_speed(8192 if peak else 512, precision, 1.0 if peak else 0.2)
    found = f"right results, {speed / 1e12:.3g} TFLOP/s in {precision} on each device"
    yield _compared("products", found, speed, peak, "compare with another machine of its kind")


def _attention(trial: XlaTrial) -> Iterator[Finding]:
    error = trial.attention_error(640, 64)
    found = f"by JAX's kernel, gradients included: within {error:.1%} of fp32 on the host"
    if error < _ATTENTION_ERROR:
        yield Finding("attention", "ok", found)
    else:
        yield Finding("attention", "failed", found, "strategy.flash_attention_from=null does without the kernel")


def _sum(trial: XlaTrial, size: int) -> Iterator[Finding]:
    right, speed = trial.sum_speed(size)
    found = f"{trial.devices} devices by XLA: {speed / 1e9:.3g} GB/s"
    yield Finding("all-reduce", "ok" if right else "failed", found if right else f"{found}, and a wrong result")


def _exact() -> Tensor:
    """A matrix of -1, 0 and 1: its products, sums of 128 terms, are exact in every precision and order of summation."""
    return ((7 * torch.arange(512).unsqueeze(1) + torch.arange(128) ** 2) % 3 - 1).double()


def _matmul(accelerator: Accelerator, subject: str, precision: Precision) -> Iterator[Finding]:
    """The right result of a product, and the speed of large ones."""
    dtype, exact = accelerators.DTYPES[precision], _exact()
    left = exact.to(accelerator.device, dtype)
    if not torch.equal((left @ left.T).double().cpu(), exact @ exact.T):
        yield Finding(subject, "failed", "a matrix product has a wrong result", "take this device out of use")
        return
    peak = accelerator.peak_flops(precision)
    size, seconds = (8192, 1.0) if peak else (1024, 0.2)
    matrix = torch.full((size, size), 1 / size, device=accelerator.device, dtype=dtype)
    matrix @ matrix  # the first one takes longer
    repeats, begin, started = 0, accelerator.mark(), time.perf_counter()
    while time.perf_counter() - started < seconds:
        matrix @ matrix
        repeats += 1
    speed = repeats * 2 * size**3 / accelerator.seconds(begin, accelerator.mark())
    found = f"right result, {speed / 1e12:.3g} TFLOP/s in {precision}"
    yield _compared(subject, found, speed, peak, "see nvidia-smi -q for other processes, heat and power limits")


def _compared(subject: str, found: str, speed: float, peak: float | None, fix: str) -> Finding:
    """A finding about FLOP/s beside those of the data sheet, if that has any."""
    if peak and speed < 0.4 * peak:
        return Finding(subject, "warning", f"{found}: {speed / peak:.0%} of the data sheet's", fix)
    return Finding(subject, "ok", found + (f", {speed / peak:.0%} of the data sheet's" if peak else ""))


def _all_reduce(gpus: int, processes: int) -> Iterator[Finding]:
    if processes == 1:
        yield Finding("all-reduce", "ok", "one process has nobody to reduce with")
        return
    if gpus and processes > gpus:
        fix = f"ask for at most {gpus} processes"
        yield Finding("all-reduce", "failed", f"{processes} processes want a GPU each, and there are {gpus}", fix)
        return
    backend = "nccl" if gpus else "gloo"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results: SimpleQueue[tuple[bool, float]] = mp.get_context("spawn").SimpleQueue()
    workers = mp.spawn(  # type: ignore[attr-defined,no-untyped-call]
        _reduce, (processes, port, bool(gpus), results), processes, join=False
    )
    deadline = time.monotonic() + _SPAWN_SECONDS
    try:
        while not workers.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{processes} processes did not reduce a tensor over {backend} in two minutes")
    except Exception as error:
        fix = (
            "NCCL_DEBUG=INFO tells more; look at /dev/shm and firewalls"
            if gpus
            else "look at firewalls of the loopback"
        )
        yield Finding("all-reduce", "failed", str(error).strip().splitlines()[-1], fix)
        return
    finally:
        for worker in workers.processes:
            worker.kill()
            worker.join()
    right, speed = results.get()
    found = f"{processes} processes over {backend}: {speed / 1e9:.3g} GB/s"
    yield Finding("all-reduce", "ok" if right else "failed", found if right else f"{found}, and a wrong result")


def _reduce(rank: int, processes: int, port: int, on_gpu: bool, results: SimpleQueue[tuple[bool, float]]) -> None:
    """One process's part; rank 0 reports whether sums are right, and the bus bandwidth as nccl-tests define it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    accelerator: Accelerator = cuda.CudaAccelerator(rank) if on_gpu else cpu.CpuAccelerator()
    world = World.start(_SPAWN_SECONDS)
    world.connect(accelerator.collective_backend)
    tensor = torch.full((_REDUCE_BYTES // 4,), float(rank + 1), device=accelerator.device)
    dist.all_reduce(tensor)
    right = bool((tensor == processes * (processes + 1) / 2).all())
    begin, repeats = accelerator.mark(), 5
    for _ in range(repeats):
        dist.all_reduce(tensor)
    seconds = accelerator.seconds(begin, accelerator.mark()) / repeats
    if rank == 0:
        results.put((right, 2 * (processes - 1) / processes * _REDUCE_BYTES / seconds))
    world.close()


def _dataset(experiment: Experiment) -> Iterator[Finding]:
    dataset = experiment.data.open()
    vocabulary = dataset.tokenizer.vocabulary.size
    found = f"{dataset.name}: vocabulary {vocabulary:,}"
    if vocabulary > experiment.model.vocab_size:
        fix = f"set model.vocab_size to {vocabulary} or more (it is {experiment.model.vocab_size})"
        yield Finding("dataset", "failed", found, fix)
    else:
        yield Finding("dataset", "ok", found)


def _metrics(names: Sequence[str]) -> Iterator[Finding]:
    check_installed(names)
    yield Finding("metrics", "ok", ", ".join(names))


def _disk(subject: str, folder: Path, needed: float) -> Iterator[Finding]:
    """Writes a file in the folder, or in the nearest one above it that exists, and takes it away again."""
    folder = folder.resolve()
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    block = os.urandom(2**20)
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".samestep-doctor-") as file:
            started = time.perf_counter()
            for _ in range(_DISK_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            speed = _DISK_BYTES / (time.perf_counter() - started)
    except OSError as error:
        yield Finding(
            subject, "failed", f"cannot write in {existing}: {error.strerror}", "give access or choose another"
        )
        return
    free = shutil.disk_usage(existing).free
    found = f"{folder}: {free / 1e9:,.0f} GB free, {speed / 1e6:,.0f} MB/s with fsync"
    if free < needed:
        fix = f"the checkpoints kept at a time take {needed / 1e9:.3g} GB: make room, or lower checkpoint.keep_last"
        yield Finding(subject, "failed", found, fix)
    elif speed < _SLOW_DISK:
        yield Finding(subject, "warning", found, "saving will take long; a local or parallel file system is faster")
    else:
        yield Finding(subject, "ok", found)


def _object_store(url: str) -> Iterator[Finding]:
    address, content = f"{url.rstrip('/')}/.samestep-doctor-{os.getpid()}", os.urandom(64)
    started = time.perf_counter()
    storage.write(address, content)
    right = storage.read(address) == content
    storage.remove(address)
    seconds = time.perf_counter() - started
    found = f"{storage.shown(url)}: wrote, read and removed an object in {seconds:.2f} s"
    yield Finding("checkpoints", "ok" if right else "failed", found if right else f"{found}, and it had changed")


def _wandb(experiment: Experiment | None) -> Iterator[Finding]:
    config = None if experiment is None else experiment.tracking.wandb
    if not version_of("wandb"):
        fix = "pip install 'samestep[wandb]', or tracking.wandb=null" if config else ""
        yield Finding("W&B", "failed" if config else "ok", "the package wandb is not installed", fix)
        return
    mode = wandb.resolve_mode((config or wandb.Config()).mode)
    key = "an API key was found" if wandb.has_key() else "no API key was found"
    if mode != "online":
        fix = "wandb login, or set WANDB_API_KEY" if mode == "offline" and not wandb.has_key() else ""
        yield Finding("W&B", "ok", f"{mode}; {key}", fix)
        return
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    try:
        urllib.request.urlopen(host, timeout=_NETWORK_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except OSError as error:
        fix = "let this machine reach it, or set WANDB_MODE=offline and upload with wandb sync"
        yield Finding("W&B", "warning", f"{key}, and {host} does not answer ({error})", fix)
        return
    state: State = "ok" if wandb.has_key() else "failed" if config else "warning"
    yield Finding("W&B", state, f"online; {key}, {host} answers", "" if state == "ok" else "wandb login")


def _hugging_face() -> Iterator[Finding]:
    if not version_of("huggingface-hub"):
        yield Finding("Hugging Face", "ok", "the package huggingface-hub is not installed")
        return
    from huggingface_hub import constants, get_token

    offline = "offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "online"
    token = "a token was found" if get_token() else "no token was found; public models need none"
    yield Finding("Hugging Face", "ok", f"{offline}; {token}; cache {constants.HF_HUB_CACHE}")
