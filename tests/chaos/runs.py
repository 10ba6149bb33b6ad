"""A run that things happen to.

Started through the command line, watched, and compared with one left alone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.integration.commands import Process, Samestep, Start, losses

PATIENCE = 120.0  # seconds; a wait that takes longer has failed


@dataclass(frozen=True)
class Run:
    """A run folder, which one command after another trains.

    Attributes:
        folder: its output.
        experiment: the file of its experiment.
        settings: overrides that all of its commands have.
        start: starts a command.
    """

    folder: Path
    experiment: str
    settings: tuple[str, ...]
    start: Start

    def train(self, *arguments: object) -> Process:
        """Starts a training in the background, with more overrides and flags."""
        return self.start(
            "train", self.experiment, f"output={self.folder}", *self.settings, *arguments
        )


def moments(process: Process) -> Iterator[None]:
    """Yields every hundredth of a second for as long as a command runs, and once more.

    Fails if that takes long.
    """
    deadline = time.monotonic() + PATIENCE
    while process.popen.poll() is None:
        assert time.monotonic() < deadline, process.stderr.read_text()
        yield
        time.sleep(0.01)
    yield


def kill(process: Process) -> None:
    """Kills a command and everything it has started at once, like a power cut."""
    os.killpg(process.popen.pid, signal.SIGKILL)
    process.popen.wait()


def assert_same_run(samestep: Samestep, run: Path, undisturbed: Path) -> None:
    """The losses of all steps, the final weights, and a ledger that proves what the run was fed.

    Biases of attention's keys are left out: their gradient is 0, so they hold rounding errors.
    """
    expected, found = losses(undisturbed), losses(run)
    assert list(found) == list(expected)
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)
    verdict = samestep("ledger", "verify", run)
    assert verdict.code == 0, verdict.out
    weights, others = (_exported(samestep, folder) for folder in (run, undisturbed))
    assert weights.keys() == others.keys()
    for name, values in weights.items():
        if name.endswith("key.bias"):
            continue
        np.testing.assert_allclose(values, others[name], rtol=0, atol=1e-5, err_msg=name)


def _exported(samestep: Samestep, run: Path) -> dict[str, np.ndarray]:
    folder = run.with_name(f"{run.name}-exported")
    if not folder.exists():
        result = samestep("export", run, folder)
        assert result.code == 0, result.err
    return load_file(folder / "model.safetensors")
