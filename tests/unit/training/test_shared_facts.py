"""What is compared between the machines of a run, and what is not."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samestep.config import decode, load
from samestep.errors import UnreachableError
from tests import beir
from tests.processes import run_ranks
from trainer.training import shared_facts
from trainer.training.compose import open_strategy
from trainer.training.experiment import Experiment
from trainer.training.shared_facts import facts_of

TREE: dict[str, Any] = {
    "output": "run",
    "model": {"kind": "bert", "vocab_size": 600, "layers": 1, "width": 32, "heads": 2},
    "objective": {"kind": "mlm"},
    "data": {"path": "nowhere", "sequence_length": 32},
    "training": {"steps": 10},
    "optimizer": {"kind": "adamw", "lr": 1e-3},
}


def changed(first: Experiment, second: Experiment, folder: Path) -> set[str]:
    one, other = (facts_of(each, folder) for each in (first, second))
    return {name for name in {**one, **other} if one.get(name) != other.get(name)}


def experiment(**sections: Any) -> Experiment:
    merged = {
        name: {**TREE.get(name, {}), **section} if isinstance(section, dict) else section
        for name, section in sections.items()
    }
    found: Experiment = decode(Experiment, {**TREE, **merged})
    return found


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"seed": 7}, {"seed"}),
        ({"optimizer": {"lr": 0.1}}, {"optimizer.lr"}),
        ({"training": {"best": {"metric": "loss"}, "evaluate_every": 5}}, None),
        ({"phases": [{"steps": 10, "lr": 0.5}]}, None),
        ({"training": {"preemption": {"deadline": 30}, "hang_timeout": 10}}, set()),
        ({"output": "elsewhere", "checkpoint": {"folder": "s3://bucket/run"}}, set()),
        ({"data": {"threads": 4, "prefetch": 3, "cache": "here", "cache_size": "1GB"}}, set()),
        # Where corrupt shards are skipped, ranks count the blocks that threads make ahead.
        (
            {"data": {"on_corrupt": "skip", "threads": 4, "prefetch": 3}},
            {"data.on_corrupt", "data.threads", "data.prefetch"},
        ),
        ({"tracking": {"tensorboard": {}}}, set()),
    ],
)
def test_settings(sections: dict[str, Any], expected: set[str] | None, tmp_path: Path) -> None:
    found = changed(experiment(), experiment(**sections), tmp_path)
    if expected is None:
        assert len(found) > 1  # a section that only one machine has
    else:
        assert found == expected


def test_threads_of_a_machine_are_its_own(tmp_path: Path) -> None:
    few, many = (experiment(accelerator={"kind": "cpu", "threads": threads}) for threads in (1, 8))
    assert changed(few, many, tmp_path) == set()


def test_data_is_compared_by_content(dataset_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(dataset_folder, tmp_path / "copy")
    here, there = (experiment(data={"path": str(path)}) for path in (dataset_folder, copy))
    assert changed(here, there, tmp_path) == set()
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["checksum"]
    manifest["splits"]["train"][0]["sha256"] = "0" * 64
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert changed(here, there, tmp_path) == {"content of data.path"}
    (copy / "manifest.json").unlink()
    facts = facts_of(there, tmp_path)
    assert facts["content of data.path"] == "unreadable"
    sources = [{"path": str(dataset_folder), "name": "a"}]
    mixed = facts_of(experiment(data={"path": None, "sources": sources}), tmp_path)
    assert (
        mixed["content of data.sources.0.path"] == facts_of(here, tmp_path)["content of data.path"]
    )


def test_a_store_that_does_not_answer_is_no_difference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(location: str) -> None:
        raise UnreachableError(location)

    monkeypatch.setattr(shared_facts, "load_manifest", fail)
    assert facts_of(experiment(), tmp_path)["content of data.path"] is None


def test_initial_weights_are_compared_until_they_do_not_matter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    content = bytearray(3 * 2**20)
    (weights / "model.safetensors").write_bytes(content)
    started = replace(experiment(), init_from=str(weights))
    before = facts_of(started, tmp_path)["content of init_from"]
    content[-1] = 1
    (weights / "model.safetensors").write_bytes(content)
    after = facts_of(started, tmp_path)["content of init_from"]
    assert None not in (before, after)
    assert before != after
    monkeypatch.setattr(shared_facts.integrity, "committed_steps", lambda folder: [10])
    assert facts_of(started, tmp_path)["content of init_from"] is None
    frozen = facts_of(replace(started, frozen=("embeddings",)), tmp_path)
    assert frozen["content of init_from"] == after


def test_code_of_users_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    own = package / "objective.py"
    own.write_text(
        "from trainer.objectives.kinds.mlm import Config  # noqa\n\n\nclass Config(Config): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    custom = experiment(objective={"kind": "mine.objective"})
    before = facts_of(custom, tmp_path)
    own.write_text(own.read_text() + "#\n")
    assert changed(custom, custom, tmp_path) == set()
    after = facts_of(custom, tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"code of mine.objective"}


def test_ranks_of_any_launcher_compare_them_before_collectives(experiment_file: str) -> None:
    with pytest.raises(AssertionError, match=r"machines of this run differ \(seed: "):
        run_ranks(2, start_with_own_seed, experiment_file)


def start_with_own_seed(file: str) -> None:
    rank = os.environ["RANK"]
    experiment: Experiment = load(Experiment, file, [f"seed={rank}", "output=run", "strategy=ddp"])
    with open_strategy(experiment):
        pass


def test_a_collection_is_compared_by_content(tmp_path: Path) -> None:
    folders = [beir.write(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    same, copy, other = (
        experiment(training={"evaluate_every": 5, "retrieval": {"path": str(folder)}})
        for folder in folders
    )
    assert changed(same, copy, tmp_path) == set()
    assert changed(same, other, tmp_path) == {"content of training.retrieval.path"}
