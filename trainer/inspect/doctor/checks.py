"""Everything that `samestep doctor` checks, in order; what a run needs beside its devices."""

from __future__ import annotations

import math
import os
import platform
import re
import secrets
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from data_pipeline.reading.cache import ShardCache
from samestep import __version__, storage
from samestep.environment import open_files
from samestep.errors import fix_of, install_command
from samestep.findings import Check, Finding, State, tried
from samestep.storage import objects
from trainer.accelerators import version_of
from trainer.inspect import preflight
from trainer.inspect.doctor import devices
from trainer.metrics import check_installed
from trainer.monitoring import wandb
from trainer.strategies.neighbor import CONNECTIONS, FEWEST_CONNECTIONS, OTHER_FILES
from trainer.training.experiment import Experiment

_DISK_BYTES = 64 * 2**20
_SLOW_DISK = 50e6  # bytes per second
_NETWORK_SECONDS = 5.0
_OWN_ENVIRONMENT = ("tpu",)  # extras that need another torch
_MANY_RANKS = 1024  # that the machine of rank 0 should be able to host
_BYTES_PER_PARAMETER = 12  # of a checkpoint: the weight and Adam's two moments in fp32


def examine(experiment: Experiment | None, processes: int | None) -> Iterator[Finding]:
    """Tries everything that a run needs; a check that raises is a finding, too.

    Args:
        experiment: to run here; None examines the machine alone.
        processes: of the all-reduce; None takes one per GPU, or two on the CPU.
    """
    # Lazy, so findings appear one by one, and a check that hangs is the one after the last line.
    checks: list[Check] = [("software", _software), ("open files", _open_files)]
    if experiment is None:
        checks += devices.checks(None, None, None, processes)
        checks.append(("disk", lambda: _disk("disk", Path.cwd(), 0)))
    else:
        precision = experiment.training.precision
        checks += devices.checks(experiment.accelerator, experiment.strategy, precision, processes)
        checks += _checks_of(experiment)
    checks += [("W&B", lambda: _wandb(experiment)), ("Hugging Face", _hugging_face)]
    for check in checks:
        yield from tried(*check)


def _checks_of(experiment: Experiment) -> list[Check]:
    """Returns the checks of an experiment's dataset, folders and packages."""
    with torch.device("meta"):
        parameters = experiment.build_model().parameters()
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    # The newest checkpoints, the best one, and the one that is being written.
    kept = experiment.checkpoint.keep_last + (experiment.training.best is not None) + 1
    needed = trained * _BYTES_PER_PARAMETER * kept
    folder, output = experiment.checkpoint.folder, Path(experiment.output)
    checks: list[Check] = [
        ("dataset", lambda: _dataset(experiment)),
        ("output", lambda: _disk("output", output, 0 if folder else needed)),
    ]
    if folder and storage.is_url(folder):
        checks.append(("checkpoints", lambda: _object_store(folder)))
    elif folder:
        checks.append(("checkpoints", lambda: _disk("checkpoints", Path(folder), needed)))
    if metrics := experiment.objective.task.metrics:
        checks.append(("metrics", lambda: _metrics(metrics)))
    probed = [probe.path for probe in experiment.probes.values()]
    if any(map(storage.is_url, [*experiment.data.paths, *probed])):
        shards = partial(ShardCache.open_folder, experiment.data.cache)
        checks.append(("cache", lambda: _disk("cache", shards().folder.parent, 0)))
    return checks


def _software() -> Iterator[Finding]:
    versions = f"samestep {__version__}, {_versions()}, Python {platform.python_version()}"
    yield Finding("software", "ok", versions)
    # A requirement of an extra reads, for example: wandb>=0.18; extra == "wandb". Without an
    # installed package, samestep runs from its source folder, and has no such list.
    requirements = (metadata.requires("samestep") or ()) if version_of("samestep") else ()
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        if match := re.match(r"([\w.-]+).*; *extra *== *['\"](\w+)", requirement):
            extras.setdefault(match[2], []).append(match[1])
    for extra in ("dev", *_OWN_ENVIRONMENT):
        extras.pop(extra, None)
    if not extras:
        return
    missing = [extra for extra, packages in extras.items() if not all(map(version_of, packages))]
    found = ", ".join(extra for extra in extras if extra not in missing) or "none"
    fix = ""
    if missing:
        found += f"; not installed: {', '.join(missing)}"
        fix = f"if you need them: {install_command(*missing)}"
    yield Finding("extras", "ok", found, fix)


def _open_files() -> Iterator[Finding]:
    """Says how many ranks can connect to a store on this machine; each has several connections."""
    if (limits := open_files(0)) is None:
        return
    soft, hard = limits

    def ranks(limit: float, each: int) -> str:
        return (
            "any number of"
            if math.isinf(limit)
            else f"{max(0, int(limit) - OTHER_FILES) // each:,}"
        )

    found = (
        f"limit {soft:,}, which a run raises to at most {hard:,}: enough to host "
        f"{ranks(hard, CONNECTIONS)} ranks, and {ranks(soft, FEWEST_CONNECTIONS)} under torchrun, "
        "which does not raise it"
    )
    if hard >= _MANY_RANKS * CONNECTIONS + OTHER_FILES:
        yield Finding("open files", "ok", found)
        return
    fix = "for larger runs raise the hard limit (LimitNOFILE of systemd, --ulimit nofile of Docker)"
    yield Finding("open files", "warning", found, fix)


def _versions() -> str:
    """The versions of PyTorch and of the packages that drive devices."""
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        build += f", NCCL {'.'.join(map(str, nccl))}"
    versions = f"torch {torch.__version__} ({build})"
    for package in ("torch-xla", "torch_tpu", "libtpu", "jax"):
        if version := version_of(package):
            versions += f", {package} {version}"
    return versions


def _dataset(experiment: Experiment) -> Iterator[Finding]:
    dataset = experiment.data.open()
    preflight.check_data(experiment, dataset, [1])
    yield Finding(
        "dataset", "ok", f"{dataset.name}: vocabulary {dataset.tokenizer.vocabulary.size:,}"
    )


def _metrics(names: Sequence[str]) -> Iterator[Finding]:
    check_installed(names)
    yield Finding("metrics", "ok", ", ".join(names))


def _disk(subject: str, folder: Path, needed: float) -> Iterator[Finding]:
    """Writes a temporary file in the folder, or in the nearest one above it that exists."""
    folder = folder.resolve()
    existing = preflight.nearest_existing(folder)
    block = os.urandom(2**20)  # random, as a file system may compress
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".samestep-doctor-") as file:
            started = time.perf_counter()
            for _ in range(_DISK_BYTES // len(block)):
                file.write(block)
            # Without fsync this would measure the page cache.
            file.flush()
            os.fsync(file.fileno())
            speed = _DISK_BYTES / (time.perf_counter() - started)
    except OSError as error:
        found = f"cannot write in {existing}: {error.strerror}"
        fix = f"{fix_of(error, 'make it writable')}, or choose another folder"
        yield Finding(subject, "failed", found, fix)
        return
    free = shutil.disk_usage(existing).free
    found = f"{folder}: {free / 1e9:,.0f} GB free, {speed / 1e6:,.0f} MB/s with fsync"
    state: State = "ok"
    fix = ""
    if free < needed:
        state = "failed"
        fix = (
            f"the checkpoints kept at a time take {needed / 1e9:.3g} GB: free some space, or lower "
            "checkpoint.keep_last"
        )
    elif speed < _SLOW_DISK:
        state = "warning"
        fix = "saving will take long; a local or parallel file system is faster"
    yield Finding(subject, state, found, fix)


def _object_store(url: str) -> Iterator[Finding]:
    address, content = f"{url.rstrip('/')}/.samestep-doctor-{secrets.token_hex(8)}", os.urandom(64)
    started = time.perf_counter()
    # A real object shows credentials, permissions and the endpoint at once.
    objects.write(address, content)
    same = objects.read(address) == content
    objects.remove(address)
    seconds = time.perf_counter() - started
    found = f"{storage.shown(url)}: wrote, read and removed an object in {seconds:.2f} s"
    if same:
        yield Finding("checkpoints", "ok", found)
    else:
        yield Finding("checkpoints", "failed", f"{found}, and its content was another one")


def _wandb(experiment: Experiment | None) -> Iterator[Finding]:
    config = None if experiment is None else experiment.tracking.wandb
    if not version_of("wandb"):
        missing: State = "ok" if config is None else "failed" if config.required else "warning"
        fix = f"{install_command('wandb')}, or tracking.wandb=null" if config else ""
        yield Finding("W&B", missing, "the package wandb is not installed", fix)
        return
    mode, has_key = wandb.resolve_mode("auto" if config is None else config.mode), wandb.has_key()
    key = "an API key was found" if has_key else "no API key was found"
    if mode != "online":
        fix = "wandb login, or set WANDB_API_KEY" if mode == "offline" and not has_key else ""
        yield Finding("W&B", "ok", f"{mode}; {key}", fix)
        return
    host = wandb.server()
    try:
        urllib.request.urlopen(host, timeout=_NETWORK_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # an error page is an answer, too
    except OSError as error:
        fix = "let this machine reach it, or set WANDB_MODE=offline and upload with wandb sync"
        yield Finding("W&B", "warning", f"{key}, and {host} does not answer ({error})", fix)
        return
    found = f"online; {key}, {host} answers"
    if has_key:
        yield Finding("W&B", "ok", found)
    else:
        yield Finding("W&B", "failed" if config else "warning", found, "wandb login")


def _hugging_face() -> Iterator[Finding]:
    if not version_of("huggingface-hub"):
        yield Finding("Hugging Face", "ok", "the package huggingface-hub is not installed")
        return
    from huggingface_hub import constants, get_token

    mode = "offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "online"
    token = "a token was found" if get_token() else "no token was found; public models need none"
    yield Finding("Hugging Face", "ok", f"{mode}; {token}; cache {constants.HF_HUB_CACHE}")
