"""What the supervisor of a slice decides, case by case."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.tpu import slice as tpu_slice
from launch.tpu import supervisor as tpu_supervisor
from launch.tpu.slice import FILE, Kept, Slice, outcome
from launch.tpu.supervisor import Memory, Sight, Supervisor, decide
from samestep.errors import LaunchError

LIVE = Sight("ACTIVE", node="READY")


@pytest.mark.parametrize(
    ("memory", "sight", "phase", "action"),
    [
        (Memory(), Sight("WAITING_FOR_RESOURCES"), "running", "wait"),
        (Memory(), LIVE, "running", "wait"),
        (Memory(was_active=True), Sight("SUSPENDING"), "running", "wait"),
        (Memory(was_active=True), Sight("SUSPENDED"), "recreating", "delete"),
        (Memory(), Sight("SUSPENDED"), "recreating", "delete"),
        (Memory(was_active=True), Sight("FAILED"), "recreating", "delete"),
        (Memory(was_active=True), Sight("SUSPENDED", by_user=True), "ending", "delete"),
        (Memory(), Sight("FAILED"), "recreating", "delete"),
        (Memory(vain=3), Sight("FAILED", complaint="no"), "ending", "delete"),
        (Memory(was_active=True), replace(LIVE, node="PREEMPTED"), "recreating", "delete"),
        (Memory(was_active=True), replace(LIVE, node=""), "recreating", "delete"),
        (Memory(), replace(LIVE, node=""), "running", "wait"),
        (Memory(), replace(LIVE, node="", silent=True), "ending", "delete"),
        (Memory(was_active=True), replace(LIVE, silent=True), "ending", "delete"),
        (Memory(was_active=True, heard=True), replace(LIVE, silent=True), "recreating", "delete"),
        (Memory(), replace(LIVE, code=0), "ending", "delete"),
        (Memory(), replace(LIVE, code=1), "ending", "delete"),
        (Memory(), replace(LIVE, code=1, healthy=False), "recreating", "delete"),
        (Memory(), replace(LIVE, code=0, healthy=False), "ending", "delete"),
        (Memory(), Sight(""), "ending", "done"),
        (Memory("recreating"), Sight("DELETING"), "recreating", "wait"),
        (Memory("recreating"), Sight("SUSPENDED"), "recreating", "delete"),
        (Memory("recreating"), Sight(""), "recreating", "create"),
        (Memory("recreating"), Sight("", stop=True, stopped=True), "ending", "done"),
        (Memory(), replace(LIVE, stop=True), "running", "wait"),
        (Memory(), replace(LIVE, stop=True, stopped=True), "ending", "delete"),
        (Memory(was_active=True), Sight("SUSPENDED", stop=True, stopped=True), "ending", "delete"),
        (Memory("ending"), LIVE, "ending", "delete"),
        (Memory("ending"), Sight("DELETING"), "ending", "wait"),
        (Memory("ending", code=0), Sight(""), "ending", "done"),
    ],
)
def test_decisions_of_the_supervisor(memory: Memory, sight: Sight, phase: str, action: str) -> None:
    after, decided = decide(memory, sight)
    assert (after.phase, decided) == (phase, action)
    assert after.restarts == (1 if phase == "recreating" != memory.phase else 0)


@pytest.mark.parametrize(
    ("exits", "machines", "code"),
    [
        ({}, 1, None),
        ({"0": 0}, 1, 0),
        ({"0": 0}, 2, None),
        ({"0": 0, "1": 0}, 2, 0),
        ({"0": 75, "1": 0}, 2, 75),
        ({"0": 75, "1": 1}, 2, 1),
        ({"t1v-n-w-3": 1}, 1, 1),
    ],
)
def test_a_run_has_ended_when_all_machines_say_so(
    exits: dict[str, int], machines: int, code: int | None
) -> None:
    assert outcome(exits, machines) == code


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """Of two machines, where no time passes."""
    place = Slice(
        "name", "project", "zone", "gs://bucket/folder", "mark", (), 25.0, True, 60.0, 1800.0
    )
    (tmp_path / FILE).write_text(place.dump())
    node = {"state": "READY", "networkEndpoints": [{}, {}]}
    seen = {
        "queued": {"state": {"state": "ACTIVE"}},
        "node": node,
        "objects": {"exit-1": Kept(4, "1")},
    }
    for name, value in seen.items():
        monkeypatch.setattr(Slice, name, lambda _self, value=value: value)
    monkeypatch.setattr(Slice, "exits", lambda _self, _objects: {"1": 1})
    return Supervisor(tmp_path)


def look(supervisor: Supervisor) -> Sight:
    sight = supervisor._look()
    assert sight is not None
    return sight


def test_it_waits_longer_while_google_does_not_answer(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [
        False,
        *[LaunchError("no"), OSError("full"), KeyError("odd")] * 2,
        False,
        ValueError(),
        True,
    ]
    slept: list[float] = []

    def step() -> bool:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return bool(answer)

    monkeypatch.setattr(supervisor, "step", step)
    monkeypatch.setattr(tpu_supervisor.time, "sleep", slept.append)
    supervisor.run()
    assert slept == [60, 120, 240, 480, 600, 600, 600, 60, 120]


def test_machines_that_never_end_are_not_waited_for_for_ever(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(tpu_supervisor.time, "monotonic", lambda: now)
    assert look(supervisor).code is None, "one of two machines has ended"
    now += 130
    assert look(supervisor).code == 1


def test_a_cancelled_run_has_its_time(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(tpu_supervisor.time, "monotonic", lambda: now)
    monkeypatch.setattr(Slice, "objects", lambda _self: {"stop": Kept(1, "1")})
    monkeypatch.setattr(Slice, "exits", lambda _self, _objects: {})
    assert not look(supervisor).stopped
    now += 130
    assert not look(supervisor).stopped, "the run has its 25 seconds besides"
    now += 20
    assert look(supervisor).stopped


def test_machines_that_write_nothing_are_silent(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, kept = (
        1000.0,
        {"log/20261120-101500-worker-0.log": Kept(100, "1")},
    )  # of the slice before, perhaps
    monkeypatch.setattr(tpu_supervisor.time, "monotonic", lambda: now)
    monkeypatch.setattr(Slice, "objects", lambda _self: dict(kept))
    monkeypatch.setattr(Slice, "exits", lambda _self, _objects: {})
    assert (look(supervisor).heard, look(supervisor).silent) == (False, False)
    now += 1900
    assert not look(supervisor).silent, "within half an hour and the grace"
    kept["log/20261120-101500-worker-0.log"] = Kept(100, "2")  # the same text, written again
    sight = look(supervisor)
    assert (sight.heard, sight.silent) == (True, False)
    now += 1900
    assert (look(supervisor).heard, look(supervisor).silent) == (False, False)
    now += 2000
    assert look(supervisor).silent


@pytest.mark.parametrize("missing", ["queued", "node"])
def test_what_one_look_misses_is_not_gone(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    found = getattr(Slice, missing)
    answers: list[Any] = [None, "there", None, None]
    monkeypatch.setattr(Slice, missing, lambda self: found(self) if answers.pop(0) else None)
    assert supervisor._look() is None
    assert look(supervisor).state == "ACTIVE"
    assert supervisor._look() is None
    sight = look(supervisor)
    assert "" in (sight.state, sight.node)
    assert not answers


def test_a_full_disk_does_not_keep_a_slice_alive(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_self: Memory, _folder: Path) -> None:
        raise OSError("No space left on device")

    done: list[str] = []
    monkeypatch.setattr(Memory, "save", full)
    monkeypatch.setattr(Slice, "exits", lambda _self, _objects: {"0": 0, "1": 0})
    monkeypatch.setattr(Slice, "delete", lambda self: done.append(self.name))
    assert not supervisor.step()
    assert done == ["name"]


def test_whoever_ends_a_supervisor_hears_what_goes_on(
    supervisor: Supervisor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def killed(_self: Supervisor) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(Supervisor, "run", killed)
    try:
        with pytest.raises(SystemExit):
            tpu_supervisor.main([str(tmp_path)])
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert "no supervisor of name runs any more" in caplog.text
    assert "gcloud compute tpus queued-resources delete name --force" in caplog.text


def test_who_only_looks_does_not_keep_a_supervisor_from_its_work(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[bool] = []
    monkeypatch.setattr(Supervisor, "run", lambda _self: ran.append(True))
    with (tmp_path / "supervisor.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        timer = threading.Timer(0.3, fcntl.flock, (lock, fcntl.LOCK_UN))
        timer.start()
        assert tpu_supervisor.main([str(tmp_path)]) == 0
        timer.join()
    assert ran == [True]


def test_answers_of_gcloud_that_are_none_are_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_slice.command_line, "run", lambda *_: "Updates are available")
    with pytest.raises(LaunchError, match="Updates are available"):
        tpu_slice.listed("project", "zone")


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("PERMISSION_DENIED: Permission tpu.queuedResources.create denied", True),
        (
            "RESOURCE_EXHAUSTED: Quota limit TPUV4sPreemptiblePodPerProjectPerZone has been "
            "exceeded",
            True,
        ),
        ("RESOURCE_EXHAUSTED: There is no more capacity in the zone", False),
        (
            "RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'Requests' and limit 'Requests "
            "per minute'",
            False,
        ),
        ("UNAVAILABLE: The service is currently unavailable", False),
        ("UNAUTHENTICATED: Request had invalid authentication credentials", False),
    ],
)
def test_what_asking_again_cannot_change(said: str, refused: bool) -> None:
    assert bool(tpu_supervisor._REFUSED.match(f"gcloud: (gcloud.x) {said}")) is refused


def test_a_folder_that_is_none_of_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"slice\.json"):
        Slice.of(tmp_path)
    (tmp_path / FILE).write_text(json.dumps({"name": "x"}))
    with pytest.raises(LaunchError, match=r"slice\.json"):
        Slice.of(tmp_path)
    assert tpu_supervisor.main([str(tmp_path)]) == 1
    assert tpu_supervisor.main([]) == 1
