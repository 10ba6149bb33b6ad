import collections
import dataclasses
import errno
import fcntl
import gzip
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml

from data_pipeline.building import pool
from data_pipeline.building.build import build
from data_pipeline.building.config import Config
from data_pipeline.building.tokenizer_training import train_tokenizer
from data_pipeline.building.units import Outcome, UnitWriter, cut, outcome_path
from data_pipeline.building.verify import verify
from data_pipeline.format.manifest import Manifest
from data_pipeline.format.shards import Shard
from data_pipeline.sources import Record
from data_pipeline.sources.kinds import jsonl
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.config import dump, load
from samestep.errors import ConfigError, DataError

CONFIGS = Path(__file__).parents[4] / "configs" / "data"
DOCUMENTS = 400


def make_text(index: int) -> str:
    draw = np.random.default_rng(index)
    return " ".join(f"w{word}" for word in draw.integers(0, 50, draw.integers(1, 60)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A folder with three files of 400 documents and a tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": make_text(i)}) + "\n" for i in range(DOCUMENTS)]
    (folder / "a.jsonl").write_text("".join(lines[:100]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[100:300]).encode()))
    (folder / "c.jsonl").write_text("".join(lines[300:]))
    TokenizerConfig("", vocab_size=200).train(make_text(i) for i in range(100)).save(
        folder / "tokenizer"
    )
    return folder


def config_of(corpus: Path, output: Path, **changes) -> Config:
    source = jsonl.Config((f"{corpus}/*.jsonl*",))
    config = Config(
        source, TokenizerConfig(str(corpus / "tokenizer")), str(output), shard_bytes=8000, workers=1
    )
    return dataclasses.replace(config, **{"heldout_fraction": 0.1, **changes})


def files_of(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }


def documents_of(folder: Path) -> dict[str, dict[tuple[str, int], list[int]]]:
    """split -> (file, line) -> tokens."""
    manifest = Manifest.load(folder)
    found: dict[str, dict[tuple[str, int], list[int]]] = {}
    for split, shards in manifest.splits.items():
        found[split] = {}
        for info in shards:
            shard = Shard.open(folder / info.name, manifest.token_dtype)
            for start, length, (file, line) in zip(
                shard.start, shard.length, shard.origin, strict=True
            ):
                key = (Path(manifest.files[file]).name, int(line))
                assert key not in found[split]
                found[split][key] = shard.tokens[start : start + length].tolist()
    return found


@pytest.fixture(scope="module")
def built(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("datasets") / "built"
    build(config_of(corpus, folder))
    return folder


def test_every_document_is_in_one_split_with_its_tokens_and_origin(built):
    found = documents_of(built)
    tokenizer = Tokenizer.load(built / "tokenizer")
    counts = {"a.jsonl": 100, "b.jsonl.gz": 200, "c.jsonl": 100}
    origin = [(name, i + 1) for name, count in counts.items() for i in range(count)]
    texts = tokenizer.encode_batch([make_text(i) for i in range(DOCUMENTS)])
    expected = {key: tokens.tolist() for key, tokens in zip(origin, texts, strict=True)}
    assert {**found["train"], **found["heldout"]} == expected
    assert not found["train"].keys() & found["heldout"].keys()
    assert 0.05 * DOCUMENTS < len(found["heldout"]) < 0.16 * DOCUMENTS


def test_the_dataset_does_not_depend_on_the_number_of_workers(corpus, built, tmp_path):
    build(config_of(corpus, tmp_path / "other", workers=3))
    assert files_of(tmp_path / "other") == files_of(built)
    assert len(Manifest.load(built).splits["train"]) > 5


def test_a_folder_holds_the_dataset_and_nothing_else(built):
    names = {shard.name for shard in Manifest.load(built).shards}
    found = {path.name for path in built.iterdir()}
    assert found == {*names, "manifest.json", "tokenizer", ".cache"}


def test_equal_texts_go_to_the_same_split(corpus, tmp_path):
    lines = [json.dumps({"n": n, "text": make_text(i)}) for n in range(2) for i in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = jsonl.Config((str(tmp_path / "a.jsonl"),))
    build(config_of(corpus, tmp_path / "out", source=source, heldout_fraction=0.3))
    found = documents_of(tmp_path / "out")
    train, heldout = (
        {tuple(tokens) for tokens in found[split].values()} for split in ("train", "heldout")
    )
    assert heldout
    assert not train & heldout


BAD = {
    "utf8.jsonl": b'{"text": "\xff"}\n{"text": "w1"}\n',
    "json.jsonl": b'{"text": "w1"}\n{"text": \n',
    "field.jsonl": b'{"txt": "w1"}\n{"text": 7}\n',
    "blank.jsonl": b'{"text": "  "}\n{"text": "\\u0000\\u0001"}\n',
    "empty.jsonl": b"",
    "cut.jsonl.gz": gzip.compress(b'{"text": "w1"}\n' * 9)[:-9],
}
REASONS = {
    "invalid UTF-8": 1,
    "invalid JSON": 1,
    "no field 'text'": 1,
    "field 'text' is not text": 1,
    "empty document": 1,
    "no tokens": 1,
    "empty file": 1,
    "truncated file": 1,
}


def test_bad_input_is_counted_listed_and_left_out(corpus, tmp_path, caplog):
    for name, data in BAD.items():
        (tmp_path / name).write_bytes(data)
    source = jsonl.Config((f"{tmp_path}/*.jsonl*",))
    manifest = build(config_of(corpus, tmp_path / "out", source=source, on_error="skip"))
    assert manifest.documents_rejected == REASONS
    assert manifest.documents_in == sum(shard.documents for shard in manifest.shards) + sum(
        REASONS.values()
    )
    listed = [
        json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    ]
    assert collections.Counter(entry["reason"] for entry in listed) == REASONS
    assert {"file": str(tmp_path / "json.jsonl"), "line": 2, "reason": "invalid JSON"} in listed
    assert "rejected 1: invalid JSON" in caplog.text


def test_bad_input_stops_the_build_with_file_and_line_and_it_goes_on_with_skip(corpus, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "w1"}\n{"text": \n{"text": "w2"}\n')
    config = config_of(corpus, tmp_path / "out", source=jsonl.Config((f"{tmp_path}/*.jsonl",)))
    for _ in range(2):  # the second time, the bad record is known from the first
        with pytest.raises(DataError, match=r"a\.jsonl:2: invalid JSON.*on_error=skip"):
            build(config)
    with pytest.raises(DataError, match="no finished dataset"):
        Manifest.load(tmp_path / "out")
    assert build(dataclasses.replace(config, on_error="skip")).documents_in == 3


def test_the_record_that_stops_a_build_is_the_first_bad_one_whichever_worker_is_done_first(
    corpus, tmp_path
):
    good = [json.dumps({"text": make_text(i)}) for i in range(200)]
    long = json.dumps(
        {"text": "w1 " * 300_000}
    )  # its worker is still busy when the others are done
    (tmp_path / "a.jsonl").write_text("\n".join([long, "first", *good, "second", *good, "third"]))
    source = jsonl.Config((f"{tmp_path}/*.jsonl",))
    with pytest.raises(DataError, match=r"a\.jsonl:2: invalid JSON"):
        build(config_of(corpus, tmp_path / "out", source=source, workers=3, shard_bytes=900_015))


def test_a_folder_without_locks_is_built_with_a_warning(
    corpus, built, tmp_path, monkeypatch, caplog
):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    build(config_of(corpus, tmp_path / "out"))
    assert "cannot be locked" in caplog.text
    assert files_of(tmp_path / "out") == files_of(built)


def test_a_source_without_documents_is_an_error(corpus, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"")
    config = config_of(
        corpus, tmp_path / "out", source=jsonl.Config((f"{tmp_path}/*.jsonl",)), on_error="skip"
    )
    with pytest.raises(DataError, match="no document to train on: 1 read, 1 rejected"):
        build(config)


def test_much_text_that_the_tokenizer_does_not_know_is_warned_of(corpus, built, tmp_path, caplog):
    lines = [json.dumps({"text": text}) + "\n" for text in ("w1 w2 w3", "w4 αβγ w5 δ", "w6")]
    (tmp_path / "greek.jsonl").write_text("".join(lines))
    source = jsonl.Config((f"{tmp_path}/greek.jsonl",))
    with caplog.at_level("WARNING"):
        greek = build(config_of(corpus, tmp_path / "greek", source=source, heldout_fraction=0))
    share = 2 / sum(shard.tokens for shard in greek.shards)
    assert (
        f"{share:.2%} of the tokens stand for text that the tokenizer does not know (2)"
        in caplog.text
    )
    caplog.clear()
    build(config_of(corpus, tmp_path / "known"))
    assert "does not know" not in caplog.text


def test_a_finished_dataset_is_neither_built_twice_nor_replaced_by_another(corpus, built, caplog):
    before = {path: path.stat().st_mtime_ns for path in built.iterdir()}
    caplog.set_level("INFO")
    assert build(config_of(corpus, built)) == Manifest.load(built)
    assert "is built already" in caplog.text
    for change in (
        {"heldout_fraction": 0.2},
        {"shard_bytes": 9000},
        {"source": jsonl.Config((f"{corpus}/a*",))},
    ):
        with pytest.raises(DataError, match=r"another source, tokenizer or settings.*--force"):
            build(config_of(corpus, built, **change))
    assert {path: path.stat().st_mtime_ns for path in built.iterdir()} == before


def test_force_replaces_a_dataset_and_leaves_no_shard_of_it(corpus, built, tmp_path):
    build(config_of(corpus, tmp_path / "out", shard_bytes=2000))
    manifest = build(config_of(corpus, tmp_path / "out"), force=True)
    assert manifest == Manifest.load(built)
    assert files_of(tmp_path / "out") == files_of(built)


def test_a_folder_of_something_else_is_left_alone(corpus, tmp_path):
    (tmp_path / "train-000000.tar").write_text("precious")
    with pytest.raises(DataError, match="neither empty nor a dataset"):
        build(config_of(corpus, tmp_path), force=True)
    assert (tmp_path / "train-000000.tar").read_text() == "precious"


def test_a_tokenizer_is_never_made_on_the_side(corpus, tmp_path):
    config = config_of(corpus, tmp_path / "out", tokenizer=TokenizerConfig(str(tmp_path / "none")))
    with pytest.raises(DataError, match=r"no tokenizer in .*samestep data tokenizer"):
        build(config)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_is_trained_once(corpus, tmp_path):
    wanted = TokenizerConfig(str(tmp_path / "tokenizer"), vocab_size=40, sample=0.5)
    config = config_of(corpus, tmp_path / "out", tokenizer=wanted)
    fingerprint = train_tokenizer(config).fingerprint
    assert Tokenizer.load(tmp_path / "tokenizer").fingerprint == fingerprint
    with pytest.raises(DataError, match=r"exists already.*--force"):
        train_tokenizer(config)
    assert train_tokenizer(config, force=True).vocabulary.size == 40


def test_units_are_cut_by_bytes_and_depend_on_the_records_alone():
    sizes = [10, 0, 0, 95, 5, 200, 3]
    records = [Record(0, i, bytes(size), (i + 1) / 7) for i, size in enumerate(sizes)]
    units = list(cut(records, 100))
    assert [len(unit.records) for unit in units] == [4, 2, 1]
    assert [record for unit in units for record in unit.records] == records
    assert len({unit.digest for unit in units}) == 3
    assert sum(unit.share for unit in units) == pytest.approx(1)
    for change in ({"line": 99}, {"file": 1}, {"data": b"other"}, {"problem": "empty file"}):
        (other,) = cut([records[0]._replace(**change)], 100)
        (same,) = cut([records[0]], 100)
        assert other.digest != same.digest
    assert list(cut([], 100)) == []


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "samestep.cli", "data", *arguments]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_build_stopped_at_any_moment_goes_on_where_it_was(tmp_path, corpus, sent):
    with (tmp_path / "a.jsonl").open("w") as file:
        for i in range(4 * DOCUMENTS):  # two seconds to be stopped in
            file.write((json.dumps({"text": " ".join([make_text(i)] * 20)})) + "\n")
    source = jsonl.Config((f"{tmp_path}/*.jsonl",))
    config = config_of(corpus, tmp_path / "out", source=source, shard_bytes=40_000, workers=2)
    (tmp_path / "config.yaml").write_text(dump(config))
    arguments = command("build", str(tmp_path / "config.yaml"))
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True)
    outcomes = tmp_path / "out" / ".build"
    while not (outcomes / "000001.json").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    workers = children_of(process.pid)
    (os.kill if sent == signal.SIGKILL else os.killpg)(process.pid, sent)
    _, message = process.communicate(timeout=30)

    assert process.returncode in (-signal.SIGKILL, 128 + signal.SIGINT)
    assert sent == signal.SIGKILL or "Run the same command" in message
    assert "Traceback" not in message
    deadline = time.monotonic() + 10
    while any(alive(worker) for worker in workers):
        assert time.monotonic() < deadline, "workers outlive the build"
        time.sleep(0.05)
    with pytest.raises(DataError, match="no finished dataset"):
        Manifest.load(tmp_path / "out")

    finished = [
        path for path in outcomes.glob("*.json") if path.name in ("000000.json", "000001.json")
    ]
    shards = [tmp_path / "out" / f"train-{path.stem}.tar" for path in finished]
    written = {path: path.stat().st_mtime_ns for path in shards}
    (tmp_path / "out" / ".train-000003.tar.999.tmp").write_text("half a shard")
    (tmp_path / "out" / "train-000999.tar").write_text("a shard of other input")
    build(config)
    assert {path: path.stat().st_mtime_ns for path in shards} == written
    build(dataclasses.replace(config, output=str(tmp_path / "at-once")))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "at-once")


def test_pieces_of_a_stopped_build_of_other_settings_or_input_are_made_again(
    corpus, built, tmp_path
):
    """A build that fails at its last file leaves the outcomes of the others."""
    out = tmp_path / "out"
    lines = (corpus / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl").write_bytes(lines + b"not JSON\n")
    source = jsonl.Config((str(tmp_path / "a.jsonl"),))
    config = config_of(corpus, out, source=source)
    with pytest.raises(DataError, match="invalid JSON"):
        build(config)
    left = sorted((out / ".build").glob("*.json"))
    assert left
    (out / "train-000000.tar").write_bytes(b"short")  # a shard that lost its bytes is made again
    (tmp_path / "a.jsonl").write_bytes(lines.replace(b"w1", b"w2"))
    build(dataclasses.replace(config, heldout_fraction=0.3))
    build(dataclasses.replace(config, heldout_fraction=0.3, output=str(tmp_path / "fresh")))
    assert files_of(out) == files_of(tmp_path / "fresh")


def test_a_unit_that_fails_half_way_leaves_no_outcome_of_an_earlier_build(built, tmp_path):
    """Its first shard is new then, perhaps of the old one's size, which a resumed build must not
    take for the old.
    """
    shutil.copytree(built / "tokenizer", tmp_path / "tokenizer")
    outcome = Outcome("another build", "digest", 1, (), {}, 0)
    outcome.save(outcome_path(tmp_path, 0))
    (tmp_path / "heldout-000000.tar").mkdir()  # no file can replace a folder
    source = jsonl.JsonLines(("a.jsonl",), "text")
    (unit,) = cut(
        (Record(0, i, json.dumps({"text": make_text(i)}).encode(), 1.0) for i in range(50)), 10**9
    )
    with pytest.raises(DataError, match="cannot write"):
        UnitWriter(tmp_path, source, 0.5, "this build")(unit)
    assert (tmp_path / "train-000000.tar").exists()
    assert Outcome.load(outcome_path(tmp_path, 0)) is None


def test_two_builds_do_not_write_one_folder(corpus, tmp_path):
    (tmp_path / ".build").mkdir()
    with (tmp_path / ".build" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another build is writing"):
            build(config_of(corpus, tmp_path))
    build(config_of(corpus, tmp_path))


@pytest.mark.long
def test_a_full_disk_is_one_paragraph_and_the_build_goes_on_later(corpus, built, tmp_path):
    config = config_of(corpus, tmp_path / "out")
    (tmp_path / "config.yaml").write_text(dump(config))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    failed = subprocess.run(
        command("build", str(tmp_path / "config.yaml")),
        env={
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "1",
        },  # its files would be cut, too, and stay so
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, hard)),
    )
    assert failed.returncode == 1
    assert "cannot write" in failed.stderr
    assert "raise the limit of the size of a file (ulimit -f)" in failed.stderr
    assert "Traceback" not in failed.stderr
    build(config)
    assert files_of(tmp_path / "out") == files_of(built)


def test_a_worker_that_is_killed_is_an_error_not_a_hang():
    items = iter(["1 + 1", "import os; os.kill(os.getpid(), 9)"] + ["pass"] * 10)
    with pytest.raises(DataError, match=r"ended without an answer .*-9"):
        list(pool.process(items, partial(partial, exec), workers=2))


def test_what_a_worker_raises_is_raised_with_its_place():
    with pytest.raises(ZeroDivisionError) as caught:
        list(pool.process(iter(["1 / 0"]), partial(partial, eval), workers=1))
    assert "Traceback" in caught.value.__notes__[0]


def test_the_pool_draws_items_only_when_a_worker_is_free():
    drawn, done = 0, 0

    def items():
        nonlocal drawn
        for _ in range(20):
            drawn += 1
            assert drawn - done <= 3
            yield "x" * 10**6

    for item, result in pool.process(items(), partial(partial, len), workers=2):
        assert result == len(item)
        done += 1
    assert done == drawn == 20
    assert list(pool.process(iter([]), partial(partial, len), workers=2)) == []


def test_ctrl_c_reaches_the_parent_and_no_worker_not_even_one_that_starts(monkeypatch):
    monkeypatch.setattr(pool, "multiprocessing", multiprocessing)  # workers that are spawned
    blocked = "__import__('signal').pthread_sigmask(0, [])"
    for _, signals in pool.process(iter([blocked] * 3), partial(partial, eval), workers=2):
        assert signal.SIGINT in signals
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_all_workers_start_before_the_first_item_is_sent(monkeypatch):
    events = []
    for name in ("__init__", "send"):
        original = getattr(pool._Worker, name)

        def logged(self, *message, name=name, original=original):
            events.append(name)
            original(self, *message)

        monkeypatch.setattr(pool._Worker, name, logged)
    assert len(list(pool.process(iter(["x"] * 3), partial(partial, len), workers=2))) == 3
    # The first message to a worker is its function.
    assert events == ["__init__"] * 2 + ["send"] * 2 + ["send"] * 3
    events.clear()
    assert len(list(pool.process(iter(["x"]), partial(partial, len), workers=9))) == 1
    assert events == ["__init__", "send", "send"]  # no worker without work


def test_verify_finds_every_kind_of_damage(corpus, built, tmp_path):
    assert verify(built) == []
    build(config_of(corpus, tmp_path / "out"))
    first, second, third, *_ = sorted((tmp_path / "out").glob("train-*.tar"))
    flipped = bytearray(first.read_bytes())
    flipped[700] ^= 1
    first.write_bytes(flipped)
    second.write_bytes(second.read_bytes()[:-512])
    third.unlink()
    Tokenizer.load(built / "tokenizer")
    tree = json.loads((tmp_path / "out" / "tokenizer" / "tokenizer.json").read_text())
    tree["normalizer"]["lowercase"] = True
    (tmp_path / "out" / "tokenizer" / "tokenizer.json").write_text(json.dumps(tree))
    problems = verify(tmp_path / "out")
    assert len(problems) == 4
    assert "SHA-256" in next(problem for problem in problems if first.name in problem)
    checked = subprocess.run(
        command("verify", str(tmp_path / "out")), capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 1
    assert all(problem in checked.stdout for problem in problems)
    with pytest.raises(DataError, match="no finished dataset"):
        verify(tmp_path)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml"), key=str))
def test_the_configurations_that_come_along_are_valid(path):
    config = load(Config, str(path))
    assert yaml.safe_load(dump(config))["output"]


@pytest.mark.parametrize("change", [{"heldout_fraction": 1.0}, {"shard_bytes": 0}, {"workers": 0}])
def test_settings_that_cannot_be_are_refused(tmp_path, change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        config_of(tmp_path, tmp_path, **change)
