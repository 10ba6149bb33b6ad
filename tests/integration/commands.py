"""Running the `samestep` command, and looking at what it did."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from tests.forked import ForkedProcess

SAMESTEP = (str(Path(sys.executable).with_name("samestep")),)

UNFORKED = {"train": "tests/integration/test_failures.py::test_ctrl_c_saves"}
"""Commands that tests start as forks (see `tests.forked`), each with a test that runs it in an
interpreter of its own, as do tests of all other commands."""


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The one paragraph that a user's mistake gets."""
        assert "Traceback" not in self.err, self.err
        assert self.err.count("error: ") == 1, self.err
        return self.err.rpartition("error: ")[2].strip()


Samestep: TypeAlias = Callable[..., Result]
"""Runs a command in this process."""


class Process:
    """A command with the processes it starts, in a session of their own.

    Args:
        forked: whether it is forked from a server that has our modules.
    """

    popen: subprocess.Popen[bytes] | ForkedProcess

    def __init__(
        self,
        command: tuple[str, ...],
        arguments: tuple[object, ...],
        folder: Path,
        forked: bool = False,
    ) -> None:
        self.stderr = folder / f"stderr-{time.monotonic_ns()}"
        self.temporary = folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(folder), os.environ.get("PYTHONPATH")])
            ),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
        }
        words = [*command, *map(str, arguments)]
        with self.stderr.open("w") as stderr:
            if forked:
                self.popen = ForkedProcess(words, environment, Path.cwd(), stderr)
                return
            self.popen = subprocess.Popen(
                words,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=environment,
                start_new_session=True,
            )

    @property
    def workers(self) -> list[int]:
        """The processes that train, by local rank.

        Children of the agent's fork server, or of torchrun.
        """
        (first, *others) = children(self.popen.pid)
        return [first, *others] if others else children(first)

    @property
    def leftovers(self) -> list[Path]:
        """Temporary files outside the run's folder, except the cache that torch keeps."""
        return [
            path for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")
        ]

    def wait_for_step(self, run: Path, step: int) -> None:
        """Returns when the run has logged `step` and committed its checkpoint."""
        while not (
            run / "checkpoints" / f"step-{step:08d}" / "COMMITTED"
        ).exists() or step not in losses(run):
            assert self.popen.poll() is None, self.stderr.read_text()
            time.sleep(0.05)

    def wait(self, timeout: float = 60) -> Result:
        code = self.popen.wait(timeout)
        return Result(code, "", self.stderr.read_text())


class Start(Protocol):
    """Starts a command in the background."""

    def __call__(self, *arguments: object, command: tuple[str, ...] = SAMESTEP) -> Process: ...


def children(pid: int) -> list[int]:
    """The processes that a process has started and that live."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def losses(run: Path) -> dict[int, float]:
    """The training loss of each step, from the run's metrics."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def data_of(page: Path) -> dict[str, Any]:
    """The data of a page of `samestep watch`."""
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL
    )
    data: dict[str, Any] = json.loads(text)
    return data
