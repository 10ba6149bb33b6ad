"""`samestep ledger` on real runs, with restarts and checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.commands import Samestep
from trainer.checkpoint.integrity import step_folder
from trainer.training.ledger import GENESIS, chain


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def rows(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


def test_a_run_that_went_back_has_the_head_of_one_that_did_not(
    samestep: Samestep, experiment_file: str, finished_run: Path, run: Path
) -> None:
    """In other micro-batches. The head, which is in the checkpoint, too, says that both were fed
    the same.
    """
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    overrides = [
        "checkpoint.every=4",
        "training.evaluate_every=12",
        "training.micro_batch_size=3",
        "data.threads=2",
    ]
    assert samestep("train", experiment_file, f"output={run}", *overrides).code == 0
    assert rows(run)[-1]["head"] == rows(finished_run)[-1]["head"]
    meta = json.loads((step_folder(run / "checkpoints", 12) / "meta.json").read_text())
    assert meta["ledger"]["head"] == rows(run)[-1]["head"]

    result = samestep("ledger", "verify", run)
    assert result.code == 0, result.out
    assert "verified: 12 steps consumed 120 examples" in result.out


@pytest.mark.long
def test_a_step_is_listed_for_people_and_for_programs(
    samestep: Samestep, finished_run: Path
) -> None:
    text, found = (
        samestep("ledger", "step", finished_run, 3, *flags).out for flags in ((), ("--json",))
    )
    examples = json.loads(found)["examples"]
    assert [example["number"] for example in examples] == list(range(20, 30))
    first = examples[0]["documents"][0]
    assert f"example 20 (pass 1): {first['file']}:{first['line']}" in text
    refused = samestep("ledger", "step", finished_run, 13).message
    assert refused == f"STEP is 13, and the ledger of {finished_run} has steps 1 to 12."


def test_a_ledger_that_was_written_anew_does_not_fit_the_checkpoint(
    samestep: Samestep, run: Path
) -> None:
    """Though its chain holds: its last row was left out."""
    head, lines = GENESIS, []
    for row in rows(run)[:-1]:
        head = chain(head, row)
        lines.append(json.dumps({**row, "head": head}) + "\n")
    (run / "ledger.jsonl").write_text("".join(lines))
    result = samestep("ledger", "verify", run)
    assert result.code == 1
    assert "ledger.jsonl does not lead to the checkpoint of step 12" in result.out
    assert "NOT VERIFIED" in result.out
    assert "by what is left of the ledger, 11 steps consumed 110 examples" in result.out
    assert samestep("ledger", "verify", run.parent).code == 2
