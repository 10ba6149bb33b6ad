"""Runs of samestep under torch-xla, in the environment that `make test-xla` sets up.

Here is torch 2.13.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.distributions import write_distribution

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("SAMESTEP_XLA_PYTHON")
XLA = ("accelerator=xla", "strategy=xla_spmd")
# Compilations for this processor in a third of the time; losses are the same to 1e-5.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

Xla: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]
"""Runs a module of this project under torch-xla, on 4 devices that the processor is split into."""
Work: TypeAlias = Callable[..., dict[str, Any]]
"""Runs `worker.py` there; returns its report."""


@functools.cache
def _metadata() -> str:
    """A folder with the entry points of this checkout, which is not installed beside torch-xla."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(write_distribution(Path(folder), "samestep", project["entry-points"]))


def environment(**changes: str) -> dict[str, str]:
    """Of a process under torch-xla."""
    added = {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "4",
        "XLA_FLAGS": _FLAGS,
        "PYTHONPATH": os.pathsep.join((_metadata(), str(ROOT))),
    }
    return {**os.environ, **added, "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1", **changes}


def reports(output: str) -> list[dict[str, Any]]:
    """The lines of JSON among those that gloo writes."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.fixture(scope="session")
def xla() -> Xla:
    if PYTHON is None:
        pytest.skip("there is no torch-xla here; make test-xla sets up an environment with it")

    def run(module: str, *arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
        command = [PYTHON, "-m", module, *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment(**changes), timeout=600
        )

    return run


@pytest.fixture(scope="session")
def work(xla: Xla) -> Work:
    def run(file: str, *overrides: str, resume: int | None = None) -> dict[str, Any]:
        done = xla(
            "tests.xla.worker", file, "start" if resume is None else resume, *XLA, *overrides
        )
        assert done.returncode == 0, done.stderr[-4000:]
        (report,) = reports(done.stdout)
        return report

    return run
