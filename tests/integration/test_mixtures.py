"""A run over several datasets, through the command line.

Changed, refused, accepted, resized and proven.
"""

import json
from pathlib import Path

import pytest

from tests.integration.commands import Samestep, losses


def sources(parts: dict[str, Path], **weights: float) -> str:
    return "data.sources=" + json.dumps(
        [{"path": str(parts[name]), "weight": w} for name, w in weights.items()]
    )


@pytest.mark.long
def test_a_mixture_trains_changes_and_is_proven(
    samestep: Samestep, experiment_file: str, parts: dict[str, Path], tmp_path: Path
) -> None:
    common = (
        "data.path=null",
        "training.global_batch_size=31",
        "schedule.warmup_steps=0",
        "checkpoint.every=3",
    )
    change = "data.weights=" + json.dumps([{"step": 4, "weights": {"a": 1, "b": 0, "c": 9}}])
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    evaluate = "training.evaluate_every=12"
    mixture = sources(parts, a=0.5, b=0.3, c=0.2)
    result = samestep(
        "train", experiment_file, f"output={whole}", *common, mixture, change, evaluate
    )
    assert result.code == 0
    assert "data         a 0.5, b 0.3, c 0.2; after step 4 a 1, b 0, c 9" in result.err
    for steps in (3, 12):  # the weights of steps to come are not known yet at the beginning
        weights = (change,) if steps > 3 else ()
        run = (f"output={cut}", f"training.steps={steps}", *common, mixture, *weights)
        assert samestep("train", experiment_file, *run).code == 0
    ledgers = [(run / "ledger.jsonl").read_text() for run in (whole, cut)]
    fed = [
        [json.loads(line).get("digest") for line in ledger.splitlines() if '"fed"' in line]
        for ledger in ledgers
    ]
    assert fed[0] == fed[1]
    assert samestep("ledger", "verify", cut).code == 0

    other = ("training.steps=15", *common, sources(parts, a=1, c=1))
    refused = samestep("train", experiment_file, f"output={cut}", *other)
    assert refused.code == 1
    assert "set data.on_change=accept to use the new mixture from example 372" in refused.message
    accepted = samestep("train", experiment_file, f"output={cut}", *other, "data.on_change=accept")
    assert accepted.code == 0, accepted.err
    assert max(losses(cut)) == 15
    missing = samestep("ledger", "verify", cut)
    assert missing.code == 1
    again = sources(parts, a=1, b=0, c=1)
    proven = samestep("ledger", "verify", cut, again)
    assert proven.code == 0, proven.out


@pytest.mark.parametrize("action", ["{action: skip}", "{action: rewind, around: 1}"])
def test_a_skipped_step_delays_a_change_that_is_still_to_come(
    samestep: Samestep, experiment_file: str, parts: dict[str, Path], tmp_path: Path, action: str
) -> None:
    """The same in a run that was stopped since, whose ledger therefore has the same head."""
    settings = [
        "data.path=null",
        sources(parts, a=1, b=0),
        "data.weights=[{step: 8, weights: {a: 0, b: 1}}]",
        "objective={kind: tests.sick_objective, sick: [45]}",
        f"training.faults={action}",
        "checkpoint.every=2",
        "strategy=single",
    ]
    heads = []
    for name, parts_of_run in (("whole", (12,)), ("cut", (6, 12))):
        run = tmp_path / name
        for steps in parts_of_run:
            train = (f"output={run}", f"training.steps={steps}", "schedule.warmup_steps=0")
            assert samestep("train", experiment_file, *train, *settings).code == 0
        rows = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
        heads.append(rows[-1]["head"])
        *_, mixture = (row["data"]["mixture"] for row in rows if row["kind"] == "order")
        (begins,) = (row["examples"][0][0] for row in rows if row.get("first_step") == 9)
        assert [first for first, _ in mixture] == [0, begins]
        assert samestep("ledger", "verify", run).code == 0
    assert heads[0] == heads[1]
    skipped = json.loads(samestep("replay", tmp_path / "cut", 5, "--skipped", "--json").out)
    assert 45 in [example["number"] for example in skipped["examples"]]
