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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer import accelerators, storage
from trainer.accelerators import Accelerator, Precision, cpu, cuda
from trainer.errors import SamestepError
from trainer.experiment import Experiment
from trainer.monitoring import wandb
from trainer.strategies.world import World

State = Literal["ok", "warning", "failed"]

_STYLES: dict[State, str] = {"ok": "green", "warning": "yellow", "failed": "bold red"}
_REDUCE_BYTES = 64 * 2**20
_DISK_BYTES = 64 * 2**20
_SLOW_DISK = 50e6  # bytes per second
_SPAWN_SECONDS = 120.0
_NETWORK_SECONDS = 5.0
_BYTES_PER_PARAMETER = 12  # of a checkpoint: the weight and Adam's two moments in fp32


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        subject: what was looked at.
        state: whether a run can rely on it.
        found: what was seen.
        fix: what to do about it; empty where there is nothing to do.
    """

    subject: str
    state: State
    found: str
    fix: str = ""


def report(findings: Iterable[Finding], console: Console) -> bool:
    """Prints a table of findings; returns whether a run can go ahead."""
    table, states = Table(show_header=False, box=None, padding=(0, 2, 0, 0)), []
    with console.status("trying things out"):
        for finding in findings:
            states.append(finding.state)
            text = Text(finding.found)
            if finding.fix:
                text.append(f"\n→ {finding.fix}", style="dim" if finding.state == "ok" else "bold")
            table.add_row(Text(finding.state, style=_STYLES[finding.state]), finding.subject, text)
    console.print(table)
    return "failed" not in states


def examine(experiment: Experiment | None, processes: int | None) -> Iterator[Finding]:
    """Looks at everything a run needs, one after the other; a check that breaks is a finding, too.

    Args:
        experiment: what is to be run here; None looks at the machine alone.
        processes: how many are to meet for the all-reduce; None takes one a GPU, or two on the CPU.
    """
    wanted = None if experiment is None else experiment.accelerator
    on_cpu = isinstance(wanted, cpu.Config)
    gpus = 0 if on_cpu else torch.cuda.device_count()
    precision: Precision = "bf16" if gpus else "fp32"
    if experiment is not None:
        precision = experiment.training.precision
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("software", _software),
        ("devices", lambda: _devices(wanted)),
        *((f"device {i}", lambda i=i: _matmul(cuda.CudaAccelerator(i), f"device {i}", precision)) for i in range(gpus)),
    ]
    if not gpus:
        checks.append(("processor", lambda: _matmul(cpu.CpuAccelerator(), "processor", precision)))
    checks.append(("all-reduce", lambda: _all_reduce(gpus, processes or gpus or 2)))
    if experiment is None:
        checks.append(("disk", lambda: _disk("disk", Path.cwd(), 0)))
    else:
        checks += _checks_of(experiment)
    checks += [("W&B", lambda: _wandb(experiment)), ("Hugging Face", _hugging_face)]
    for subject, check in checks:
        try:
            yield from check()
        except SamestepError as error:
            yield Finding(subject, "failed", str(error))
        except Exception as error:
            yield Finding(subject, "failed", f"{type(error).__name__}: {error}")


def _checks_of(experiment: Experiment) -> list[tuple[str, Callable[[], Iterator[Finding]]]]:
    checkpoints = experiment.checkpoint.folder
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in experiment.model.build().parameters())
    needed = parameters * _BYTES_PER_PARAMETER * (experiment.checkpoint.keep_last + 1)
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [("dataset", lambda: _dataset(experiment))]
    checks.append(("output", lambda: _disk("output", Path(experiment.output), 0 if checkpoints else needed)))
    if checkpoints and storage.is_url(checkpoints):
        checks.append(("checkpoints", lambda: _object_store(checkpoints)))
    elif checkpoints:
        checks.append(("checkpoints", lambda: _disk("checkpoints", Path(checkpoints), needed)))
    if any(storage.is_url(path) for path in experiment.data.paths):
        cache = experiment.data.cache or os.environ.get("SAMESTEP_CACHE") or Path.home() / ".cache" / "samestep"
        checks.append(("cache", lambda: _disk("cache", Path(cache), 0)))
    return checks


def _software() -> Iterator[Finding]:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    if torch.cuda.is_available() and dist.is_nccl_available():
        build += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"  # type: ignore[no-untyped-call]
    versions = f"samestep {metadata.version('samestep')}, torch {torch.__version__} ({build})"
    yield Finding("software", "ok", f"{versions}, Python {platform.python_version()}")
    extras: dict[str, list[str]] = {}
    for requirement in metadata.requires("samestep") or ():
        if match := re.match(r"([\w.-]+).*; *extra *== *['\"](\w+)", requirement):
            extras.setdefault(match[2], []).append(match[1])
    extras.pop("dev", None)
    missing = [extra for extra, packages in extras.items() if not all(map(_installed, packages))]
    there = ", ".join(extra for extra in extras if extra not in missing)
    fix = f"if you need them: pip install 'samestep[{','.join(missing)}]'" if missing else ""
    yield Finding("extras", "ok", f"{there or 'none'}{'; not there: ' * bool(missing)}{', '.join(missing)}", fix)


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _devices(wanted: Any) -> Iterator[Finding]:
    """What training would run on, given the experiment's accelerator; None leaves it to the machine."""
    if isinstance(wanted, cpu.Config):
        yield Finding("devices", "ok", "the CPU, as the experiment asks for it")
    elif torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            accelerator = cuda.CudaAccelerator(index)
            major, minor = torch.cuda.get_device_capability(index)
            free = accelerator.memory() / 2**30
            yield Finding(f"device {index}", "ok", f"{accelerator.description}, {free:.0f} free, sm_{major}{minor}")
    elif wanted is not None:
        wanted.build()  # says why it cannot be had
    elif reason := cuda.unusable():
        yield Finding("devices", "failed", f"training would run on the CPU: {reason}")
    else:
        yield Finding("devices", "ok", "no GPU: training would run on the CPU")


def _matmul(accelerator: Accelerator, subject: str, precision: Precision) -> Iterator[Finding]:
    """The right result of a product, and the speed of large ones.

    Entries of -1, 0 and 1 and sums of 128 terms are exact in every precision and every order of summation.
    """
    dtype = accelerators.DTYPES[precision]
    exact = ((7 * torch.arange(512).unsqueeze(1) + torch.arange(128) ** 2) % 3 - 1).double()
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
    if peak and speed < 0.4 * peak:
        fix = "see nvidia-smi -q for other processes, heat and power limits"
        yield Finding(subject, "warning", f"{found}: {speed / peak:.0%} of the data sheet's", fix)
    else:
        yield Finding(subject, "ok", found + (f", {speed / peak:.0%} of the data sheet's" if peak else ""))


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
    if not _installed("wandb"):
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
    if not _installed("huggingface-hub"):
        yield Finding("Hugging Face", "ok", "the package huggingface-hub is not installed")
        return
    from huggingface_hub import constants, get_token

    offline = "offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "online"
    token = "a token was found" if get_token() else "no token was found; public models need none"
    yield Finding("Hugging Face", "ok", f"{offline}; {token}; cache {constants.HF_HUB_CACHE}")
