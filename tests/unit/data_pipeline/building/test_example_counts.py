"""A build counts the examples of common packings, so that runs read no index of a shard."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.building import example_counts
from data_pipeline.building.build import build
from data_pipeline.building.config import Config
from data_pipeline.building.units import Outcome, outcome_path
from data_pipeline.format.manifest import Manifest
from data_pipeline.packing.policy import count_digest, packing_digest
from data_pipeline.reading.counts import counts_name, read_counts
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.packed_split import PackedSplit
from data_pipeline.sources.kinds import jsonl
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.examples import PackSpec, Policy, Sides
from trainer.objectives.kinds import mlm, span_corruption

WORDS = 40


def make_text(index: int) -> str:
    draw = np.random.default_rng(index)
    sentences = [
        " ".join(f"w{word}" for word in draw.integers(0, WORDS, draw.integers(1, 40)))
        for _ in range(draw.integers(1, 20))
    ]
    return ". ".join(sentences) + "."


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": make_text(i)}) + "\n" for i in range(200)]
    (folder / "a.jsonl").write_text("".join(lines))
    tokenizer = TokenizerConfig(str(folder / "tokenizer"), vocab_size=200)
    tokenizer.train(make_text(i) for i in range(50)).save(tokenizer.path)
    return Config(
        jsonl.Config((f"{folder}/a.jsonl",)),
        tokenizer,
        str(folder / "built"),
        shard_bytes=40_000,
        heldout_fraction=0.2,
        workers=1,
        sentences="rules",
    )


@pytest.fixture(scope="module")
def built(config: Config) -> Path:
    build(config)
    return Path(config.output)


@pytest.fixture
def indices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards whose indices have been read to count examples."""
    read, lock = [], threading.Lock()
    read_index = Dataset.read_index

    def counted(self: Dataset, info, sentences: bool = False, labels: bool = False):
        with lock:
            read.append(info.name)
        return read_index(self, info, sentences, labels)

    monkeypatch.setattr(Dataset, "read_index", counted)
    return read


def counts(folder: Path, spec: PackSpec, policy: Policy, split: str = "train") -> list[int]:
    return PackedSplit(Dataset.open(folder), split, spec, policy, seed=3).counts.tolist()


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("policy", ["concat", "best_fit", "padded", "full_sentences"])
def test_counts_of_the_build_are_those_of_a_reader(built, tmp_path, indices, policy, split) -> None:
    shutil.copytree(built, tmp_path / "plain", ignore=shutil.ignore_patterns(".cache"))
    for length in example_counts.LENGTHS:
        spec = PackSpec(length, prefix=1, suffix=1)
        found = counts(built, spec, policy, split)
        assert indices == []
        assert len(found) > 1
        assert found == counts(tmp_path / "plain", spec, policy, split)
        assert len(indices) == len(found)
        indices.clear()


def test_the_packings_of_the_recipes_are_counted(built, indices) -> None:
    """Without counts, C4's 25,000 shards would be read before the first step."""
    vocabulary = Dataset.open(built).tokenizer.vocabulary
    bert = mlm.MaskedLM(mlm.Config(), vocabulary).pack_spec(128)
    counts(built, bert, "concat")
    sentinels = dataclasses.replace(vocabulary, sentinels=tuple(range(100, 200)), eos=1)
    t5 = span_corruption.Config().build(sentinels).pack_spec(512)
    counts(built, t5, "concat")
    assert indices == []
    counts(built, dataclasses.replace(bert, sequence_length=129), "concat")
    assert len(indices) == len(Manifest.load(built).splits["train"])


def test_only_best_fit_depends_on_the_other_side() -> None:
    plain = PackSpec(16, 0, 0)
    two = dataclasses.replace(plain, sides=Sides((16, 8), ((2, 1),) * 16))
    assert packing_digest(two, "concat") != packing_digest(plain, "concat")
    assert count_digest(two, "concat") == count_digest(plain, "concat")
    assert count_digest(two, "best_fit") != count_digest(plain, "best_fit")
    pairs = dataclasses.replace(two, text_pairs=True)
    assert count_digest(pairs, "padded") != count_digest(plain, "padded")


def test_counts_of_a_dataset_that_is_replaced_are_removed(config, tmp_path) -> None:
    here = dataclasses.replace(config, output=str(tmp_path / "dataset"))
    build(here)
    before = set((tmp_path / "dataset").glob(".cache/*.counts"))
    build(dataclasses.replace(here, heldout_fraction=0.5), force=True)
    after = set((tmp_path / "dataset").glob(".cache/*.counts"))
    assert len(before) == len(after) > 0
    assert not before & after


def test_a_packing_that_a_unit_has_not_counted_is_counted_by_readers(built, tmp_path) -> None:
    """A build that an older version began has units without counts."""
    manifest = Manifest.load(built)
    example_counts.save(tmp_path, manifest, {"train": [{"a": 3, "b": 5}, {"a": 4}], "heldout": []})
    (file,) = tmp_path.glob(".cache/*.counts")
    assert file == tmp_path / counts_name(manifest.digest, "train", "a")
    assert read_counts(file, 2).tolist() == [3, 4]
    example_counts.save(tmp_path, manifest, {"train": [{}, {"a": 4}]})
    assert list(tmp_path.glob(".cache/*.counts")) == []


def test_an_outcome_of_an_older_version_is_read(tmp_path) -> None:
    outcome = Outcome("build", "digest", 1, (), {}, 0)
    outcome.save(outcome_path(tmp_path, 0))
    tree = json.loads(outcome_path(tmp_path, 0).read_bytes())
    del tree["examples"]
    outcome_path(tmp_path, 0).write_text(json.dumps(tree))
    assert Outcome.load(outcome_path(tmp_path, 0)) == outcome


def test_of_many_processes_one_counts(built, indices) -> None:
    """Locks are of open files, so threads stand for processes here."""
    spec = PackSpec(77, 1, 1)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: counts(built, spec, "best_fit"), range(8)))
    assert all(each == found[0] for each in found)
    assert len(indices) == len(found[0])
