"""Two jobs on one folder: the second is refused, unless the first one is no more."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.config import load
from samestep.errors import ConfigError, SupersededError
from tests.processes import fork
from trainer.checkpoint import files, history, lock
from trainer.checkpoint.files import Location
from trainer.checkpoint.lease import Lease
from trainer.checkpoint.lock import Group, Lock, Owner, only_writer
from trainer.training import compose
from trainer.training.experiment import Experiment


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"WAIT": 0.3, "RENEW": 0.05, "STALE": 0.5}.items():
        monkeypatch.setattr(lock, f"_{name}_SECONDS", seconds)


@pytest.fixture(params=["folder", "folder without flock", "store"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Location:
    if request.param == "folder without flock":

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, "no locks available")

        monkeypatch.setattr(fcntl, "flock", refuse)
    is_store = request.param == "store"
    return (
        files.location(request.getfixturevalue("s3_folder"))
        if is_store
        else tmp_path / "new" / "run"
    )


def leave_note(folder: Location, **changes: object) -> Owner:
    """What an owner leaves who is killed."""
    owner = replace(Owner.this_process(), **changes)
    files.write(folder / ".owner", json.dumps(vars(owner)).encode())
    return owner


def test_the_second_is_told_who_was_first(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setattr(lock, "_STALE_SECONDS", 5.0)  # a disk may be slow to take what is renewed
    with only_writer(folder):
        monkeypatch.setattr(Owner, "is_dead", False)  # these are two of one process
        with pytest.raises(ConfigError) as caught, only_writer(folder):
            pass
        assert f"another training is running in {folder}: ada on {platform.node()}" in str(
            caught.value
        )
        assert f"process {os.getpid()}, job 4711, for 0:00:0" in str(caught.value)
        assert "last sign of life 0:00:0" in str(caught.value)
    assert ".owner" not in files.names(folder)
    with only_writer(folder):
        pass


def test_another_machine_s_note_counts_while_it_is_renewed(
    folder: Location, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock says nothing; what it left when it was killed is taken over with a warning."""
    leave_note(folder, host="elsewhere", machine="another", since=0.0, renewed=time.time() + 10**6)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), only_writer(folder):
        assert time.monotonic() - began > lock._STALE_SECONDS
        assert "gives no sign of life" in caplog.text
        assert "on elsewhere" in caplog.text

    first = Lock(folder)
    first._me = replace(first._me, host="elsewhere", machine="another")
    first.take(alone=False)
    monkeypatch.setattr(lock, "_STALE_SECONDS", 5.0)
    with pytest.raises(ConfigError, match=r"is running in .* on elsewhere"), only_writer(folder):
        pass
    first.release()


def test_a_note_of_a_newer_version_counts(folder: Location) -> None:
    """It has a key that this version does not know."""
    owner = leave_note(folder, host="elsewhere", machine="another")
    files.write(folder / ".owner", json.dumps({**vars(owner), "new": 1}).encode())
    assert Lock(folder).owner() == owner


@pytest.mark.parametrize("note", [b"", b"1", b"[]", b'{"token": "a"}', b'{"tok'])
def test_a_damaged_note_is_watched_until_its_owner_has_been_silent(
    tmp_path: Path, note: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    files.write(tmp_path / ".owner", note)
    began = time.monotonic()
    with only_writer(tmp_path):
        assert time.monotonic() - began > lock._STALE_SECONDS
    assert "its note, .owner, is damaged" in caplog.text


def test_an_owner_who_renews_a_damaged_note_is_alive(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_STALE_SECONDS", 5.0)
    files.write(folder / ".owner", b"")
    owner = {"host": "elsewhere", "machine": "another"}
    renewal = threading.Timer(0.3, leave_note, [folder], owner)
    renewal.start()
    with pytest.raises(ConfigError, match=r"is running in .* on elsewhere"), only_writer(folder):
        pass


def test_a_killed_process_of_this_machine_keeps_nobody_waiting(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_STALE_SECONDS", 60.0)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    leave_note(folder, pid=ended.pid)
    began = time.monotonic()
    with only_writer(folder):
        assert time.monotonic() - began < 30


def test_process_numbers_of_another_container_say_nothing(folder: Location) -> None:
    """It may have the name of this one, and a number that nobody has here."""
    leave_note(folder, machine="another", pid=2**22 + 1)
    began = time.monotonic()
    with only_writer(folder):
        assert time.monotonic() - began > lock._STALE_SECONDS


def test_who_was_taken_over_ends(tmp_path: Path) -> None:
    """As a process that was stopped for long, and goes on: it must not write any more."""
    first = fork()
    if first == 0:
        logging.basicConfig(filename=tmp_path / "log", force=True)
        with only_writer(tmp_path):
            time.sleep(60)
        os._exit(0)
    while not (tmp_path / ".owner").exists():
        time.sleep(0.01)
    os.kill(first, signal.SIGSTOP)
    taken = Lease.take(tmp_path)
    assert taken is not None
    assert taken.number == 2
    os.kill(first, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 2
    assert "another training has taken" in (tmp_path / "log").read_text()
    taken.check()


def test_a_late_note_of_a_former_owner_hides_no_owner(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was frozen while it renewed its note; it is here and dead, but not the newest owner."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with only_writer(folder):
        monkeypatch.setattr(lock, "_STALE_SECONDS", 5.0)
        leave_note(folder, lease=0, pid=ended.pid)
        with pytest.raises(ConfigError, match="is running in"):
            Lock(folder).take(alone=False)


@pytest.mark.parametrize(
    ("order", "is_later"), [((3, 1), True), ((2, 8), True), ((2, 7), False), ((1, 9), False)]
)
def test_a_later_round_of_the_same_run_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, int], is_later: bool
) -> None:
    """Its host has found the machines of the round before lost."""
    monkeypatch.setenv(lock.GROUP, str(Group("a", order)))
    for name in ("a", "b"):
        leave_note(tmp_path, host="elsewhere", machine="another", group=f"{name} 2 7")
        began = time.monotonic()
        with only_writer(tmp_path):
            waited = time.monotonic() - began > lock._STALE_SECONDS
            assert waited == (name == "b" or not is_later)


def test_a_later_round_does_not_wait_for_the_lock_of_a_frozen_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(lock.GROUP, "a 1 1")
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 60.0)
    # The first one is frozen: this process would end once it noticed that it was taken over.
    monkeypatch.setattr(lock, "_RENEW_SECONDS", 60.0)
    with only_writer(tmp_path):
        monkeypatch.setenv(lock.GROUP, "a 1 2")
        began = time.monotonic()
        with only_writer(tmp_path) as lease:
            assert time.monotonic() - began < 30
            lease.check()


def test_a_run_on_several_machines_tries_again_if_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner may be a part of the run that does not know yet that another part goes on."""
    monkeypatch.setattr(lock, "_STALE_SECONDS", 5.0)
    with only_writer(tmp_path):
        monkeypatch.setattr(Owner, "is_dead", False)
        for group, code in {"": 2, "a 1 1": 70}.items():
            monkeypatch.setenv(lock.GROUP, group)
            with pytest.raises(ConfigError, match="is running in") as refused:
                Lock(tmp_path).take(alone=False)
            assert refused.value.exit_code == code


def test_of_several_that_start_at_once_one_gets_the_lease(folder: Location) -> None:
    files.make_folder(folder)
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: Lease.take(folder), range(8)))
    numbers = [lease.number for lease in taken if lease is not None]
    assert numbers
    assert len(set(numbers)) == len(numbers)
    newest = max((lease for lease in taken if lease is not None), key=lambda each: each.number)
    newest.check()
    for lease in taken:
        if lease is not None and lease is not newest:
            with pytest.raises(SupersededError, match="another training has taken"):
                lease.check()


def test_a_number_that_was_removed_is_not_taken_again(
    folder: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process pauses between its look and its lease; three others take the folder meanwhile."""
    files.make_folder(folder)
    look = files.names
    seen = look(folder)
    for _ in range(3):
        assert Lease.take(folder) is not None
    assert history.lease_numbers(look(folder)) == [3]
    looks = [seen]
    monkeypatch.setattr(files, "names", lambda of: looks.pop() if looks else look(of))
    assert Lease.take(folder) is None


def test_checkpoints_may_lie_among_what_else_the_run_writes(
    experiment_file: str, tmp_path: Path
) -> None:
    """A run is not in its own way."""
    settings = [f"output={tmp_path}", f"checkpoint.folder={tmp_path}/"]
    with compose.only_writer_of(load(Experiment, experiment_file, settings), rank=0):
        assert (tmp_path / ".owner").exists()
    assert not (tmp_path / ".owner").exists()
