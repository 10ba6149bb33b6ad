"""The ledger's chain: rows cannot be changed, and an interrupted run writes the same rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from trainer.training.ledger import GENESIS, Ledger, intact_rows

BASIS = {"seed": 7, "data": {"lanes": 4}}
SIZE = 10


def run_steps(ledger: Ledger, steps: Iterable[int]) -> Ledger:
    """Consumes ten examples a step and writes a row every three steps, as a run does."""
    for step in steps:
        ledger.add_step(step, [[SIZE * (step - 1), SIZE * step]])
        if step % 3 == 0:
            ledger.close_row(f"{step:016x}")
    return ledger


def begin(path: Path, steps: Iterable[int] = ()) -> Ledger:
    ledger = Ledger()
    ledger.open(path, 0)
    ledger.enter(0, 0, BASIS, [])
    return run_steps(ledger, steps)


def resume(path: Path, state: dict[str, object], step: int) -> Ledger:
    """A new process continues from the state in a checkpoint's meta.json."""
    ledger = Ledger()
    ledger.load_state_dict(json.loads(json.dumps(state)), step)
    ledger.open(path, step)
    ledger.enter(step, 0, BASIS, [])
    return ledger


def content(path: Path) -> list[dict[str, object]]:
    return [
        {name: value for name, value in row.items() if name != "time"}
        for row, _ in intact_rows(path)
    ]


def test_an_interrupted_run_writes_the_rows_of_one_that_was_not(tmp_path: Path) -> None:
    """Its checkpoint is from between two rows, rows follow it, and the last of them is torn."""
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    undisturbed = begin(whole, range(1, 13))
    state = begin(cut, range(1, 6)).state_dict()
    run_steps(resume(cut, state, 5), range(6, 12))
    os.truncate(cut, cut.stat().st_size - 5)
    again = run_steps(resume(cut, state, 5), range(6, 13))
    assert content(cut) == content(whole)
    assert len(content(whole)) == 5
    assert again.head == undisturbed.head != GENESIS


def test_ranks_without_a_file_have_the_same_head(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.enter(0, 0, BASIS, [])
    assert (
        run_steps(ledger, range(1, 10)).head == begin(tmp_path / "ledger.jsonl", range(1, 10)).head
    )


@pytest.mark.parametrize(
    ("tamper", "left"),
    [
        (lambda lines: [*lines[:2], lines[2].replace(b'"step": 6', b'"step": 5'), *lines[3:]], 2),
        (
            lambda lines: [
                *lines[:2],
                lines[2].replace(b'"digest": "0', b'"digest": "1'),
                *lines[3:],
            ],
            2,
        ),
        (
            lambda lines: [
                *lines[:2],
                lines[2].replace(b'"kind"', b'"more": 1, "kind"'),
                *lines[3:],
            ],
            2,
        ),
        (lambda lines: [*lines[:2], *lines[3:]], 2),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], 1),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], 2),
        (lambda lines: lines[1:], 0),
        (lambda lines: [*lines[:-1], lines[-1][:-3]], 4),
        (lambda lines: [*lines[:-1], b"[1]\n"], 4),
        (lambda lines: [lines[0], b"\xff\n", *lines[1:]], 1),
    ],
    ids=[
        "step",
        "digest",
        "field",
        "removed",
        "swapped",
        "repeated",
        "beginning",
        "torn",
        "no row",
        "no text",
    ],
)
def test_rows_are_intact_up_to_what_was_changed(tmp_path: Path, tamper, left: int) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "ledger.jsonl"
    begin(path, range(1, 13))
    path.write_bytes(b"".join(tamper(path.read_bytes().splitlines(keepends=True))))
    assert len(list(intact_rows(path))) == left


@pytest.mark.parametrize("damage", ["changed", "removed", "another run's"])
def test_a_ledger_that_does_not_lead_to_the_checkpoint_is_set_aside_and_training_goes_on(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ledger.jsonl"
    state = begin(path, range(1, 7)).state_dict()
    before = path.read_bytes()
    match damage:
        case "changed":
            path.write_bytes(before.replace(b'"step": 3', b'"step": 2'))
        case "removed":
            path.unlink()
        case "another run's":
            path.unlink()
            begin(path, range(1, 4)).enter(3, 1, BASIS, [])
    for _ in range(2):  # the second start is from the same checkpoint, and no other damage is seen
        ledger = run_steps(resume(path, state, 6), range(7, 10))
    assert caplog.text.count("does not lead to the checkpoint of step 6") == 1
    rows = content(path)
    assert [(row["kind"], row["step"]) for row in rows] == [("lost", 6), ("order", 6), ("fed", 9)]
    assert rows[0]["before"] == state["head"]
    assert rows[-1]["head"] == ledger.head
    assert path.with_suffix(".lost").exists() == (damage != "removed")


def test_a_row_is_about_steps_of_one_size_and_order(tmp_path: Path) -> None:
    """So that the examples of each of its steps are known."""
    ledger = begin(tmp_path / "ledger.jsonl", [1, 2])
    assert not ledger.must_close_row(0, BASIS, SIZE)
    assert ledger.must_close_row(0, BASIS, SIZE + 1)
    assert ledger.must_close_row(0, {**BASIS, "seed": 8}, SIZE)
    assert ledger.must_close_row(1, BASIS, SIZE)
    ledger.close_row("")
    assert not ledger.must_close_row(1, BASIS, SIZE + 1)


def test_examples_around_excluded_ones_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = begin(path)
    ledger.exclude(1, 0, [[5, 8]], "for the test")
    for step, examples in enumerate(([[0, 5], [8, 13]], [[13, 23]]), start=1):
        ledger.add_step(step, examples)
    ledger.close_row("")
    ledger.enter(2, 0, BASIS, [[5, 8]])  # which has been told
    ledger.enter(2, 0, BASIS, [[5, 8], [90, 99]])
    kinds = [(row["kind"], row.get("examples")) for row in content(path)[1:]]
    assert kinds == [
        ("excluded", [[5, 8]]),
        ("fed", [[0, 5], [8, 23]]),
        ("excluded", [[5, 8], [90, 99]]),
    ]
