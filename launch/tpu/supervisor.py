"""The supervisor of a job on Cloud TPU: requests a lost slice again, and deletes it at the end.

A request for spot machines that were taken away stays SUSPENDED forever, and a slice costs as much
after the run's end as before, so somebody has to look. `samestep launch` starts this process, and
`python -m launch.tpu.supervisor FOLDER` starts it on any machine with gcloud, from the job's folder
or a copy. It may be killed and restarted at any time: it writes down each step before it begins.
A second supervisor of the same folder ends at once. A supervisor of a copy on another machine
cannot know of the first, and each would delete the other's slices: run only one.
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
from launch.tpu.slice import Slice
from samestep.errors import EXIT_DONE, EXIT_FAILED, LaunchError
from samestep.stored_json import JsonError, read_json

logger = logging.getLogger("launch.tpu.supervisor")  # also when this module is run as __main__

LOG = "supervisor.log"
_LOCK = "supervisor.lock"
_MEMORY = "supervisor.json"
_GRACE_SECONDS = 120.0  # for the machines that are last to end
_MAX_DELAY_SECONDS = 600.0  # while Google does not answer
_MAX_FAILED_REQUESTS = 3  # in a row, before there was a machine
# Google's API is eventually consistent: one poll may miss a resource that exists.
_MISSES = 2  # polls in a row that do not find something, until it counts as gone
_LOCK_SECONDS = 2.0  # while others check whether a supervisor runs
_LOST = ("PREEMPTED", "TERMINATED", "")
# A repeated request fails again, unless the reason is capacity or too many requests.
_REFUSED = re.compile(
    r"(?!.*(capacity|stockout|per minute))"
    r".*(PERMISSION_DENIED|INVALID_ARGUMENT|NOT_FOUND|FAILED_PRECONDITION|ALREADY_EXISTS"
    r"|RESOURCE_EXHAUSTED|quota)",
    re.IGNORECASE | re.DOTALL,
)

_SILENCE = (
    "the machines are there, and have written nothing into cluster.staging in all of "
    "cluster.silence_minutes: either cluster.service_account may not write there, or they cannot "
    "reach it, or they do not boot"
)

Action: TypeAlias = Literal["wait", "create", "delete", "done"]


@dataclass(frozen=True)
class Memory:
    """State that a supervisor needs after a restart.

    Attributes:
        phase: of the job; in `recreating` and `ending` the slice is being deleted.
        restarts: number of times that the slice was requested again.
        vain: number of requests in a row that failed before they were served.
        was_active: whether the current request has been served.
        heard: whether its machines have written anything into the bucket.
        code: the run's exit code, if known.
        why: reason of the phase.
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
        """Reads the memory from a job's folder."""
        try:
            return read_json(folder / _MEMORY, cls)
        except FileNotFoundError:
            return cls()
        except (OSError, JsonError) as error:
            # Without it, the supervisor would not know whether it may delete the slice.
            raise LaunchError(
                f"{folder / _MEMORY} is damaged: {error}. Remove it, if the job still runs"
            ) from error

    def save(self, folder: Path) -> None:
        """Writes the memory atomically."""
        new = folder / f"{_MEMORY}.new"
        new.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(new, folder / _MEMORY)


@dataclass(frozen=True)
class Sight:
    """The result of one poll of the cloud.

    Attributes:
        state: of the queued resource; empty if there is none.
        by_user: whether a person has suspended it.
        complaint: Google's error message about a request that failed.
        node: state of its node; empty if there is none.
        healthy: whether its machines are in order.
        heard: whether its machines have written into the bucket since the last poll.
        silent: whether they have written nothing for too long.
        code: the run's exit code; None while it runs.
        stop: whether the job was cancelled.
        stopped: whether the run has had its time to stop.
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
    """Returns the next action, and the memory to save before it.

    A pure function, so that tests can try all combinations. An example of spot machines that are
    taken away once:

        phase       state      action
        running     ACTIVE     wait
        running     SUSPENDED  delete  -> recreating, restarts = 1
        recreating  DELETING   wait
        recreating  (none)     create  -> running, after the request
        running     ACTIVE     wait
        running     exit 0     delete  -> ending
        ending      (none)     done
    """
    leaving: Action = "wait" if sight.state == "DELETING" else "delete"
    if memory.phase == "ending":
        return memory, leaving if sight.state else "done"
    # A cancellation comes before everything but an end: nothing may be requested again.
    if sight.stop:
        if sight.state and not sight.stopped:
            return memory, "wait"
        return _end(memory, sight, "cancelled")
    if memory.phase == "recreating":
        return memory, leaving if sight.state else "create"
    if not sight.state:
        return _end(memory, sight, "the queued resource is gone: somebody has deleted it")
    # An exit code on machines that are being taken away may be a consequence of that.
    if sight.code is not None:
        ended = f"the run has ended with exit code {sight.code}"
        if sight.code != EXIT_DONE and not sight.healthy:
            return _recreate(memory, f"{ended} on machines that are not in order")
        return _end(memory, sight, ended)
    if sight.state == "ACTIVE":
        # A new request's node may take a while to appear: it is lost only if it was there before.
        if sight.node in _LOST and memory.was_active:
            return _recreate(memory, f"the machines are {sight.node.lower() or 'gone'}")
        heard = memory.heard or sight.heard
        if sight.silent and heard:
            return _recreate(memory, "the machines have written nothing more into cluster.staging")
        if sight.silent:
            return _end(memory, replace(sight, code=EXIT_FAILED), _SILENCE)
        was_active = memory.was_active or bool(sight.node)
        return replace(memory, was_active=was_active, heard=heard, vain=0), "wait"
    # Before it is served, a request waits for resources as long as it takes.
    if sight.state not in ("SUSPENDED", "FAILED"):
        return memory, "wait"
    if sight.by_user:
        return _end(memory, sight, "suspended by a person, who has deleted the machines")
    if sight.state == "SUSPENDED" or memory.was_active:
        return _recreate(memory, "the machines were taken away")
    if memory.vain < _MAX_FAILED_REQUESTS:
        memory = replace(memory, vain=memory.vain + 1)
        return _recreate(memory, f"the request has failed: {sight.complaint}")
    return _give_up(memory, sight)


def _recreate(memory: Memory, why: str) -> tuple[Memory, Action]:
    # Nothing of the new request was served or heard yet. `vain` counts failures over several
    # requests, so it stays.
    restarts = memory.restarts + 1
    memory = replace(memory, restarts=restarts, was_active=False, heard=False)
    return replace(memory, phase="recreating", why=why), "delete"


def _give_up(memory: Memory, sight: Sight) -> tuple[Memory, Action]:
    why = f"the request fails again and again: {sight.complaint}"
    return _end(memory, replace(sight, code=EXIT_FAILED), why)


def _end(memory: Memory, sight: Sight, why: str) -> tuple[Memory, Action]:
    memory = replace(memory, phase="ending", code=sight.code, why=why)
    return memory, "delete" if sight.state else "done"


class Supervisor:
    """Supervises the job of a folder.

    Raises:
        LaunchError: the folder belongs to no job on Cloud TPU.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._slice = folder, Slice.of(folder)
        self._memory = Memory.of(folder)
        self._last_state = ""
        self._since: dict[str, float] = {}  # when a condition became true
        self._missed: dict[str, int] = {}  # polls in a row that have not found something
        self._generations: dict[str, str] | None = None  # of the machines' logs, at the last poll

    def run(self) -> None:
        """Returns when the job has ended and nothing that costs money is left."""
        delay = self._slice.poll_seconds
        while True:
            try:
                if self.step():
                    return
                delay = self._slice.poll_seconds
            except Exception as error:  # any error: the slice costs money while nobody looks
                delay = min(2 * delay, max(_MAX_DELAY_SECONDS, self._slice.poll_seconds))
                known = isinstance(error, LaunchError)
                logger.warning(
                    "%s; next try in %.0f s", error, delay, exc_info=None if known else error
                )
            time.sleep(delay)

    def step(self) -> bool:
        """Polls once and acts; returns whether the job is over.

        Raises:
            LaunchError: gcloud has failed; another try may help.
        """
        # 1. look, 2. decide, 3. write the decision down, 4. act.
        sight = self._look()
        if sight is None:
            return False
        memory, action = decide(self._memory, sight)
        # Before the action: a supervisor that is killed in between repeats it.
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
        if memory == self._memory:
            return
        if memory.phase != self._memory.phase and memory.phase != "running":
            logger.info("%s", memory.why)
        self._memory = memory
        try:
            memory.save(self._folder)
        except OSError as error:  # a full disk is no reason to leave machines running
            logger.warning("%s cannot be written (%s)", self._folder / _MEMORY, error)

    def _create(self) -> None:
        # The new machines would take an old exit code for their own, and start nothing.
        self._slice.forget_exits()
        logger.info("requesting %s again, restart %d", self._slice.name, self._memory.restarts)
        try:
            self._slice.request(self._folder)
        except LaunchError as error:
            if _REFUSED.match(str(error).partition("; ")[0]):  # without the hint
                if self._memory.vain >= _MAX_FAILED_REQUESTS:
                    self._remember(_give_up(self._memory, Sight("", complaint=str(error)))[0])
                    return
                self._remember(replace(self._memory, vain=self._memory.vain + 1))
            raise
        self._remember(replace(self._memory, phase="running"))
        # A user who cancelled during the request found nothing to delete.
        if "stop" in self._slice.objects():
            self._slice.delete()

    def _look(self) -> Sight | None:
        """Polls the cloud; None while something is missing that may yet be found."""
        resource = self._slice.queued()
        state = tpu_slice.state_of(resource)
        if state != self._last_state:
            self._last_state = state
            logger.info("%s: %s", self._slice.name, state.lower() or "not there")
        active = state == "ACTIVE"
        node = self._slice.node() if active else None
        # Count both, also if the first is missing.
        slice_missing = self._is_missing("slice", not state)
        if self._is_missing("machines", active and node is None) or slice_missing:
            return None
        objects = self._slice.objects()
        exits, stop = self._slice.exits(objects), "stop" in objects
        # The generation of a log changes whenever its machine copies it into the bucket: as long as
        # one machine is alive, one of them changes. The first poll has nothing to compare with.
        before = self._generations
        self._generations = {name: objects[name].generation for name in tpu_slice.logs_in(objects)}
        heard = active and before is not None and self._generations != before
        # Wait for all machines to report the end of the run, but not forever.
        in_time = active and not self._has_lasted("exit", bool(exits))
        code = tpu_slice.outcome(exits, tpu_slice.machines(node) if in_time else 1)
        has_had_time = self._has_lasted("stop", stop, self._slice.stop_seconds)
        silence = self._slice.silence_seconds
        return Sight(
            state,
            by_user=(resource or {}).get("state", {}).get("stateInitiator") == "USER",
            complaint=tpu_slice.complaint(resource or {}),
            node=str((node or {}).get("state", "")),
            healthy=active and (node is None or _is_healthy(node)),
            heard=heard,
            silent=self._has_lasted("silence", active and not heard, silence),
            code=code,
            stop=stop,
            stopped=has_had_time or not active or code is not None,
        )

    def _is_missing(self, what: str, absent: bool) -> bool:
        """Whether something is absent for the first polls in a row; after that it is gone."""
        # Absent, absent, present, absent: only the second poll finds it gone.
        self._missed[what] = self._missed.get(what, 0) + 1 if absent else 0
        return 0 < self._missed[what] < _MISSES

    def _has_lasted(self, what: str, true: bool, seconds: float = 0.0) -> bool:
        """Whether a condition has been true for this time plus the grace period."""
        if not true:
            self._since.pop(what, None)
            return False
        now = time.monotonic()
        return now - self._since.setdefault(what, now) > seconds + _GRACE_SECONDS


def _is_healthy(node: tpu_slice.Resource) -> bool:
    return node.get("state") == "READY" and node.get("health") != "UNHEALTHY_MAINTENANCE"


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Starts the supervisor of a job, which continues when the terminal is closed."""
    # -P: import nothing from the current folder, which belongs to the user.
    command = [sys.executable, "-P", "-m", "launch.tpu.supervisor", str(folder)]
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def is_running(folder: Path) -> bool:
    """Whether a supervisor of the folder runs on this machine."""
    try:
        # The lock of a process ends with it, unlike a file with its number.
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
        logger.error("give the folder of one job, which `samestep launch` has printed, or a copy")
        return EXIT_FAILED
    folder = Path(arguments[0]).absolute()
    try:
        place = Slice.of(folder)
    except LaunchError as error:
        logger.error("%s", error)
        return EXIT_FAILED
    with (folder / _LOCK).open("wb") as lock:
        if not _acquire(lock):
            logger.info("another supervisor of %s runs already", folder)
            return EXIT_DONE
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            Supervisor(folder).run()  # reads the memory, which another one may have just written
        except BaseException as error:
            again = shlex.join([sys.executable, "-P", "-m", "launch.tpu.supervisor", str(folder)])
            logger.error(
                "no supervisor of %s runs any more (%s), and it may cost money: %s starts one "
                "again, %s deletes it",
                place.name,
                repr(error),
                again,
                place.deletion,
            )
            raise
    return EXIT_DONE


def _acquire(lock: IO[bytes]) -> bool:
    """Locks a file; `is_running` may hold the lock for a moment."""
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
