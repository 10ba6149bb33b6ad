"""Bitwise runs that are killed and continued on other processes end in the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from samestep.errors import EXIT_DONE, EXIT_PREEMPTED
from tests.conformance.exact import BITWISE, DROPOUT
from tests.integration.commands import Process, Start
from trainer.checkpoint import integrity, layout

STEPS = 60


def state(run: Path) -> dict[str, torch.Tensor]:
    files = integrity.rank_files(integrity.step_folder(run / "checkpoints", STEPS))
    return dict(layout.read_files(files))


@pytest.mark.chaos
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_killed_and_continued_elsewhere(
    start: Start, experiment_file: str, tmp_path: Path, precision: str
) -> None:
    settings = [
        *BITWISE,
        DROPOUT,
        f"training.precision={precision}",
        f"training.steps={STEPS}",
        "checkpoint.every=5",
        "training.preemption.signals=[SIGTERM]",
    ]

    def train(name: str, processes: int, strategy: str) -> Process:
        return start(
            *("train", experiment_file, "--processes", processes, *settings),
            *(f"strategy={strategy}", f"output={tmp_path / name}"),
        )

    assert train("undisturbed", 1, "single").wait(300).code == EXIT_DONE
    run = tmp_path / "run"
    first = train("run", 5, "fsdp")
    first.wait_for_step(run, 10)
    os.killpg(first.popen.pid, signal.SIGKILL)
    first.popen.wait()
    second = train("run", 3, "ddp")
    second.wait_for_step(run, 25)
    second.popen.send_signal(signal.SIGTERM)
    assert second.wait(120).code == EXIT_PREEMPTED
    third = train("run", 7, "fsdp")
    third.wait_for_step(run, 45)
    os.killpg(third.popen.pid, signal.SIGKILL)
    third.popen.wait()
    assert train("run", 1, "single").wait(300).code == EXIT_DONE
    expected, found = state(tmp_path / "undisturbed"), state(run)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    heads = [
        (folder / "ledger.jsonl").read_text().splitlines()[-1].rpartition('"head"')[2]
        for folder in (run, tmp_path / "undisturbed")
    ]
    assert heads[0] == heads[1]
