"""`samestep finetune-suite`: tasks x seeds, killed in the middle and run again, and the table."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration import tasks
from tests.integration.commands import Samestep, Start
from tests.waiting import until


def results(folder: Path) -> list[dict[str, object]]:
    file = folder / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_killed_in_the_middle_and_run_again(
    finished_run: Path, tmp_path: Path, start: Start, samestep: Samestep
) -> None:
    files = [tasks.write_task(kind, tmp_path) for kind in ("classification", "tagging")]
    folder = tmp_path / "suite"
    command = ["finetune-suite", finished_run, "--tasks", *files, "--seeds", "1", "--output", folder]
    process = start(*command)
    until(lambda: bool(results(folder)), 100)
    os.killpg(process.popen.pid, signal.SIGKILL)
    process.popen.wait()
    before = results(folder)
    assert len(before) == 1
    again = samestep(*command)
    assert again.code == 0
    found = results(folder)
    assert found[: len(before)] == before
    assert [(row["task"], row["run"]) for row in found[1:]] == [("tagging", "lr-0.003-seed-0")]
    assert "classification" in again.out
    assert "Published: BERT-base." in " ".join(again.out.split())
    page = (folder / "table.html").read_text()
    assert page.count("<tr>") == 3
    once_more = samestep(*command)
    assert (once_more.code, results(folder)) == (0, found)


def test_a_run_that_fails_is_named_with_its_log(finished_run: Path, tmp_path: Path, samestep: Samestep) -> None:
    file = tasks.write_task("classification", tmp_path)
    command = ["finetune-suite", finished_run, "--tasks", file, "--seeds", "1", "--output", tmp_path / "suite"]
    broken = samestep(*command, "data.sequence_length=99")
    assert broken.code == 1
    assert "log.txt" in broken.err
    assert "model.max_positions" in broken.err
    file.write_text(file.read_text().replace("score: accuracy", "score: bleu"))
    assert "score is 'bleu', and the objective gives accuracy" in samestep(*command).message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "nope"], "no task 'nope'.*glue/mrpc.yaml"),
        (["--tasks", "mrpc", "--seeds", "0"], "--seeds must be at least 1"),
        (["--tasks", "mrpc", "mrpc"], "named twice"),
        (["--tasks", "mrpc", "--parallel", "0"], "--parallel must be at least 1"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, tmp_path: Path, samestep: Samestep) -> None:
    import re

    result = samestep("finetune-suite", "nowhere", *arguments, "--output", tmp_path / "suite")
    assert result.code == 2
    assert re.search(message, result.message)
    assert not (tmp_path / "suite").exists()
