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
