"""`samestep doctor`: does this machine do what a run will ask of it? Each answer was tried out, not
looked up.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch

from trainer import __version__, storage
from trainer.accelerators import version_of
from trainer.accelerators.trial import OWN_ENVIRONMENT, software
from trainer.findings import Check, Finding, State, tried
from trainer.metrics import check_installed
from trainer.monitoring import wandb
from trainer.strategies import trial
from trainer.training.experiment import Experiment

_DISK_BYTES = 64 * 2**20
_SLOW_DISK = 50e6  # bytes per second
_NETWORK_SECONDS = 5.0
_BYTES_PER_PARAMETER = 12  # of a checkpoint: the weight and Adam's two moments in fp32


def examine(experiment: Experiment | None, processes: int | None) -> Iterator[Finding]:
    """Looks at everything a run needs, one after the other; a check that breaks is a finding, too.

    Args:
        experiment: what is to be run here; None looks at the machine alone.
        processes: how many are to meet for the all-reduce; None takes one a GPU, or two on the CPU.
    """
    checks: list[Check] = [("software", _software)]
    if experiment is None:
        checks += trial.checks(None, None, None, processes)
        checks.append(("disk", lambda: _disk("disk", Path.cwd(), 0)))
    else:
        precision = experiment.training.precision
        checks += trial.checks(experiment.accelerator, experiment.strategy, precision, processes)
        checks += _checks_of(experiment)
    checks += [("W&B", lambda: _wandb(experiment)), ("Hugging Face", _hugging_face)]
    for check in checks:
        yield from tried(*check)


def _checks_of(experiment: Experiment) -> list[Check]:
    checkpoints = experiment.checkpoint.folder
    with torch.device("meta"):
        parameters = sum(
            each.numel() for each in experiment.build_model().parameters() if each.requires_grad
        )
    kept = experiment.checkpoint.keep_last + (experiment.training.best is not None)
    needed = parameters * _BYTES_PER_PARAMETER * (kept + 1)
    checks: list[Check] = [("dataset", lambda: _dataset(experiment))]
    checks.append(
        ("output", lambda: _disk("output", Path(experiment.output), 0 if checkpoints else needed))
    )
    if checkpoints and storage.is_url(checkpoints):
        checks.append(("checkpoints", lambda: _object_store(checkpoints)))
    elif checkpoints:
        checks.append(("checkpoints", lambda: _disk("checkpoints", Path(checkpoints), needed)))
    if metrics := experiment.objective.task.metrics:
        checks.append(("metrics", lambda: _metrics(metrics)))
    if any(storage.is_url(path) for path in experiment.data.paths):
        cache = (
            experiment.data.cache
            or os.environ.get("SAMESTEP_CACHE")
            or Path.home() / ".cache" / "samestep"
        )
        checks.append(("cache", lambda: _disk("cache", Path(cache), 0)))
    return checks


def _software() -> Iterator[Finding]:
    versions = f"samestep {__version__}, {software()}, Python {platform.python_version()}"
    yield Finding("software", "ok", versions)
    if version_of("samestep") is None:  # it runs from the folder of its source
        return
    extras: dict[str, list[str]] = {}
    for requirement in metadata.requires("samestep") or ():
        if match := re.match(r"([\w.-]+).*; *extra *== *['\"](\w+)", requirement):
            extras.setdefault(match[2], []).append(match[1])
    for extra in ("dev", *OWN_ENVIRONMENT):
        extras.pop(extra, None)
    missing = [extra for extra, packages in extras.items() if not all(map(version_of, packages))]
    there = ", ".join(extra for extra in extras if extra not in missing)
    fix = f"if you need them: pip install 'samestep[{','.join(missing)}]'" if missing else ""
    yield Finding(
        "extras",
        "ok",
        f"{there or 'none'}{'; not there: ' * bool(missing)}{', '.join(missing)}",
        fix,
    )


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
    """Writes a file in the folder, or in the nearest one above it that exists, and takes it away
    again.
    """
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
            subject,
            "failed",
            f"cannot write in {existing}: {error.strerror}",
            "give access or choose another",
        )
        return
    free = shutil.disk_usage(existing).free
    found = f"{folder}: {free / 1e9:,.0f} GB free, {speed / 1e6:,.0f} MB/s with fsync"
    if free < needed:
        fix = f"the checkpoints kept at a time take {needed / 1e9:.3g} GB: make room, or lower checkpoint.keep_last"
        yield Finding(subject, "failed", found, fix)
    elif speed < _SLOW_DISK:
        yield Finding(
            subject,
            "warning",
            found,
            "saving will take long; a local or parallel file system is faster",
        )
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
    yield Finding(
        "checkpoints",
        "ok" if right else "failed",
        found if right else f"{found}, and it had changed",
    )


def _wandb(experiment: Experiment | None) -> Iterator[Finding]:
    config = None if experiment is None else experiment.tracking.wandb
    if not version_of("wandb"):
        fix = "pip install 'samestep[wandb]', or tracking.wandb=null" if config else ""
        yield Finding(
            "W&B", "failed" if config else "ok", "the package wandb is not installed", fix
        )
        return
    mode = wandb.resolve_mode((config or wandb.Config()).mode)
    key = "an API key was found" if wandb.has_key() else "no API key was found"
    if mode != "online":
        fix = (
            "wandb login, or set WANDB_API_KEY" if mode == "offline" and not wandb.has_key() else ""
        )
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
    yield Finding(
        "W&B", state, f"online; {key}, {host} answers", "" if state == "ok" else "wandb login"
    )


def _hugging_face() -> Iterator[Finding]:
    if not version_of("huggingface-hub"):
        yield Finding("Hugging Face", "ok", "the package huggingface-hub is not installed")
        return
    from huggingface_hub import constants, get_token

    offline = "offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "online"
    token = "a token was found" if get_token() else "no token was found; public models need none"
    yield Finding("Hugging Face", "ok", f"{offline}; {token}; cache {constants.HF_HUB_CACHE}")
