"""The process beside a job on Cloud TPU that asks for its slice again when it is taken away, and deletes it in the end.

A request for spot machines that were taken away stays SUSPENDED for ever, and a slice whose run has ended costs as much
as before: somebody has to look. `samestep launch` starts this; `python -m launch.tpu.supervisor FOLDER`, with the job's
folder or a copy of it, does so on any machine with gcloud. It may be killed and started again at any time: what it has
begun is written down before. A second one of the same folder ends at once. One of a copy elsewhere cannot know of the
first, and they would delete what the other has asked for: there must be one only.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Literal, TypeAlias

from launch.tpu import slice as tpu_slice
from launch.tpu.slice import Resource, Slice
from trainer.errors import EXIT_DONE, EXIT_FAILED, LaunchError

logger = logging.getLogger("launch.tpu.supervisor")  # also when this module is run as __main__

LOG = "supervisor.log"
_LOCK = "supervisor.lock"
_MEMORY = "supervisor.json"
_GRACE_SECONDS = 120.0  # for the machines that are last to end
_LONGEST_WAIT = 600.0  # while Google does not answer
_VAIN_REQUESTS = 3  # that fail in a row before there was a machine
_SURE = 2  # looks in a row that do not find something, until it is gone
_LOCK_SECONDS = 2.0  # while others look whether one is at work
_LOST = ("PREEMPTED", "TERMINATED", "")
# What asking once more does not change, unless it was about capacity, or too many questions.
_REFUSED = re.compile(
    r"(?!.*(capacity|stockout|per minute))"
    r".*(PERMISSION_DENIED|INVALID_ARGUMENT|NOT_FOUND|FAILED_PRECONDITION|ALREADY_EXISTS|RESOURCE_EXHAUSTED|quota)",
    re.IGNORECASE | re.DOTALL,
)

_SILENCE = (
    "the machines are there, and have written nothing into cluster.staging in all of cluster.silence_minutes: either "
    "cluster.service_account may not write there, or they cannot reach it, or they do not boot"
)

Action: TypeAlias = Literal["wait", "create", "delete", "done"]


@dataclass(frozen=True)
class Memory:
    """What a supervisor has to know after it was started again.

    Attributes:
        phase: of the job; in `recreating` and `ending` the slice is on its way out.
        restarts: how often the slice was asked for again.
        vain: requests in a row that failed before they were served.
        was_active: whether the present request has been served.
        heard: whether its machines have written anything into the bucket.
        code: the run's exit code, once that is known.
        why: it is in its phase.
    """

    phase: Literal["running", "recreating", "ending"] = "running"
    restarts: int = 0
    vain: int = 0
    was_active: bool = False
    heard: bool = False
    code: int | None = None
    why: str = ""

    @classmethod
    def of(cls, folder: Path) -> Memory:
        """That of a job's folder."""
        try:
            return cls(**json.loads((folder / _MEMORY).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls()

    def save(self, folder: Path) -> None:
        """Writes it down, whole or not at all."""
        new = folder / f"{_MEMORY}.new"
        new.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(new, folder / _MEMORY)


@dataclass(frozen=True)
class Sight:
    """What a look at the cloud has shown.

    Attributes:
        state: of the queued resource; empty where there is none.
        by_user: whether a person has suspended it.
        complaint: of Google, about a request that failed.
        node: the state of its node; empty where there is none.
        healthy: whether its machines are in order.
        heard: whether its machines have written into the bucket since the look before.
        silent: whether they have not for so long that nothing is to be hoped for.
        code: the run's exit code; None while it goes on.
        stop: whether the job was cancelled.
        stopped: whether the run has had its time for that.
    """

    state: str
    by_user: bool = False
    complaint: str = ""
    node: str = ""
    healthy: bool = True
    heard: bool = False
    silent: bool = False
    code: int | None = None
    stop: bool = False
    stopped: bool = False


def decide(memory: Memory, sight: Sight) -> tuple[Memory, Action]:
    """What is to be done now, and to be remembered before it is done."""
    if memory.phase == "ending":
        return (
            memory,
            "done" if not sight.state else "wait" if sight.state == "DELETING" else "delete",
        )
    if sight.stop:
        if sight.state and not sight.stopped:
            return memory, "wait"
        return _ending(memory, sight, "cancelled")
    if memory.phase == "recreating":
        return (
            memory,
            "create" if not sight.state else "wait" if sight.state == "DELETING" else "delete",
        )
    if not sight.state:
        return _ending(memory, sight, "the queued resource is gone: somebody has deleted it")
    if sight.code is not None:
        if sight.code != EXIT_DONE and not sight.healthy:
            return _again(
                memory,
                f"the run ended with exit code {sight.code} on machines that are not in order",
            )
        return _ending(memory, sight, f"the run has ended with exit code {sight.code}")
    if sight.state == "ACTIVE":
        if sight.node in _LOST and memory.was_active:  # a node may take a while to show up
            return _again(memory, f"the machines are {sight.node.lower() or 'gone'}")
        heard = memory.heard or sight.heard
        if sight.silent and heard:
            return _again(memory, "the machines have written nothing more into cluster.staging")
        if sight.silent:
            return _ending(memory, replace(sight, code=EXIT_FAILED), _SILENCE)
        return replace(
            memory, was_active=memory.was_active or bool(sight.node), heard=heard, vain=0
        ), "wait"
    if sight.state not in ("SUSPENDED", "FAILED"):
        return memory, "wait"
    if sight.by_user:
        return _ending(memory, sight, "suspended by a person, who has deleted the machines")
    if sight.state == "SUSPENDED" or memory.was_active:
        return _again(memory, "the machines were taken away")
    if memory.vain < _VAIN_REQUESTS:
        return _again(
            replace(memory, vain=memory.vain + 1), f"the request has failed: {sight.complaint}"
        )
    return _in_vain(memory, sight, sight.complaint)


def _again(memory: Memory, why: str) -> tuple[Memory, Action]:
    memory = replace(memory, restarts=memory.restarts + 1, was_active=False, heard=False)
    return replace(memory, phase="recreating", why=why), "delete"


def _in_vain(memory: Memory, sight: Sight, why: str) -> tuple[Memory, Action]:
    return _ending(
        memory, replace(sight, code=EXIT_FAILED), f"the request fails again and again: {why}"
    )


def _ending(memory: Memory, sight: Sight, why: str) -> tuple[Memory, Action]:
    memory = replace(memory, phase="ending", code=sight.code, why=why)
    return memory, "delete" if sight.state else "done"


class Supervisor:
    """Looks after the job of a folder.

    Args:
        folder: of the job.

    Raises:
        LaunchError: it is none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._slice = folder, Slice.of(folder)
        self._memory = Memory.of(folder)
        self._said = ""
        self._since: dict[str, float] = {}  # when something was seen first
        self._missed: dict[str, int] = {}  # looks in a row that have not found something
        self._signs: dict[str, str] | None = None  # of life, at the last look

    def run(self) -> None:
        """Returns when the job has ended and nothing of it is left that costs money."""
        delay = self._slice.poll_seconds
        while True:
            try:
                if self.step():
                    return
                delay = self._slice.poll_seconds
            except Exception as error:  # whatever it is: the slice costs money while nobody looks
                delay = min(2 * delay, max(_LONGEST_WAIT, self._slice.poll_seconds))
                known = isinstance(error, LaunchError)
                logger.warning(
                    "%s; next try in %.0f s", error, delay, exc_info=None if known else error
                )
            time.sleep(delay)

    def step(self) -> bool:
        """One look, and what follows from it; whether all is over.

        Raises:
            LaunchError: gcloud could not tell or do something; another try may help.
        """
        sight = self._look()
        if sight is None:
            return False
        memory, action = decide(self._memory, sight)
        self._remember(memory)
        if action == "delete":
            logger.info("deleting %s", self._slice.name)
            self._slice.delete()
        elif action == "create":
            self._create()
        elif action == "done":
            logger.info(
                "%s is deleted; nothing of it costs money, except for what lies in buckets",
                self._slice.name,
            )
            tpu_slice.note_end(self._folder, memory.code)
        return action == "done"

    def _remember(self, memory: Memory) -> None:
        if memory.phase != self._memory.phase and memory.phase != "running":
            logger.info("%s", memory.why)
        if memory != self._memory:
            self._memory = memory
            try:
                memory.save(self._folder)
            except OSError as error:  # a full disk is no reason to leave machines running
                logger.warning("%s cannot be written (%s)", self._folder / _MEMORY, error)

    def _create(self) -> None:
        self._slice.forget_exits()
        logger.info("asking for %s again, restart %d", self._slice.name, self._memory.restarts)
        try:
            self._slice.request(self._folder)
        except LaunchError as error:
            if _REFUSED.match(str(error).partition("; ")[0]):  # without the hint
                if self._memory.vain >= _VAIN_REQUESTS:
                    self._remember(_in_vain(self._memory, Sight(""), str(error))[0])
                    return
                self._remember(replace(self._memory, vain=self._memory.vain + 1))
            raise
        self._remember(replace(self._memory, phase="running"))
        if "stop" in self._slice.objects():  # whoever cancelled meanwhile found nothing to delete
            self._slice.delete()

    def _look(self) -> Sight | None:
        """What there is; None while something is missing and may yet be found."""
        resource = self._slice.queued()
        state = tpu_slice.state_of(resource)
        if state != self._said:
            self._said = state
            logger.info("%s: %s", self._slice.name, state.lower() or "not there")
        node = self._slice.node() if state == "ACTIVE" else None
        missing = (
            self._misses("slice", not state),
            self._misses("machines", state == "ACTIVE" and node is None),
        )
        if any(missing):
            return None
        objects = self._slice.objects()
        exits, stop = self._slice.exits(objects), "stop" in objects
        before, self._signs = (
            self._signs,
            {name: objects[name].generation for name in tpu_slice.logs_in(objects)},
        )
        heard = state == "ACTIVE" and before is not None and self._signs != before
        machines = (
            tpu_slice.machines(node)
            if state == "ACTIVE" and not self._waited("exit", bool(exits))
            else 1
        )
        code = tpu_slice.outcome(exits, machines)
        return Sight(
            state,
            by_user=(resource or {}).get("state", {}).get("stateInitiator") == "USER",
            complaint=tpu_slice.complaint(resource or {}),
            node=str((node or {}).get("state", "")),
            healthy=state == "ACTIVE" and (node is None or _in_order(node)),
            heard=heard,
            silent=self._waited(
                "silence", state == "ACTIVE" and not heard, self._slice.silence_seconds
            ),
            code=code,
            stop=stop,
            stopped=self._waited("stop", stop, self._slice.stop_seconds)
            or state != "ACTIVE"
            or code is not None,
        )

    def _misses(self, what: str, absent: bool) -> bool:
        """Whether something is absent that was there a moment ago."""
        self._missed[what] = self._missed.get(what, 0) + 1 if absent else 0
        return 0 < self._missed[what] < _SURE

    def _waited(self, what: str, seen: bool, seconds: float = 0.0) -> bool:
        """Whether something has been there for so long, and the grace."""
        if not seen:
            self._since.pop(what, None)
            return False
        return (
            time.monotonic() - self._since.setdefault(what, time.monotonic())
            > seconds + _GRACE_SECONDS
        )


def _in_order(node: Resource) -> bool:
    return node.get("state") == "READY" and node.get("health") != "UNHEALTHY_MAINTENANCE"


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Starts the supervisor of a job, which goes on when the terminal is closed."""
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "launch.tpu.supervisor",
                str(folder),
            ],  # -P: not what lies in this folder
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def is_running(folder: Path) -> bool:
    """Whether one is at work on this machine."""
    try:
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def main(arguments: list[str]) -> int:
    """`python -m launch.tpu.supervisor FOLDER`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    if len(arguments) != 1:
        logger.error(
            "give the folder of one job: where `samestep launch` said that it is kept, or a copy of it"
        )
        return EXIT_FAILED
    folder = Path(arguments[0]).absolute()
    try:
        place = Slice.of(folder)
    except LaunchError as error:
        logger.error("%s", error)
        return EXIT_FAILED
    with (folder / _LOCK).open("wb") as lock:
        if not _locked(lock):
            logger.info("another one looks after %s already", folder)
            return EXIT_DONE
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            Supervisor(folder).run()
        except BaseException as error:
            again = shlex.join([sys.executable, "-m", "launch.tpu.supervisor", str(folder)])
            logger.error(
                "nobody looks after %s any more (%s), and it may cost money: %s does so again, %s deletes it",
                place.name,
                repr(error),
                again,
                place.deletion,
            )
            raise
    return EXIT_DONE


def _locked(lock: IO[bytes]) -> bool:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
