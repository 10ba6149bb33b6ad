"""A run on sentence pairs through the command line: train, evaluate, export, start from it."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForPreTraining

from tests.integration.commands import Samestep

PAIRS = ["data.packing=pairs", "objective.kind=mlm_nsp", "model.nsp=true"]


@pytest.mark.long
def test_a_run_with_next_sentence_prediction(
    samestep: Samestep, experiment_file: str, tmp_path: Path
) -> None:
    output = f"output={tmp_path / 'run'}"
    trained = samestep(
        "train",
        experiment_file,
        *PAIRS,
        output,
        "checkpoint.every=12",
        "training.evaluate_every=12",
    )
    assert trained.code == 0, trained.err
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    last: dict[str, float] = {}
    for row in rows:
        last.update(row)
    for part in ("train", "heldout"):
        # A batch counts in the one by its pairs, in the others by its predictions.
        assert last[f"{part}/loss"] == pytest.approx(
            last[f"{part}/mlm_loss"] + last[f"{part}/nsp_loss"], rel=1e-3
        )
        assert 0.5 < last[f"{part}/nsp_loss"] < 1
    assert last["heldout/perplexity"] == pytest.approx(
        2.718281828 ** last["heldout/mlm_loss"], rel=1e-4
    )

    exported = tmp_path / "exported"
    assert samestep("export", tmp_path / "run", exported).code == 0
    assert AutoModelForPreTraining.from_pretrained(exported).cls.seq_relationship.weight.shape == (
        2,
        32,
    )
    filled = samestep("fill", exported, "the [MASK] statement")
    assert filled.code == 0, filled.err

    overrides = [
        f"init_from={exported}",
        f"output={tmp_path / 'more'}",
        "training.steps=1",
        "schedule.warmup_steps=0",
    ]
    more = samestep("train", experiment_file, *overrides)
    assert more.code == 0, more.err
    assert "left out, because model.nsp is not set: nsp_head." in more.err

    overrides = [
        f"init_from={tmp_path / 'more'}",
        f"output={tmp_path / 'pairs'}",
        "training.steps=1",
    ]
    pairs = samestep("train", experiment_file, *PAIRS, *overrides, "schedule.warmup_steps=0")
    assert pairs.code == 0, pairs.err
    assert (
        "initialized at random: nsp_head.pooler.weight, nsp_head.pooler.bias, nsp_head" in pairs.err
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["objective.kind=mlm_nsp", "model.nsp=true"], "use data.packing=pairs"),
        (["objective.kind=mlm_nsp", "data.packing=pairs"], "set model.nsp=true"),
        (["model.nsp=true"], "set model.nsp=false, or choose another objective"),
        ([*PAIRS, "model.type_vocab=1"], "model.type_vocab is 1; set it to 2"),
        ([*PAIRS, "data.sequence_length=4"], "use at least 5"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    samestep: Samestep, experiment_file: str, tmp_path: Path, overrides: list[str], said: str
) -> None:
    result = samestep("train", experiment_file, f"output={tmp_path / 'run'}", *overrides)
    assert result.code == 2
    assert said in result.err
    assert "Traceback" not in result.err
