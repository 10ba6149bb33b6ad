"""A run over several datasets, through the command line.

Changed, refused, accepted, resized and proven.
"""

import json
from pathlib import Path

import pytest

from tests.integration.commands import Samestep, losses
from tests.mixtures import sources
from trainer.training.own_loop import open_batches
from trainer.training.starting import load_experiment


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


@pytest.mark.long
def test_groups_of_a_source_are_the_same_on_other_devices(
    samestep: Samestep, experiment_file: str, parts: dict[str, Path], tmp_path: Path
) -> None:
    """Through a stop and more processes; the size of groups stays."""
    settings = [
        "data={path: null, group_by_source: 15}",
        sources(parts, a=1, b=1, c=2),
        "data.weights=[{step: 5, weights: {a: 1, b: 0, c: 0}}]",
        "schedule.warmup_steps=0",
        "checkpoint.every=4",
    ]
    ledgers = []
    for name, stages in (("whole", ((10, 1),)), ("cut", ((4, 1), (10, 2)))):
        run = f"output={tmp_path / name}"
        for steps, processes in stages:
            size = ("training.global_batch_size=30", f"training.steps={steps}", run)
            launch = ("--processes", processes) if processes > 1 else ()
            result = samestep("train", experiment_file, *size, *settings, *launch)
            assert result.code == 0, result.err
        rows = [json.loads(row) for row in (tmp_path / name / "ledger.jsonl").open()]
        ledgers.append([row.get("digest") for row in rows if row["kind"] == "fed"])
        assert samestep("ledger", "verify", tmp_path / name).code == 0
    assert ledgers[0] == ledgers[1]
    for step in (2, 7):
        listed = json.loads(samestep("ledger", "step", tmp_path / "cut", step, "--json").out)
        groups: dict[int, set[str]] = {}
        for example in listed["examples"]:
            groups.setdefault(example["number"] // 15, set()).add(example["source"])
        assert [len(names) for names in groups.values()] == [1, 1]
    refused = samestep("train", experiment_file, run, *settings, "training.global_batch_size=31")
    assert refused.code == 2
    assert "group_by_source is 15, and does not divide global_batch_size 31" in refused.message
    other = samestep("train", experiment_file, run, *size[:1], *settings, "data.group_by_source=30")
    assert other.code == 1
    assert "set data.group_by_source to the checkpoint's" in other.message


@pytest.mark.long
def test_a_rewind_across_a_change_skips_the_faulty_examples(
    samestep: Samestep, experiment_file: str, parts: dict[str, Path], tmp_path: Path
) -> None:
    settings = [
        "data.path=null",
        sources(parts, a=1, b=0),
        "data.weights=[{step: 4, weights: {a: 0, b: 1}}]",
        "training.faults={action: rewind, around: 1}",
        "checkpoint={every: 1, keep_last: 20}",
        "strategy=single",
    ]
    plain, faulty = tmp_path / "plain", tmp_path / "faulty"
    assert samestep("train", experiment_file, f"output={plain}", *settings).code == 0
    listed = json.loads(samestep("ledger", "step", plain, 5, "--json").out)["examples"]
    with open_batches(load_experiment(experiment_file, settings), start_step=4) as batches:
        sick = int(next(batches)[0]["example"][0])  # of source b, in the step after the change
    objective = f"objective={{kind: tests.sick_objective, sick: [{sick}], source: 1}}"
    assert samestep("train", experiment_file, f"output={faulty}", *settings, objective).code == 0
    rows = [json.loads(line) for line in (faulty / "ledger.jsonl").read_text().splitlines()]
    (skipped,) = (row["examples"] for row in rows if row["kind"] == "excluded")
    first = listed[0]["number"]
    assert skipped == [[first, first + 20]]
    assert samestep("ledger", "verify", faulty).code == 0


@pytest.mark.long
def test_skipped_examples_are_not_lost_where_a_mixture_changes(
    samestep: Samestep, experiment_file: str, parts: dict[str, Path], tmp_path: Path
) -> None:
    """Before the first example, and between two rows of the ledger with the order."""
    settings = [
        f"output={tmp_path}",
        "data.path=null",
        sources(parts, a=1, b=1),
        "data.weights=[{step: 5, weights: {a: 1, b: 2}}]",
        "data.exclude=[[0, 70]]",
        "objective={kind: tests.sick_objective, sick: [230]}",
        "training={steps: 20, global_batch_size: 60, micro_batch_size: 60, faults: {action: skip}}",
        "strategy=single",
    ]
    assert samestep("train", experiment_file, *settings).code == 0
    verified = samestep("ledger", "verify", tmp_path)
    assert verified.code == 0, verified.out
    first_pass = next(
        line.split() for line in verified.out.splitlines() if line.split()[1:3] == ["b", "1"]
    )
    examples, consumed, excluded, lost, _ = map(int, first_pass[-5:])
    assert (consumed + excluded, lost) == (examples, 0)
    assert excluded > 50  # half of the 130


@pytest.mark.long
@pytest.mark.parametrize(
    "action",
    ["{action: skip}", pytest.param("{action: rewind, around: 1}", marks=pytest.mark.long)],
)
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
