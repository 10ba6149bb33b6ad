"""Scores of retrieval: in the evaluations of a run, of a suite of folders, and after reranking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import beir
from tests.integration import tasks
from tests.integration.commands import Samestep

MEASURES = ("ndcg@10", "mrr@10", "recall@100", "map@20")


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return beir.write(tmp_path_factory.mktemp("collection") / "words")


def settings(collection: Path, **others: object) -> tuple[str, ...]:
    """Evaluations of steps 2 and 4, with large steps, so that the scores change."""
    section = {"path": str(collection), "measures": MEASURES, **others}
    steps = ("training.steps=4", "schedule.warmup_steps=0", "optimizer.lr=0.03")
    every = ("training.evaluate_every=2", "checkpoint.every=2")
    return (*steps, *every, f"training.retrieval={json.dumps(section)}")


def scores(run: Path) -> dict[int, dict[str, float]]:
    """The retrieval scores of each evaluation."""
    return {
        row["step"]: {name: row[f"heldout/{name}"] for name in MEASURES}
        for row in tasks.rows_of(run)
        if "heldout/loss" in row
    }


def evaluated(samestep: Samestep, tmp_path: Path, checkpoint: Path, *options: object) -> Any:
    file = tmp_path / "scores.json"
    result = samestep("evaluate", checkpoint, *options, "--scores", file)
    assert result.code == 0, result.err
    return json.loads(file.read_text())


@pytest.mark.long
def test_evaluations_have_the_scores_of_the_command_and_choose_the_best(
    experiment_file: str, collection: Path, tmp_path: Path, samestep: Samestep
) -> None:
    run, best = tmp_path / "run", 'training.best={metric: "ndcg@10"}'
    options = (*settings(collection), "tracking.tensorboard={}", f"output={run}")
    assert samestep("train", experiment_file, *options, best, "strategy=single").code == 0
    found = scores(run)
    assert list(found) == [2, 4]
    assert found[2] != found[4]
    retrieval = ("--retrieval", collection, "--measures", *MEASURES)
    for step, expected in found.items():
        folder = run / f"checkpoints/step-{step:08}"
        ours = evaluated(samestep, tmp_path, folder, *retrieval)
        assert {name: ours[name] for name in MEASURES} == expected
    meta = json.loads((run / "checkpoints/step-00000004/meta.json").read_text())
    assert meta["best"]["step"] == max(found, key=lambda step: found[step]["ndcg@10"])
    assert meta["best"]["value"] == max(each["ndcg@10"] for each in found.values())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    shown = [event.value for event in events.Scalars("heldout/ndcg@10")]
    assert shown == pytest.approx([each["ndcg@10"] for each in found.values()])


@pytest.mark.long
@pytest.mark.parametrize(
    "others",
    [("strategy=ddp", "--processes", 2), ("strategy=fsdp", "--processes", 3)],
    ids=["ddp", "fsdp"],
)
def test_the_number_of_processes_changes_no_score(
    experiment_file: str,
    collection: Path,
    others: tuple[object, ...],
    tmp_path: Path,
    samestep: Samestep,
) -> None:
    # Weights of equal bits: with others, documents of nearly equal similarity may change places.
    exact = ("training.exact=bitwise", "accelerator={kind: cpu, threads: 1}")
    train = ("train", experiment_file, *settings(collection), *exact)
    assert samestep(*train, "strategy=single", f"output={tmp_path / 'one'}").code == 0
    assert samestep(*train, *others, f"output={tmp_path / 'more'}").code == 0
    assert list(scores(tmp_path / "one")) == [2, 4]
    assert scores(tmp_path / "more") == scores(tmp_path / "one")
