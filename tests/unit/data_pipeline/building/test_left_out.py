"""Documents that a build leaves out on purpose: duplicates, and text of a test."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.building import decontamination, duplicates
from data_pipeline.building.build import build
from data_pipeline.building.config import Config
from data_pipeline.building.slices import Slice
from data_pipeline.building.units import CONTAMINATED, DUPLICATE, cut
from data_pipeline.dedup.kinds import exact, minhash
from data_pipeline.format.manifest import Manifest
from data_pipeline.sources.kinds import classification, jsonl
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.errors import ConfigError
from tests.unit.data_pipeline.building.test_build import documents_of, files_of, make_text

DOCUMENTS = 120
REPEATED = {40: 3, 41: 3, 90: 41, 119: 118}  # line - 1 -> an earlier one


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    tokenizer = TokenizerConfig("", vocab_size=200)
    tokenizer.train(make_text(i) for i in range(100)).save(folder / "tokenizer")
    return folder


def write(folder: Path, texts: list[str]) -> jsonl.Config:
    file = folder / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return jsonl.Config((str(file),))


def config_of(corpus: Path, source: object, output: Path, **changes: object) -> Config:
    tokenizer = TokenizerConfig(str(corpus / "tokenizer"))
    config = Config(source, tokenizer, str(output), shard_bytes=2000, workers=1)  # type: ignore[arg-type]
    return dataclasses.replace(config, heldout_fraction=0.1, **changes)  # type: ignore[arg-type]


@pytest.fixture
def texts() -> list[str]:
    """Texts of which some repeat earlier ones, also of other units and of repeated ones."""
    found = [make_text(i) for i in range(DOCUMENTS)]
    for at, before in REPEATED.items():
        found[at] = found[before]
    return found


def lines_of(folder: Path) -> set[int]:
    return {line for split in documents_of(folder).values() for _, line in split}


def test_duplicates_are_counted(corpus, texts, tmp_path, caplog):
    with caplog.at_level("INFO"):
        built = build(config_of(corpus, write(tmp_path, texts), tmp_path / "out"))
    assert built.duplicates == len(REPEATED)
    assert "4 documents have the text of another one; dedup=exact leaves these out" in caplog.text
    assert lines_of(tmp_path / "out") == set(range(1, DOCUMENTS + 1))


def test_counting_duplicates_takes_little_memory():
    count = 200_000
    hashes = np.random.default_rng(0).integers(0, count, (4, count // 4), dtype=np.uint64)
    tracemalloc.start()
    repeated = duplicates.count_repeated(list(hashes))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert repeated == count - len(set(hashes.ravel().tolist()))
    assert peak < 10 * count


@pytest.mark.long
@pytest.mark.parametrize("kind", [exact.Config(), minhash.Config(threshold=0.9)])
def test_duplicates_are_left_out_with_any_number_of_workers(corpus, texts, tmp_path, kind, caplog):
    source = write(tmp_path, texts)
    with caplog.at_level("INFO"):
        built = build(config_of(corpus, source, tmp_path / "out", dedup=kind))
    assert lines_of(tmp_path / "out") == {i + 1 for i in range(DOCUMENTS) if i not in REPEATED}
    assert built.documents_rejected == {DUPLICATE: len(REPEATED)}
    assert built.duplicates == 0
    assert "left out 4: repeats an earlier document" in caplog.text
    rows = [json.loads(line) for line in (tmp_path / "out" / "duplicates.jsonl").open()]
    first = {40: 3, 41: 3, 90: 3, 119: 118}  # of all equal documents
    file = source.paths[0]
    assert rows == [
        {"file": file, "line": at + 1, "repeats": {"file": file, "line": before + 1}}
        for at, before in first.items()
    ]
    build(config_of(corpus, source, tmp_path / "three", dedup=kind, workers=3))
    assert files_of(tmp_path / "three") == files_of(tmp_path / "out")


@pytest.mark.long
def test_what_was_compared_before_is_not_compared_again(corpus, texts, tmp_path, monkeypatch):
    """A build that is killed while it compares goes on; changed text is compared again."""
    source, output = write(tmp_path, texts), tmp_path / "out"
    config = config_of(corpus, source, output, dedup=exact.Config())
    recipe = {
        "source": {"kind": "jsonl", "paths": list(source.paths)},
        "tokenizer": {"path": str(corpus / "tokenizer")},
        "output": str(output),
        "shard_bytes": 2000,
        "workers": 1,
        "heldout_fraction": 0.1,
        "dedup": "exact",
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "samestep.cli", "data", "build", str(tmp_path / "recipe.yaml")]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    while not (output / ".build" / "000002.signatures").exists():
        assert process.poll() is None
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    stored = {path: path.stat().st_mtime_ns for path in (output / ".build").glob("*.signatures")}
    texts[-1] = "w1 w2 w3 w4 quite another text"
    write(tmp_path, texts)
    times = {}
    # The folder of a finished build has no signatures, so they are looked at before it ends.
    find = duplicates.find

    def spy(*arguments):
        found = find(*arguments)
        times.update({path: path.stat().st_mtime_ns for path in stored})
        return found

    monkeypatch.setattr(duplicates, "find", spy)
    assert build(config).documents_rejected == {DUPLICATE: 3}
    kept = [path for path in stored if times[path] == stored[path]]
    assert len(kept) >= 2
    assert lines_of(output) == {i + 1 for i in range(DOCUMENTS) if i == 119 or i not in REPEATED}


@pytest.mark.long
def test_a_document_that_repeats_another_one_now_is_taken_out_of_a_finished_unit(
    corpus, texts, tmp_path
):
    """A unit depends on the text of the units before it."""
    texts[119] = make_text(119)
    texts[5] = make_text(500)
    output = tmp_path / "out"
    config = config_of(corpus, write(tmp_path, texts), output, dedup=exact.Config())
    assert build(config).documents_rejected == {DUPLICATE: 3}
    texts[5] = texts[119]
    write(tmp_path, texts)
    assert build(config, force=True).documents_rejected == {DUPLICATE: 4}
    assert 120 not in lines_of(output)
    assert len((output / "duplicates.jsonl").read_text().splitlines()) == 4
    build(dataclasses.replace(config, dedup=None), force=True)
    assert 120 in lines_of(output)
    assert not (output / "duplicates.jsonl").exists()


def test_dedup_needs_all_documents_of_a_corpus(corpus, texts, tmp_path):
    source = write(tmp_path, texts)
    config = config_of(corpus, source, tmp_path / "out", dedup=exact.Config())
    with pytest.raises(ConfigError, match=r"--slice 1/2 builds a part .* Build without --slice"):
        build(config, part=Slice(1, 2))
    rows = classification.Config(paths=source.paths, labels=("a", "b"))
    with pytest.raises(ConfigError, match="dedup is for documents and pairs"):
        build(dataclasses.replace(config, source=rows))


def test_text_of_a_test_is_left_out(corpus, tmp_path):
    texts = [make_text(i) for i in range(DOCUMENTS)]
    question = "Which of the four seasons, by this old calendar, brings the first of the rains?"
    short = "the shortest text that counts has eight words"
    shorter = "seven words alone are not looked for"
    texts[7] = f"{texts[7]} {question.upper().replace(',', ' -- ')} {texts[8]}"
    texts[80] = f"{texts[80]} {short} {texts[81]}"
    texts[90] = f"{texts[90]} {shorter}"
    texts[95] = f"{texts[95]} {' '.join(question.split()[:12])}"
    (tmp_path / "test").mkdir()
    test = decontamination.Config(write(tmp_path / "test", [question, short, shorter]))
    source = write(tmp_path, texts)
    built = build(config_of(corpus, source, tmp_path / "out", decontaminate=test))
    assert built.documents_rejected == {CONTAMINATED: 2}
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").open()]
    assert [row["line"] for row in rejected] == [8, 81]
    # The manifest tells it from a dataset without, and from one with another test.
    assert Manifest.load(tmp_path / "out").settings["decontaminate"]["ngram"] == 13


QUESTION = "Which of the four seasons by this old calendar brings the first of the rains"


@pytest.mark.long
def test_a_document_does_not_repeat_one_that_is_left_out_for_text_of_a_test(corpus, tmp_path):
    texts = [make_text(i) for i in range(DOCUMENTS)]
    clean = " ".join(f"word{i}" for i in range(400))
    texts[7], texts[8], texts[80] = f"{clean} {QUESTION}", clean, f"{QUESTION} {clean}"
    texts[90] = texts[8]
    (tmp_path / "test").mkdir()
    test = decontamination.Config(write(tmp_path / "test", [QUESTION]))
    source = write(tmp_path, texts)
    config = config_of(corpus, source, tmp_path / "out", decontaminate=test, dedup=minhash.Config())
    assert build(config).documents_rejected == {CONTAMINATED: 2, DUPLICATE: 1}
    assert lines_of(tmp_path / "out") == set(range(1, DOCUMENTS + 1)) - {8, 81, 91}


def test_documents_are_compared_again_if_the_test_changes(texts, tmp_path):
    source = write(tmp_path, texts).build()
    (tmp_path / ".build").mkdir()

    def found(test):
        units = cut(source.records(), 2000)
        return duplicates.find(units, tmp_path, source, exact.Config(), 1, test).pairs.tolist()

    def repeated(pairs):
        return [[0, again + 1, 0, earlier + 1] for again, earlier in pairs]

    assert found(None) == repeated([(40, 3), (41, 3), (90, 3), (119, 118)])
    test = decontamination.Matcher([texts[3]], ngram=13, shortest=8)
    assert found(test) == repeated([(119, 118)])


def test_a_matcher_finds_what_a_search_in_the_text_finds():
    """Random words of a small vocabulary, so that there are many near misses."""
    random = np.random.default_rng(0)
    texts = [" ".join(map(str, random.integers(0, 4, 30))) for _ in range(200)]
    tests = [" ".join(map(str, random.integers(0, 4, size))) for size in (4, 5, 6, 7, 12)]
    matcher = decontamination.Matcher(tests, ngram=6, shortest=5)
    parts = [test.split() for test in tests if len(test.split()) >= 5]
    needles = {
        " ".join(words[i : i + min(6, len(words))])
        for words in parts
        for i in range(max(1, len(words) - 5))
    }
    expected = [any(f" {needle} " in f" {text} " for needle in needles) for text in texts]
    assert [matcher.matches(text) for text in texts] == expected
    assert 5 < sum(expected) < 195
    assert not matcher.matches("")


def test_tests_that_cannot_be_looked_for(corpus, tmp_path):
    with pytest.raises(ConfigError, match="shortest is 20 and ngram is 13"):
        decontamination.Config(write(tmp_path, ["a"]), shortest=20)
    for text, words in {"a b": "has no text of 8 words or more", " ": ":1: empty document"}.items():
        with pytest.raises(ConfigError, match=rf"decontaminate\.source.*{words}"):
            decontamination.Config(write(tmp_path, [text])).build()
