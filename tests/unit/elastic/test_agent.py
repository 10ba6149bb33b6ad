"""How the agent reacts to the exits of its workers, which follow a script: one action a round."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

import tests.processes  # noqa: F401 sets up the fork server
from samestep.errors import (
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_REGROUP,
    EXIT_USAGE,
    ConfigError,
    LaunchError,
)
from tests.ports import free_port
from trainer.elastic import workers
from trainer.elastic.agent import Elastic, _Agent, run_workers
from trainer.elastic.rounds import Round
from trainer.elastic.workers import Exit, Workers
from trainer.strategies.world import FAILURE, World

CONTEXT = multiprocessing.get_context("forkserver")
WAIT = 1000  # until it is stopped by a signal, and then exit with 75
HANG = 1001
DEAF = 1002  # hang, whatever signal comes
LATE = 1004  # until it is stopped by a signal, and then exit as one whose checkpoint takes too long
COLLECT = 1005  # garbage, and be done
LISTEN = 1006  # write down the addresses on which this process and its agent listen, and be done
ABORT = 1007  # as a library does when the other end of a collective, rank 1, has failed
SLOW = 1008  # crash, but take a moment to say why
STUCK = 1003  # go on from the step of this round's number, but no later one than 2, and crash


def act(arguments: list[str]) -> int:
    """A worker: the arguments are a folder, and what each rank does in each round."""
    folder, *turns = arguments
    rank = int(os.environ["RANK"])
    began = Path(folder) / f"rank-{rank}"
    round_number = len(began.read_text()) if began.exists() else 0
    code = int(turns[rank].split(",")[round_number])
    if code == WAIT:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_PREEMPTED))
    if code == LATE:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    if code == DEAF:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with began.open("a") as file:
        file.write("x")
    if code == COLLECT:
        gc.collect()
        return EXIT_DONE
    if code == LISTEN:
        world = World.start(20)
        world.connect("gloo")
        agent_pid = int(Path(f"/proc/{os.getppid()}/stat").read_text().split()[3])
        # The rendezvous, the store, the rank's own port and its collectives. The kernel's table
        # may lack rows if it changes while it is read, so it is read until all are found.
        found: set[str] = set()
        deadline = time.monotonic() + 10
        while len(found) < 4 and time.monotonic() < deadline:
            found |= listening(os.getpid()) | listening(agent_pid)
        (Path(folder) / f"listening-{rank}").write_text("\n".join(found))
        world.close()
        return EXIT_DONE
    if code == STUCK:
        World.start(20).tell_progress(min(round_number, 2))
        return EXIT_CRASHED
    if code == ABORT:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store.set(FAILURE, f"1 {EXIT_CRASHED}")
        os.abort()
    if code == SLOW:
        time.sleep(1)
        return EXIT_CRASHED
    if code in (WAIT, LATE, HANG, DEAF):
        time.sleep(100)
    if code < 0:
        while not all((Path(folder) / f"rank-{other}").exists() for other in range(len(turns))):
            time.sleep(0.01)  # or the others may be stopped before they have counted this round
        os.kill(os.getpid(), -code)
    return code


def listening(pid: int) -> set[str]:
    """The addresses on which a process listens, as the kernel writes them: 0100007F:910F."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(link))
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in links if "socket" in link}
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in inodes}


def agent(
    folder: Path, turns: Sequence[Sequence[int]], processes: int, elastic: Elastic | None
) -> None:
    """The process that would be the `samestep` command."""
    sys.stderr = (folder / "stderr").open("a")
    os.dup2(sys.stderr.fileno(), 2)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
    script = [str(folder), *(",".join(map(str, codes)) for codes in turns)]
    try:
        code = run_workers(act, script, processes, elastic, [signal.SIGTERM])
    except LaunchError as error:
        sys.stderr.write(str(error))
        code = EXIT_FAILED
    sys.stderr.flush()
    os._exit(code)


def outcome(
    folder: Path, *turns: Sequence[int], elastic: bool = True, signals: Sequence[float] = ()
) -> int | None:
    """The agent's exit code.

    SIGTERM is sent to it this long after its workers have begun, and again after each other delay.
    """
    process = CONTEXT.Process(
        target=agent, args=(folder, turns, len(turns), Elastic() if elastic else None)
    )
    process.start()
    for delay in signals:
        while not all((folder / f"rank-{rank}").exists() for rank in range(len(turns))):
            time.sleep(0.02)
        time.sleep(delay)
        os.kill(process.pid or 0, signal.SIGTERM)
    process.join(30)
    assert not process.is_alive()
    return process.exitcode


def rounds(folder: Path) -> int:
    return len((folder / "rank-0").read_text())


@pytest.mark.parametrize(
    ("turns", "code"),
    [
        ([[0], [0]], EXIT_DONE),
        ([[EXIT_USAGE], [HANG]], EXIT_USAGE),
        ([[EXIT_REGROUP], [EXIT_FAILED]], EXIT_FAILED),
        ([[EXIT_REGROUP], [EXIT_PREEMPTED]], EXIT_PREEMPTED),
    ],
)
def test_explained_failures_are_not_retried(
    tmp_path: Path, turns: list[list[int]], code: int
) -> None:
    assert outcome(tmp_path, *turns) == code
    assert rounds(tmp_path) == 1


@pytest.mark.parametrize("first", [-signal.SIGKILL, -signal.SIGSEGV, EXIT_CRASHED, EXIT_REGROUP])
def test_deaths_are_survived(tmp_path: Path, first: int) -> None:
    assert outcome(tmp_path, [EXIT_REGROUP, 0], [first, 0]) == EXIT_DONE
    assert rounds(tmp_path) == 2


def test_a_crash_leaves_the_stacks_that_led_to_it(tmp_path: Path) -> None:
    assert outcome(tmp_path, [-signal.SIGSEGV], elastic=False) == EXIT_FAILED
    stacks = (tmp_path / "stderr").read_text()
    assert "Segmentation fault" in stacks
    assert " in act" in stacks


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_single_machine_listens_on_its_loopback_only(tmp_path: Path) -> None:
    assert outcome(tmp_path, [LISTEN], [LISTEN]) == EXIT_DONE
    for rank in range(2):
        found = (tmp_path / f"listening-{rank}").read_text().split()
        assert len(found) >= 4
        assert [address for address in found if not address.startswith("0100007F:")] == []


def test_a_worker_that_cannot_know_of_a_death_is_stopped(tmp_path: Path) -> None:
    began = time.monotonic()
    assert outcome(tmp_path, [HANG, 0], [-signal.SIGKILL, 0]) == EXIT_DONE
    assert time.monotonic() - began < 20
    assert "rank 1 was killed by SIGKILL: starting again" in (tmp_path / "stderr").read_text()


def test_restarts_without_progress_end(tmp_path: Path) -> None:
    assert outcome(tmp_path, [EXIT_CRASHED] * 9) == EXIT_FAILED
    assert rounds(tmp_path) == 4
    assert "4 times in a row, each time before there was a checkpoint newer than step 0" in (
        (tmp_path / "stderr").read_text()
    )


def test_restarts_are_counted_from_the_newest_checkpoint(tmp_path: Path) -> None:
    assert outcome(tmp_path, [STUCK] * 9) == EXIT_FAILED
    assert rounds(tmp_path) == 6
    assert "4 times in a row, each time before there was a checkpoint newer than step 2" in (
        (tmp_path / "stderr").read_text()
    )


def test_an_abort_after_the_failure_of_another_rank_blames_that_rank(tmp_path: Path) -> None:
    assert outcome(tmp_path, [ABORT, 0], [SLOW, 0]) == EXIT_DONE
    assert "rank 1 failed: starting again" in (tmp_path / "stderr").read_text()


@pytest.mark.parametrize("failure", [f"1 {EXIT_CRASHED}", f"1 {EXIT_REGROUP}", "no store"])
def test_aborts_after_failures_on_other_machines_are_not_counted(failure: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free_port() if failure == "no store" else store.port
    store.set(FAILURE, failure)
    judging = judge_of_one_worker()
    for _ in range(1 if failure == "no store" else 5):  # without a store it takes seconds
        assert judging._judge(Round(0, 2, port), [Exit(0, -signal.SIGABRT)]) is None


@pytest.mark.parametrize("failure", [None, f"0 {EXIT_REGROUP}"])
def test_aborts_of_its_own_are_counted(failure: str | None) -> None:
    """Its neighbor may have noticed the death of this rank first."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if failure is not None:
        store.set(FAILURE, failure)
    judging = judge_of_one_worker()
    aborted = Round(0, 2, store.port), [Exit(0, -signal.SIGABRT)]
    for _ in range(3):
        assert judging._judge(*aborted) is None
    with pytest.raises(LaunchError, match="was killed by SIGABRT: 4 times in a row"):
        judging._judge(*aborted)


def judge_of_one_worker() -> _Agent:
    return _Agent(SimpleNamespace(), "a run", 1, Elastic(), [])  # type: ignore[arg-type]


def test_without_elastic_a_death_ends_the_run(tmp_path: Path) -> None:
    assert outcome(tmp_path, [HANG, 0], [-signal.SIGKILL, 0], elastic=False) == EXIT_FAILED
    assert rounds(tmp_path) == 1
    assert "rank 1 was killed by SIGKILL; the kernel does that when memory runs out" in (
        (tmp_path / "stderr").read_text()
    )


@pytest.mark.parametrize(("elastic", "code"), [(True, EXIT_DONE), (False, EXIT_FAILED)])
def test_a_worker_that_cannot_be_started(tmp_path: Path, elastic: bool, code: int) -> None:
    """The system may have no more processes for a moment."""
    turns = [[EXIT_REGROUP, 0], [0]]
    process = CONTEXT.Process(target=limited, args=(tmp_path, turns, elastic))
    process.start()
    process.join(30)
    assert process.exitcode == code
    messages = (tmp_path / "stderr").read_text()
    assert "rank 1 cannot be started: Resource temporarily unavailable. Check the" in messages
    assert "was killed" not in messages


def limited(folder: Path, turns: Sequence[Sequence[int]], elastic: bool) -> None:
    """An agent whose third fork fails: rank 1's, after the fork server and rank 0."""
    count, fork = itertools.count(1), os.fork

    def fork_unless_third() -> int:
        if next(count) == 3:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    os.fork = fork_unless_third
    agent(folder, turns, len(turns), Elastic() if elastic else None)


_SERVER_CALLS = ("wait", "Connection.recv", "Connection.send", "os.kill")
_SERVER_ERRORS = (RuntimeError("a bug"), OSError(errno.EMFILE, "Too many open files"))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        pytest.param(call, error, marks=() if call == "wait" else pytest.mark.chaos)
        for call in _SERVER_CALLS
        for error in _SERVER_ERRORS
    ],
)
def test_a_server_that_fails_ends_its_workers(tmp_path: Path, call: str, error: Exception) -> None:
    """At its end, Python would wait for them."""
    process = CONTEXT.Process(target=failing_server, args=(tmp_path, call, error))
    process.start()
    process.join(30)
    assert process.exitcode == EXIT_FAILED
    messages = (tmp_path / "stderr").read_text()
    assert f"the process that starts the workers has failed: {error!r}" in messages
    assert "Traceback" not in messages
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def failing_server(folder: Path, call: str, error: Exception) -> None:
    """An agent in whose fork server a call fails once, after a worker has begun."""
    begin = workers._start
    owner, _, name = call.rpartition(".")
    holder = {"": workers, "Connection": Connection, "os": os}[owner]
    works = getattr(holder, name)

    def start(worker: BaseProcess, rank: str) -> bool:
        has_begun = begin(worker, rank)
        (folder / "pid").write_text(str(worker.pid))
        setattr(holder, name, fail)
        return has_begun

    def fail(*_: object) -> None:
        setattr(holder, name, works)
        raise error

    workers._start = start
    if call in ("Connection.recv", "os.kill"):  # which a signal leads to
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    agent(folder, [[0 if call == "Connection.send" else WAIT]], 1, Elastic())


def test_a_signal_is_passed_on(tmp_path: Path) -> None:
    assert outcome(tmp_path, [WAIT, 0], [WAIT, 0], signals=[0.3]) == EXIT_PREEMPTED
    assert rounds(tmp_path) == 1


def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    assert outcome(tmp_path, [DEAF], signals=[0.3, 2.0]) == 128 + signal.SIGTERM


@pytest.mark.parametrize("taken_away_first", [True, False])
def test_workers_are_asked_to_stop_once(taken_away_first: bool) -> None:
    """A second signal, for a machine that joins, would end them before they have saved."""
    sent: list[signal.Signals] = []
    asking = _Agent(SimpleNamespace(signal=sent.append), "a run", 1, Elastic(), [signal.SIGTERM])  # type: ignore[arg-type]
    asking._rendezvous = SimpleNamespace(event=lambda: "joined")  # type: ignore[assignment]
    asking._received.append((signal.SIGTERM, time.monotonic()))
    for handle in (asking._handle_signals, asking._handle_event)[:: 1 if taken_away_first else -1]:
        handle()
    assert sent == [signal.SIGTERM]
    assert asking._judge(Round(0, 1, 0), [Exit(0, EXIT_PREEMPTED)]) == EXIT_PREEMPTED


def test_a_signal_to_all_processes_is_for_the_workers_only(tmp_path: Path) -> None:
    process = CONTEXT.Process(target=signalled, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == 0


def signalled(folder: Path) -> None:
    with Workers(act, [str(folder), "0,0"], [signal.SIGXCPU]) as workers:
        for _ in range(2):
            workers.start([{"RANK": "0", "OMP_NUM_THREADS": "1"}])
            assert workers.ended(20) == (0, 0)
            os.kill(workers._server.pid or 0, signal.SIGXCPU)


def test_workers_do_not_collect_the_garbage_of_this_process(tmp_path: Path) -> None:
    """A TCPStore waits for its thread when it is collected, and hangs where there is none."""
    process = CONTEXT.Process(target=littered, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == 0


class Garbage:
    def __init__(self, folder: Path) -> None:
        self.folder, self.itself = folder, self

    def __del__(self) -> None:
        (self.folder / f"collected by {os.getpid()}").touch()


def littered(folder: Path) -> None:
    Garbage(folder)
    with Workers(act, [str(folder), str(COLLECT)]) as workers:
        workers.start([{"RANK": "0", "OMP_NUM_THREADS": "1"}])
        assert workers.ended(20) == (0, EXIT_DONE)
    gc.collect()
    assert [path.name for path in folder.glob("collected*")] == [f"collected by {os.getpid()}"]


@pytest.mark.long
def test_a_machine_that_is_taken_away_leaves_the_run_to_the_others(tmp_path: Path) -> None:
    """However its own workers end; here they do not save in time."""
    elastic = Elastic(1, 2, f"127.0.0.1:{free_port()}", secrets_folder=tmp_path / "checkpoints")
    gone, left = (
        CONTEXT.Process(target=agent, args=(tmp_path, [[LATE, 0]] * 2, 1, elastic))
        for _ in range(2)
    )
    for process in (gone, left):
        process.start()
    while not all((tmp_path / f"rank-{rank}").exists() for rank in range(2)):
        time.sleep(0.02)
    time.sleep(0.3)
    os.kill(gone.pid or 0, signal.SIGTERM)
    for process in (gone, left):
        process.join(30)
    assert (gone.exitcode, left.exitcode) == (128 + signal.SIGTERM, EXIT_DONE)


@pytest.mark.parametrize("machines", ["0:2", "3:2", "a", "1:", ":2", "1:2:3"])
def test_numbers_of_machines(machines: str) -> None:
    with pytest.raises(ConfigError, match="MIN:MAX"):
        Elastic.parse(machines, "here:1")


def test_one_launcher_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="RANK and WORLD_SIZE are set"):
        Elastic.parse("1:1", None)


def test_several_machines_need_a_rendezvous() -> None:
    with pytest.raises(ConfigError, match="--rendezvous"):
        Elastic.parse("1:2", None)
    assert Elastic.parse("2", "here:1") == Elastic(2, 2, "here:1")
    assert Elastic.parse("1:1", None) == Elastic()
