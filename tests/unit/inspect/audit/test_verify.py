"""`samestep ledger`: a sound run is proven sound, and whatever is wrong with a run, its ledger or
its data is found.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.loader import StreamingLoader
from samestep.config import dump, load, to_tree
from samestep.errors import ConfigError, DataError
from trainer.accelerators.kinds import cpu
from trainer.inspect.audit.batches import Run
from trainer.inspect.audit.documents import documents
from trainer.inspect.audit.verify import Verdict, verify
from trainer.strategies import Replica
from trainer.strategies.kinds import single
from trainer.strategies.world import World
from trainer.training.compose import open_loader
from trainer.training.experiment import Experiment
from trainer.training.ledger import GENESIS, chain
from trainer.training.phases import phase_of
from trainer.training.recorder import Destinations, Recorder
from trainer.training.state import TrainState

BATCH = 62


class Feeder:
    """A run without a model: its loader, its recorder, and rows of the ledger every four steps.

    Args:
        file: the experiment.
        folder: the run's.
        overrides: of the experiment.
    """

    def __init__(self, file: str, folder: Path, *overrides: str) -> None:
        base = ["training.steps=200", f"training.global_batch_size={BATCH}", "data.threads=0"]
        experiment = load(Experiment, file, [*base, *overrides, f"output={folder}"])
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(dump(experiment))
        dataset = experiment.data.open()
        self.experiment, self.folder, self.state = experiment, folder, TrainState()
        self.phases = experiment.resolved_phases()
        self.loaders = [
            open_loader(experiment, dataset, Replica(0, 1), phase) for phase in self.phases
        ]
        strategy = single.Config().build(cpu.Config().build(), World.start(60), "fp32")
        strategy.all_reduce = lambda value, op="sum": value  # type: ignore[method-assign]
        self.recorder = Recorder(strategy)

    @property
    def loader(self) -> StreamingLoader:
        return self.loaders[phase_of(self.phases, self.state.step).index]

    def run(self, to: int, at: dict[int, Callable[[Feeder], None]] | None = None) -> Feeder:
        """Takes steps up to step `to`; before some of them, something happens."""
        self.recorder.open(self.state.step, Destinations(ledger=self.folder / "ledger.jsonl"))
        while self.state.step < to:
            phase = phase_of(self.phases, self.state.step)
            objective = to_tree(self.experiment)["objective"]
            self.recorder.begin_order(self.state.step, phase, objective, self.loader.state_dict())
            while self.state.step < min(to, phase.end):
                step = self.state.step + 1
                if at and step in at:
                    at[step](self)
                self.recorder.add_batch(step, next(self.loader), self.loader)
                self.state.step = step
                if step % 4 == 0 or step == phase.end:
                    self.recorder.rates(self.state)
        return self

    def checkpoint(self) -> dict[str, Any]:
        saved = {
            "step": self.state.step,
            "data": self.loader.state_dict(),
            **self.recorder.state_dict(),
        }
        return json.loads(json.dumps(saved))

    def resume(self, saved: dict[str, Any]) -> Feeder:
        self.state.step = saved["step"]
        self.loader.load_state_dict(saved["data"])
        self.recorder.load_state_dict(saved, 0)
        return self


@pytest.fixture(scope="module")
def fed(experiment_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half a pass; do not change it."""
    folder = tmp_path_factory.mktemp("fed") / "run"
    Feeder(experiment_file, folder).run(20)
    return folder


@pytest.fixture
def run(fed: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be changed."""
    return Path(shutil.copytree(fed, tmp_path / "run"))


def judge(folder: Path, *overrides: str) -> Verdict:
    return verify(Run.open(str(folder), list(overrides)))


def forge(folder: Path, change: Callable[[list[dict[str, Any]]], Iterable[dict[str, Any]]]) -> None:
    """Changes rows and chains them anew, as somebody could who wanted to deceive."""
    path, head, lines = folder / "ledger.jsonl", GENESIS, []
    for row in change([json.loads(line) for line in path.read_text().splitlines()]):
        head = chain(head, row)
        lines.append(json.dumps({**row, "head": head}) + "\n")
    path.write_text("".join(lines))


def test_a_run_with_restarts_batch_sizes_phases_and_exclusions_is_proven(
    experiment_file: str, tmp_path: Path
) -> None:
    """Two passes; a kill between two rows, another batch size after it, a step skipped, another
    sequence length.
    """
    folder = tmp_path / "run"
    phases = (
        f"phases=[{{steps: 60, global_batch_size: {BATCH}}}, {{steps: 10, sequence_length: 24}}]"
    )

    def skip(feeder: Feeder) -> None:
        next(feeder.loader)
        (examples,) = feeder.loader.consumed
        feeder.loader.exclude(*examples)
        feeder.recorder.ledger.exclude(feeder.state.step + 1, 0, [examples], "for the test")

    overrides = ["training.steps=70", "data.exclude=[[100, 130]]"]
    saved = Feeder(experiment_file, folder, phases, *overrides).run(10).checkpoint()
    Feeder(experiment_file, folder, phases, *overrides).resume(saved).run(15)
    other_size = phases.replace(str(BATCH), "100")
    second = Feeder(experiment_file, folder, other_size, *overrides, "objective.mask_fraction=0.2")
    second.resume(saved).run(70, {20: skip})

    verdict = judge(folder)
    assert verdict.problems == []
    assert verdict.steps == 70
    first_order, second_order = verdict.tallies.values()
    assert {number: first_order.is_over(number) for number in first_order.passes} == {
        0: True,
        1: True,
        2: False,
    }
    consumed = [
        (each.consumed, each.excluded, each.repeated) for each in first_order.passes.values()
    ]
    examples = second.loaders[0].examples  # of a pass
    fed, passed_over = 10 * BATCH + 50 * 100, 30 + 100
    assert consumed[0] == (examples - passed_over, passed_over, 0)
    assert consumed[1] == (examples, 0, 0)
    assert sum(each for each, _, _ in consumed) == fed
    assert [row["reason"] for row in verdict.exclusions][-1] == "for the test"
    assert second_order.passes[0].consumed == 10 * BATCH


@pytest.mark.long
@pytest.mark.parametrize("group", ["null", "31"])
def test_a_mixture_is_proven_source_by_source(
    experiment_file: str, dataset_folder: Path, tmp_path: Path, group: str
) -> None:
    """Its weights change at step 10, and when it goes on from step 14 a source has been taken out
    and one put in.
    """
    shards = Dataset.open(dataset_folder).manifest.splits["train"]
    for name, part in {"first": shards[:2], "second": shards[2:4], "third": shards[4:]}.items():
        copy = Path(shutil.copytree(dataset_folder, tmp_path / name))
        manifest = Dataset.open(copy).manifest
        replace(manifest, splits={**manifest.splits, "train": part}).save(copy)

    def mixture(**weights: float) -> str:
        return f"data.sources=[{', '.join(f'{{path: {tmp_path / name}, weight: {w}}}' for name, w in weights.items())}]"  # noqa: E501

    folder, no_path = tmp_path / "run", f"data={{path: null, group_by_source: {group}}}"
    change = "data.weights=[{step: 10, weights: {first: 1, second: 5}}]"
    saved = (
        Feeder(experiment_file, folder, no_path, mixture(first=3, second=1), change)
        .run(14)
        .checkpoint()
    )
    accepted = "data.on_change=accept"
    Feeder(experiment_file, folder, no_path, mixture(second=1, third=4), accepted).resume(
        saved
    ).run(60)

    with pytest.raises(DataError, match=r"name the right one .* among data\.sources"):
        judge(folder)
    sources = mixture(second=1, third=4, first=0)
    verdict = judge(folder, sources)
    assert verdict.problems == []
    tallies = {name: tally for (_, name), tally in verdict.tallies.items()}
    consumed = {
        name: sum(each.consumed for each in tally.passes.values())
        for name, tally in tallies.items()
    }
    assert sum(consumed.values()) == 60 * BATCH
    assert consumed["first"] == pytest.approx(BATCH * (10 * 3 / 4 + 4 / 6), abs=40)
    assert consumed["third"] == pytest.approx(BATCH * 46 * 4 / 5, abs=40)
    assert sum(map(tallies["third"].is_over, tallies["third"].passes)) >= 3
    seen = documents(Run.open(str(folder), [sources]), 15)["examples"]
    read = {example["source"] for example in seen}
    assert read == {"second", "third"} if group == "null" else len(read) <= BATCH / int(group)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda rows: [*rows[:3], {**rows[3], "digest": "0" * 16}, *rows[4:]],
            "^steps 9 to 12 consumed other rows",
        ),
        (lambda rows: [*rows[:3], *rows[4:]], "^the row of step 16 begins with step 13, not 9"),
        (lambda rows: [*rows[:3], *rows[4:]], "^examples 496 to 743 of .* were never consumed"),
        (
            lambda rows: [*rows[:3], {**rows[3], "examples": [[400, 744]]}, *rows[4:]],
            "^examples 400 to 495 .* again",
        ),
        (
            lambda rows: [*rows[:3], {**rows[3], "examples": [[400, 744]]}, *rows[4:]],
            "^pass 1 .*: 96 examples .* again",
        ),
        (
            lambda rows: [
                *rows,
                {
                    "kind": "excluded",
                    "time": 0.0,
                    "step": 20,
                    "order": 0,
                    "examples": [[7, 9]],
                    "reason": "",
                },
            ],
            "^examples between 0 and 248 .* are excluded",
        ),
    ],
    ids=["digest", "steps removed", "examples removed", "range", "range, by name", "exclusion"],
)
def test_a_forged_ledger_is_found_out(run: Path, change: Any, problem: str) -> None:
    forge(run, change)
    assert any(re.search(problem, found) for found in judge(run).problems), judge(run).problems


@pytest.mark.parametrize("examples", [[[0, 10**15]], [[10**15, 10**15 + 62]], [[0, 2**62]]])
def test_a_row_of_examples_that_the_run_cannot_reach_is_not_recomputed(
    run: Path, examples: list[list[int]]
) -> None:
    def huge(rows: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        for row in rows:
            is_last = row["kind"] == "fed" and row["step"] == 20
            yield {**row, "examples": examples} if is_last else row

    forge(run, huge)
    most = 10 * 200 * BATCH
    assert any(
        problem.startswith("steps 17 to 20 of data order 0 have examples beyond")
        and f"beyond {most}, which the run's settings do not reach" in problem
        for problem in judge(run).problems
    )


def test_a_changed_row_breaks_the_chain(run: Path) -> None:
    path = run / "ledger.jsonl"
    path.write_text(path.read_text().replace('"first_step": 9', '"first_step": 8'))
    verdict = judge(run)
    assert [problem[:26] for problem in verdict.problems] == ["line 4 of 6 of ledger.json"]
    assert verdict.steps == 8


@pytest.mark.parametrize("honest", [True, False])
def test_an_example_that_was_fed_twice_is_found(
    experiment_file: str, tmp_path: Path, honest: bool
) -> None:
    """Whether the loader knows that it has gone back, or not."""

    def go_back(feeder: Feeder) -> None:
        state = feeder.loader.state_dict()
        if honest:
            feeder.loader.load_state_dict({**state, "example": state["example"] - BATCH})
        else:
            locate = feeder.loader._maker.order.locate
            feeder.loader._maker.order.locate = lambda number: locate(
                np.where(number % 100 == 99, number - 1, number)
            )  # type: ignore[method-assign]

    Feeder(experiment_file, tmp_path / "run").run(16, {10 if honest else 1: go_back})
    found = judge(tmp_path / "run").problems
    assert any("again" in problem if honest else "other rows" in problem for problem in found), (
        found
    )


def test_a_damaged_shard_is_named(run: Path, dataset_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(dataset_folder, tmp_path / "dataset"))
    shard = copy / "train-000003.tar"
    content = bytearray(shard.read_bytes())
    content[2000:2400:2] = bytes(reversed(content[2000:2400:2]))  # still tokens of the vocabulary
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"train-000003\.tar .*damaged"):
        judge(run, f"data.path={copy}")
    shard.unlink()
    with pytest.raises(DataError, match=r"train-000003\.tar is missing"):
        judge(run, f"data.path={copy}")


def test_another_dataset_is_refused(run: Path, dataset_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(dataset_folder, tmp_path / "dataset"))
    manifest = Dataset.open(copy).manifest
    splits = {**manifest.splits, "train": manifest.splits["train"][:4]}
    replace(manifest, splits=splits).save(copy)
    with pytest.raises(DataError, match=r"is another one: name the right one by data\.path"):
        judge(run, f"data.path={copy}")


def test_a_step_lists_its_documents(
    run: Path, experiment_file: str, dataset_folder: Path, tmp_path: Path
) -> None:
    """The same as a run does that takes one step after another; their text is in the batch."""
    feeder = Feeder(experiment_file, tmp_path / "again")
    for _ in range(11):
        (batch,) = [
            {
                name: np.concatenate([part[name].numpy() for part in parts])
                for name in ("number", "example", "filled")
            }
            for parts in [next(feeder.loader)]
        ]
    found = documents(Run.open(str(run), []), 11)
    rows = np.argsort(batch["number"])
    rows = rows[batch["number"][rows] >= 0]
    assert [each["number"] for each in found["examples"]] == list(range(10 * BATCH, 11 * BATCH))
    assert [each["example"] for each in found["examples"]] == batch["example"][rows].tolist()
    lines = {each["line"] for example in found["examples"] for each in example["documents"]}
    assert all(
        each["file"] == "topics" for example in found["examples"] for each in example["documents"]
    )
    assert lines.isdisjoint(range(0, 1300, 60))  # which are held out
    with pytest.raises(ConfigError, match=r"STEP is 21, and the ledger of .* has steps 1 to 20"):
        documents(Run.open(str(run), []), 21)


def test_a_folder_without_a_ledger_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.yaml"):
        Run.open(str(tmp_path), [])
