"""`samestep data build --slice I/N`.

Shares of a build in any order, at once, stopped and begun again.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from data_pipeline.building.build import build
from data_pipeline.building.config import Config
from data_pipeline.building.slices import Claim, Slice
from data_pipeline.building.verify import verify
from data_pipeline.format.manifest import Manifest
from data_pipeline.sources.kinds import jsonl
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.config import dump
from samestep.errors import ConfigError, DataError
from tests.integration.commands import Samestep
from tests.unit.data_pipeline.building.test_build import (
    alive,
    children_of,
    command,
    config_of,
    files_of,
    make_text,
)

DOCUMENTS = 120
UNITS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A folder with two files of documents, six units together, and a tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": make_text(i)}) + "\n" for i in range(DOCUMENTS)]
    (folder / "a.jsonl").write_text("".join(lines[:50]))
    (folder / "b.jsonl").write_text("".join(lines[50:]))
    TokenizerConfig("", vocab_size=200).train(make_text(i) for i in range(100)).save(
        folder / "tokenizer"
    )
    return folder


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> Path:
    """What one process builds of it."""
    folder = tmp_path_factory.mktemp("datasets") / "whole"
    build(config_of(corpus, folder, shard_bytes=3000))
    assert len(Manifest.load(folder).splits["train"]) == UNITS
    return folder


@pytest.fixture
def config(corpus, tmp_path) -> Config:
    return config_of(corpus, tmp_path / "out", shard_bytes=3000)


def outcomes_of(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in (folder / ".build").glob("*.json"))


@contextmanager
def at_work(folder: Path, part: Slice | None, digest: str = "a build") -> Iterator[None]:
    """Holds what a build, or a slice of one, holds while it makes units."""
    with Claim(folder, part) as claim:
        with claim.door():
            claim.stay(digest, claim.enter())
        yield


def digest_of(folder: Path) -> str:
    """The digest of the build that has left outcomes."""
    return json.loads(next((folder / ".build").glob("*.json")).read_text())["build"]


def test_slices_in_any_order_give_the_bytes_of_one_build(config, whole, tmp_path, caplog):
    caplog.set_level("INFO")
    out = tmp_path / "out"
    assert build(config, part=Slice(3, 3)) is None
    assert outcomes_of(out) == [2, 5]  # its own only
    assert f"slice 3/3 of {out} is done; 4 of 6 units are missing" in caplog.text
    assert build(config, part=Slice(1, 3)) is None
    assert outcomes_of(out) == [0, 2, 3, 5]
    assert build(config, part=Slice(3, 3)) is None  # again: it has nothing to do
    assert not (out / "manifest.json").exists()
    assert build(config, part=Slice(2, 3)) == Manifest.load(whole)
    assert files_of(out) == files_of(whole)

    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert build(config, part=Slice(1, 3)) == Manifest.load(whole)
    assert "is built already" in caplog.text
    with pytest.raises(DataError, match="another source, tokenizer or settings"):
        build(dataclasses.replace(config, heldout_fraction=0.2), part=Slice(1, 3))
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


@pytest.mark.long
@pytest.mark.parametrize(
    "attempt", [0, *(pytest.param(attempt, marks=pytest.mark.long) for attempt in (1, 2))]
)
def test_of_slices_at_once_exactly_one_merges(config, whole, tmp_path, attempt):
    (tmp_path / "config.yaml").write_text(dump(config))
    processes = [
        subprocess.Popen(
            command("build", str(tmp_path / "config.yaml"), "--slice", f"{i}/3"),
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in (1, 2, 3)
    ]
    messages = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], messages
    assert (
        sum(f"built {tmp_path}/out: {DOCUMENTS} documents" in message for message in messages) == 1
    ), messages
    assert sum("is done; " in message for message in messages) == 2, messages
    assert files_of(tmp_path / "out") == files_of(whole)


def test_of_slices_that_are_done_at_the_same_moment_one_finds_the_work_of_all(tmp_path):
    """Threads, since these locks belong to an opened file.

    They meet more closely than processes.
    """
    count, rounds = 6, 60
    together = threading.Barrier(count)

    def work(folder: Path, part: Slice) -> int:
        """0: left it to others; 1: found all and finished; raises what a slice would."""
        together.wait()
        with Claim(folder, part) as claim:
            with claim.door():
                alone = claim.enter()
                claim.stay("digest", alone)
            (folder / str(part.index)).touch()
            if part.index % 2:  # some are done before others have begun
                together_or_not.wait()
            with claim.door():
                if not claim.end() or len(list(folder.glob("[0-9]"))) < count:
                    return 0
                assert not (folder / "manifest.json").exists()
                (folder / "manifest.json").touch()
                for path in (folder / ".build").iterdir():
                    path.unlink()
        return 1

    with ThreadPoolExecutor(count) as threads:
        for number in range(rounds):
            together_or_not = threading.Barrier(count // 2)
            folder = tmp_path / str(number)
            assert (
                sum(
                    threads.map(work, [folder] * count, [Slice(i + 1, count) for i in range(count)])
                )
                == 1
            )
            assert (folder / "manifest.json").exists()
            assert not (folder / ".build").exists()


def test_who_is_refused_or_done_holds_nothing_when_the_door_opens(tmp_path):
    """Else one that comes next would take it for one at work, and leave the merge to it."""
    (tmp_path / ".build").mkdir()
    with Claim(tmp_path, Slice(1, 2)) as first, Claim(tmp_path, Slice(2, 2)) as second:
        with first.door():
            first.stay("a build", first.enter())
        with pytest.raises(DataError, match="another source"), second.door():
            second.stay("another build", second.enter())
        with first.door():
            assert first.end()
        with Claim(tmp_path, Slice(1, 2)) as again, again.door():
            assert again.enter()


def test_a_door_that_was_removed_keeps_nobody_out(tmp_path):
    entered = []

    def wait() -> None:
        with Claim(tmp_path, Slice(2, 2)) as claim, claim.door():
            entered.append((tmp_path / ".build" / "door").exists())

    (tmp_path / ".build").mkdir()
    with Claim(tmp_path, Slice(1, 2)) as claim, claim.door():
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)  # it waits by now, at the door that goes
        assert not entered
        (tmp_path / "manifest.json").touch()
        shutil.rmtree(tmp_path / ".build")
    thread.join(timeout=30)
    assert entered == [True]


@pytest.mark.long
def test_a_slice_that_is_killed_goes_on_where_it_was(tmp_path, corpus):
    with (tmp_path / "a.jsonl").open("w") as file:
        for i in range(1600):  # a second to be killed in
            file.write((json.dumps({"text": " ".join([make_text(i)] * 20)})) + "\n")
    source = jsonl.Config((f"{tmp_path}/*.jsonl",))
    out = tmp_path / "out"
    config = config_of(corpus, out, source=source, shard_bytes=40_000)
    (tmp_path / "config.yaml").write_text(dump(config))
    arguments = command("build", str(tmp_path / "config.yaml"), "--slice", "1/2")
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    while 2 not in outcomes_of(out):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    workers = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while any(alive(worker) for worker in workers):
        assert time.monotonic() < deadline, "workers outlive the slice"
        time.sleep(0.05)

    made = [out / f"train-{unit:06d}.tar" for unit in (0, 2)]
    written = {path: path.stat().st_mtime_ns for path in made}
    (out / ".train-000004.tar.999.tmp").write_text("half a shard")
    assert build(config, part=Slice(2, 2)) is None
    assert build(config, part=Slice(1, 2)) is not None
    assert {path: path.stat().st_mtime_ns for path in made} == written
    build(dataclasses.replace(config, output=str(tmp_path / "whole")))
    assert files_of(out) == files_of(tmp_path / "whole")


def test_what_a_merge_that_was_killed_left_behind_is_removed(config, whole, tmp_path):
    out = tmp_path / "out"
    build(config)
    (out / ".build").mkdir()
    (out / ".build" / "000000.json").write_text("{}")
    (out / "train-000999.tar").write_text("a shard of other input")
    assert build(config, part=Slice(2, 3)) == Manifest.load(whole)
    assert files_of(out) == files_of(whole)
    assert not (out / ".build").exists()


def test_a_whole_build_goes_on_with_what_slices_have_made(config, whole, tmp_path):
    assert build(config, part=Slice(2, 2)) is None
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tar")}
    build(config)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert files_of(tmp_path / "out") == files_of(whole)


def test_while_slices_are_at_work_others_of_the_same_build_may_come_and_nobody_else(
    config, whole, tmp_path, caplog
):
    caplog.set_level("INFO")
    out = tmp_path / "out"
    assert build(config, part=Slice(2, 3)) is None
    with at_work(out, Slice(1, 3), digest_of(out)):
        with pytest.raises(DataError, match=r"another build is writing .*\. Wait for it"):
            build(config)
        with pytest.raises(
            DataError, match=r"slice 1/3 of .* is being built by another process\. Wait"
        ):
            build(config, part=Slice(1, 3))
        with pytest.raises(
            DataError, match=r"slices of another source, tokenizer or settings are being built"
        ):
            build(dataclasses.replace(config, heldout_fraction=0.2), part=Slice(3, 3))
        assert build(config, part=Slice(3, 3)) is None
        assert build(config, part=Slice(1, 2)) is None  # shares may overlap
        assert outcomes_of(out) == [0, 1, 2, 4, 5]
        assert "1 of 6 units are missing" in caplog.text
        assert "others are at work" not in caplog.text
        assert build(config, part=Slice(4, 5)) is None
        assert "others are at work" in caplog.text  # who is at work merges, though all is there
    assert build(config, part=Slice(1, 3)) == Manifest.load(whole)
    assert files_of(out) == files_of(whole)


def test_while_a_whole_build_is_at_work_a_slice_is_refused(config, whole, tmp_path):
    with (
        at_work(tmp_path / "out", None),
        pytest.raises(DataError, match="another build is writing"),
    ):
        build(config, part=Slice(1, 2))
    assert build(config, part=Slice(1, 1)) == Manifest.load(whole)


def test_units_of_other_settings_do_not_count(config, tmp_path, caplog):
    caplog.set_level("INFO")
    other = dataclasses.replace(config, heldout_fraction=0.3)
    assert build(config, part=Slice(1, 2)) is None
    assert build(other, part=Slice(2, 2)) is None
    assert "3 of 6 units are missing" in caplog.text
    assert build(other, part=Slice(1, 2)) is not None
    build(dataclasses.replace(other, output=str(tmp_path / "whole")))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_more_slices_than_units(corpus, tmp_path, caplog):
    caplog.set_level("INFO")
    config = config_of(corpus, tmp_path / "out", shard_bytes=9000)
    assert build(config, part=Slice(3, 4)) is None
    assert "slice 3/4 is empty: there are 2 units only" in caplog.text
    assert build(config, part=Slice(1, 4)) is None
    with at_work(tmp_path / "out", Slice(1, 4), digest_of(tmp_path / "out")):
        assert build(config, part=Slice(2, 4)) is None
    merged = build(config, part=Slice(4, 4))  # the last one, though it has made nothing
    assert merged == build(dataclasses.replace(config, output=str(tmp_path / "whole")))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_bad_record_stops_its_slice_and_nothing_is_merged(corpus, tmp_path):
    lines = (corpus / "b.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b.jsonl").write_text("".join([*lines, "not JSON\n"]))
    source = jsonl.Config((f"{tmp_path}/*.jsonl",))
    out = tmp_path / "out"
    config = config_of(corpus, out, source=source, shard_bytes=3000)
    units = 3
    assert build(config, part=Slice(1, units)) is None
    for _ in range(2):
        with pytest.raises(DataError, match=r"b\.jsonl:71: invalid JSON\. Correct it"):
            build(config, part=Slice(units, units))
    with pytest.raises(DataError, match=r"b\.jsonl:71: invalid JSON\. Correct it"):
        build(
            config, part=Slice(2, units)
        )  # it has no bad record, but all units are there: it would merge
    assert outcomes_of(out) == list(range(units))
    assert not (out / "manifest.json").exists()
    skip = dataclasses.replace(config, on_error="skip")
    manifest = build(skip, part=Slice(2, units))
    assert manifest is not None
    assert manifest.documents_rejected == {"invalid JSON": 1}
    build(dataclasses.replace(skip, output=str(tmp_path / "whole")))
    assert files_of(out) == files_of(tmp_path / "whole")


def test_a_shard_that_was_damaged_before_the_merge_is_found(config, tmp_path):
    assert build(config, part=Slice(1, 2)) is None
    shard = tmp_path / "out" / "train-000002.tar"
    data = bytearray(shard.read_bytes())
    data[700] ^= 1
    shard.write_bytes(data)
    with pytest.raises(
        DataError, match=r"is damaged .*train-000002\.tar: its bytes have changed.*--force"
    ):
        build(config, part=Slice(2, 2))
    build(config, force=True)
    assert verify(tmp_path / "out") == []


def test_without_locks_slices_are_refused(config, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        DataError, match=r"cannot be locked \(No locks available\).*without --slice"
    ):
        build(config, part=Slice(1, 2))


def test_a_folder_of_something_else_or_that_cannot_be_written_is_refused(corpus, tmp_path):
    (tmp_path / "train-000000.tar").write_text("precious")
    with pytest.raises(DataError, match="neither empty nor a dataset"):
        build(config_of(corpus, tmp_path), part=Slice(1, 2))
    with pytest.raises(DataError, match="cannot write the dataset"):
        build(config_of(corpus, tmp_path / "train-000000.tar"), part=Slice(1, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["train-000000.tar"]


@pytest.mark.parametrize(
    "text", ["0/3", "4/3", "x", "3", "", "1/0", "-1/3", "1/3/3", "1 /3", "1.0/3", "1/3\n", "٣/٣"]
)
def test_what_is_no_slice_is_refused(text, config, tmp_path, samestep: Samestep):
    with pytest.raises(ConfigError, match=r"--slice is .*It takes I/N.*such as 3/8"):
        Slice.parse(text)
    (tmp_path / "config.yaml").write_text(dump(config))
    refused = samestep("data", "build", tmp_path / "config.yaml", f"--slice={text}")
    assert refused.code == 2
    assert "It takes I/N" in refused.message
    assert "\n" not in refused.message
    assert not (tmp_path / "out").exists()


def test_the_units_are_shared_out_by_turns():
    assert Slice.parse("3/8") == Slice(3, 8)
    assert Slice.parse("03/08") == Slice(3, 8)  # as some schedulers count
    shares = [[unit for unit in range(10) if Slice(i, 3).has(unit)] for i in (1, 2, 3)]
    assert shares == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


def test_force_does_not_go_with_slices(config, tmp_path, samestep: Samestep):
    (tmp_path / "config.yaml").write_text(dump(config))
    refused = samestep("data", "build", tmp_path / "config.yaml", "--slice", "1/2", "--force")
    assert refused.code == 2
    assert "--force does not go with --slice 1/2" in refused.message
    assert not (tmp_path / "out").exists()
