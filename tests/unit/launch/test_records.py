"""The file of jobs and the table of jobs, with some invalid lines and folders."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launch import records
from launch.job import Record
from launch.kinds import local
from samestep.errors import LaunchError
from tests.integration.commands import Samestep


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def add(
        identity: str, cluster: str | None = "kind: local\n", output: str = "", **about: str
    ) -> Record:
        place = tmp_path / (output or identity)
        folder = place / "launch" / "001"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "exit").write_text("0\n")
        if cluster is not None:
            (folder / "cluster.yaml").write_text(cluster)
        record = Record(identity, "local", "run", str(place), folder, 1.5, about)
        records.add(record)
        return record

    return add


def test_invalid_lines_are_skipped(add, caplog: pytest.LogCaptureFixture) -> None:
    first = add("1")
    file = records.state_folder() / "jobs.jsonl"
    good = json.loads(file.read_text())
    changes = ({"new": 1}, {"id": 4}, {"time": "x"}, {"about": {"a": 1}}, {"about": []})
    wrong = [json.dumps({**good, **change}).encode() for change in changes]
    wrong = [b"[]", b"7", b'{"id": 1}', b"\xff", *wrong]
    with file.open("ab") as stream:
        stream.write(b"\n".join(wrong) + b'\n{"id": "2", "ki')  # the disk is full
    second = add("3")
    with caplog.at_level(logging.WARNING):
        assert records.newest_first() == [second, first]
    assert len(caplog.records) == len(wrong) + 1
    assert f"{file}, line 3 is no job" in caplog.text


def test_jobs_are_added_at_once(add) -> None:
    def add_many(thread: int) -> None:
        for number in range(10):
            add(f"{thread}-{number}", about="x" * 2**16)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add_many, range(8)))
    assert len(records.newest_first()) == 80


def test_a_job_is_found_by_the_ids_of_its_parts(add) -> None:
    segments, array = add("4711", segments="4711 4712 4713"), add("4800", segments="4800")
    assert [records.find(job) for job in ("4713", "4711", "4800_3", "4800")] == [
        segments,
        segments,
        array,
        array,
    ]
    assert records.find(f"{array.output}/") == array
    for job in ("4714", "4800_x", "3"):
        with pytest.raises(LaunchError, match=f"no job {job}"):
            records.find(job)


def test_a_job_is_found_by_its_output_however_that_is_written(add) -> None:
    record = add("1")
    for output in ("1", "1/", "elsewhere/../1", "./1", record.output):
        assert records.find(output) == record


def test_a_job_with_the_id_of_an_older_one_has_its_own_state(add, samestep: Samestep) -> None:
    """Numbers of processes come again, in containers always."""
    with subprocess.Popen(["sleep", "60"]) as process:
        identity, here = f"local-{process.pid}", socket.gethostname()
        started = local._started(process.pid)
        for output, start in (("old", "boot 1"), ("new", started), ("other", "boot 2")):
            add(identity, output=output, pid=str(process.pid), host=here, started=start)
        lines = [line.split() for line in samestep("jobs").out.splitlines()[1:]]
        process.kill()
    assert [(line[0], line[2], line[-1]) for line in lines] == [
        (identity, "running", "new"),
        (identity, "done", "other"),
        (identity, "done", "old"),
    ]


def test_a_folder_has_its_newest_job_alone(add) -> None:
    """The output of the other one was removed."""
    add("1", output="run")
    newest = add("2", output="run")
    assert records.newest_first() == [newest]


@pytest.mark.parametrize(
    "cluster", [None, "kind: local\nold: 1\n", "kind: former\n", "[", "7", "processes: 1\n"]
)
def test_a_job_of_another_version_does_not_hide_others(
    add, samestep: Samestep, cluster: str | None
) -> None:
    add("1")
    add("2", cluster)
    lines = samestep("jobs").out.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["2", "local", "done"],
        ["1", "local", "done"],
    ]
    assert (
        "cluster.yaml, which says where job 2 was submitted to, cannot be read"
        in samestep("logs", "2").message
    )


def test_nobody_knows_how_jobs_stand(add, samestep: Samestep) -> None:
    (add("1", None).folder / "config.yaml").write_text("[")
    result = samestep("jobs")
    assert result.out.splitlines()[1].split()[:3] == ["1", "local", "unknown"]
    assert "where job 1 was submitted to, cannot be read" in result.err
