"""What the supervisor of a slice decides, case by case."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import tpu_supervisor
from launch.tpu_slice import FILE, Slice, outcome
from launch.tpu_supervisor import Memory, Sight, Supervisor, decide
from trainer.errors import LaunchError

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
def test_a_run_has_ended_when_all_machines_say_so(exits: dict[str, int], machines: int, code: int | None) -> None:
    assert outcome(exits, machines) == code


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """Of two machines, where no time passes."""
    place = Slice("name", "project", "zone", "gs://bucket/folder", (), 25.0, supervise=True, poll_seconds=60.0)
    (tmp_path / FILE).write_text(place.dump())
    node = {"state": "READY", "networkEndpoints": [{}, {}]}
    for name, value in {"queued": {"state": {"state": "ACTIVE"}}, "node": node, "objects": {"exit-1": 4}}.items():
        monkeypatch.setattr(Slice, name, lambda _self, value=value: value)
    monkeypatch.setattr(Slice, "exits", lambda _self, _objects: {"1": 1})
    return Supervisor(tmp_path)


def test_it_waits_longer_while_google_does_not_answer(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [False, *[LaunchError("no")] * 5, False, LaunchError("no"), True]
    slept: list[float] = []

    def step() -> bool:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return bool(answer)

    monkeypatch.setattr(supervisor, "step", step)
    monkeypatch.setattr(tpu_supervisor.time, "sleep", slept.append)
    supervisor.run()
    assert slept == [60, 120, 240, 480, 600, 600, 60, 120]


def test_machines_that_never_end_are_not_waited_for_for_ever(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(tpu_supervisor.time, "monotonic", lambda: now)
    assert supervisor._look().code is None, "one of two machines has ended"
    now += 130
    assert supervisor._look().code == 1


def test_a_cancelled_run_has_its_time(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(tpu_supervisor.time, "monotonic", lambda: now)
    monkeypatch.setattr(Slice, "objects", lambda _self: {"stop": 1})
    monkeypatch.setattr(Slice, "exits", lambda _self, _objects: {})
    assert not supervisor._look().stopped
    now += 130
    assert not supervisor._look().stopped, "the run has its 25 seconds besides"
    now += 20
    assert supervisor._look().stopped


def test_a_folder_that_is_none_of_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"slice\.json"):
        Slice.of(tmp_path)
    (tmp_path / FILE).write_text(json.dumps({"name": "x"}))
    with pytest.raises(LaunchError, match=r"slice\.json"):
        Slice.of(tmp_path)
    assert tpu_supervisor.main([str(tmp_path)]) == 1
    assert tpu_supervisor.main([]) == 1
