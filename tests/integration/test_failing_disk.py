"""Whole commands on a file system of which one operation fails, each one in turn.

A command goes on, or ends with one line that names the fix. Nothing temporary is left, and the same
command then comes to the end that it would have come to.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from data_pipeline.building import pool
from samestep.errors import fix_of
from tests.failing_files import contents, each_failure
from tests.integration.commands import Result, Samestep, losses
from trainer.monitoring import tensorboard
from trainer.monitoring.jsonl import read_rows

Item = TypeVar("Item")
Found = TypeVar("Found")

EVERY = [
    pytest.param(40, marks=pytest.mark.long),
    pytest.param(1, marks=(pytest.mark.chaos, pytest.mark.timeout(3600))),
]
"""Which operations fail: each fortieth, or all of them."""


def each_failure_of(
    command: Callable[[], Result], folder: Path, check: Callable[[str], None], every: int
) -> int:
    """Lets operations of a command in a folder fail; the command is then given again.

    Args:
        check: what the second one has left, after the operation that has failed in the first.
    """
    results: list[Result] = []

    def again(what: str, error: OSError, raised: Exception | None) -> None:
        assert raised is None, what
        result = results[-1]
        if result.code:
            assert fix_of(error) in result.message, (what, result.err)
        left = [name for name in contents(folder.parent) if ".tmp" in name]
        assert not left, what
        second = command()
        assert second.code == 0, (what, second.err)
        check(what)
        shutil.rmtree(folder)

    return each_failure(folder, lambda: results.append(command()), again, every)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_training(every: int, samestep: Samestep, experiment_file: str, tmp_path: Path) -> None:
    """All files of its folder: settings, starts, metrics, ledger, event files, checkpoints."""
    folder = tmp_path / "run"
    settings = (
        "training.steps=4",
        "checkpoint.every=2",
        "data.threads=0",
        "tracking.tensorboard={}",
    )

    def check(what: str) -> None:
        assert list(losses(folder)) == [1, 2, 3, 4], what
        assert list(read_rows(folder / "starts.jsonl")), what
        assert tensorboard.holds(folder), what
        verified = samestep("ledger", "verify", folder)
        assert verified.code == 0, (what, verified.err)

    failures = each_failure_of(
        lambda: samestep("train", experiment_file, f"output={folder}", *settings),
        folder,
        check,
        every,
    )
    assert failures >= 140 // every


def in_this_process(
    items: Iterator[Item], start: Callable[[], Callable[[Item], Found]], workers: int
) -> Generator[tuple[Item, Found], None, None]:
    """`pool.process` without worker processes, in which no operation would fail."""
    function = start()
    for item in items:
        yield item, function(item)


@pytest.mark.parametrize("every", EVERY)
def test_a_build(
    every: int, samestep: Samestep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of a dataset, to the byte."""
    monkeypatch.setattr(pool, "process", in_this_process)
    text, file = tmp_path / "text.txt", tmp_path / "build.json"
    text.write_text("\n\n".join(f"paragraph {n} of a short text {n % 7}" for n in range(60)))
    source = {"kind": "text", "paths": [str(text)], "document": "paragraph"}
    tokenizer = {"path": str(tmp_path / "tokenizer"), "vocab_size": 150}
    settings = {"source": source, "tokenizer": tokenizer, "shard_bytes": 700}
    file.write_text(json.dumps(settings))
    folder = tmp_path / "data" / "dataset"

    def dataset() -> dict[str, bytes]:
        # Counts of packings are only kept to save time.
        return {name: it for name, it in contents(folder).items() if not name.startswith(".cache")}

    def build() -> Result:
        return samestep("data", "build", file, f"output={folder}", "heldout_fraction=0.2")

    assert samestep("data", "tokenizer", file, f"output={folder}").code == 0
    first = build()
    assert first.code == 0, first.err
    undisturbed = dataset()
    shutil.rmtree(folder)

    def check(what: str) -> None:
        assert dataset() == undisturbed, what

    assert each_failure_of(build, folder, check, every) >= 40 // every


@pytest.mark.long
def test_a_report(samestep: Samestep, finished_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "report.html"

    def check(what: str) -> None:
        assert page.read_text().startswith("<!doctype html>"), what

    failures = each_failure_of(
        lambda: samestep("report", finished_run, "--output", page), page.parent, check, every=1
    )
    assert failures >= 6
