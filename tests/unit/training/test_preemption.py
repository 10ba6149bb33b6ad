"""Requests to stop: what one process is asked, all agree on, after the same step."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import cast

import pytest

from samestep import log
from samestep.errors import EXIT_PREEMPTED, EXIT_REGROUP, ConfigError
from tests.processes import run_ranks
from trainer.checkpoint.manager import Checkpointer
from trainer.strategies.world import World
from trainer.training.preemption import TOGETHER_SECONDS, Config, StopRequest


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP])
def test_a_single_process_stops_when_it_is_asked_and_not_before(number: signal.Signals) -> None:
    handler = signal.getsignal(number)
    with StopRequest(Config()) as stop:
        stop.join(World.start(60))
        assert not stop.decide(1)
        os.kill(os.getpid(), number)
        wait_until_asked(stop)
        assert stop.decide(2)
        assert stop.exit_code == EXIT_PREEMPTED
    assert signal.getsignal(number) is handler
    assert signal.set_wakeup_fd(-1) == -1


def test_ctrl_c_is_a_request_too(capfd: pytest.CaptureFixture[str]) -> None:
    """With an exit code of its own. A second one ends the process, and says what is repeated."""
    pid = os.fork()
    if pid == 0:
        log.set_up()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        saves = cast(Checkpointer, SimpleNamespace(saved=10))
        with StopRequest(Config()) as stop:
            assert not stop.decide(15, saves)
            os.kill(os.getpid(), signal.SIGINT)
            wait_until_asked(stop)
            assert stop.decide(15, saves)
            assert stop.exit_code == 130
            time.sleep(TOGETHER_SECONDS + 0.1)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    lines = capfd.readouterr().err
    assert "on SIGINT, after this step and a checkpoint. Ctrl-C again: at once" in lines
    assert "the same command repeats steps 11 to 15" in lines


def test_under_nohup_the_end_of_the_terminal_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(Config()) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
            assert not stop.decide(1)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_background_jobs_ignore_ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest(Config()) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            assert stop.asked is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_signals_it_may_be_outside_of_the_main_thread() -> None:
    def train() -> bool:
        with StopRequest(Config(signals=())) as stop:
            stop.join(World.start(60))
            return stop.decide(1)

    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(train).result(30)


def test_all_ranks_stop_after_the_same_step() -> None:
    """Ranks ahead of the signaled one, too. Their exit codes tell which rank was signaled."""
    steps, codes = zip(*run_ranks(3, stopping_rank), strict=True)
    assert set(steps) in (
        {6},
        {7},
    )  # asked during step 5: known to all after the next, or the one after that
    assert codes == (EXIT_REGROUP, EXIT_PREEMPTED, EXIT_REGROUP)


def stopping_rank() -> tuple[int, int]:
    world = World.start(60)
    world.connect("gloo")
    step = 0
    with StopRequest(Config(signals=("SIGUSR2",))) as stop:
        stop.join(world)
        while True:
            step += 1
            if step == 5 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR2)
                wait_until_asked(stop)
            if stop.decide(step):
                break
        stop.finish()
    world.close()
    return step, stop.exit_code


def wait_until_asked(stop: StopRequest) -> None:
    deadline = time.monotonic() + 5
    while not stop.asked:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="SIGKILL"):
        Config(signals=("SIGKILL",))
    with pytest.raises(ConfigError, match="deadline"):
        Config(deadline=0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_a_process_that_waits_for_others(number: signal.Signals, code: int) -> None:
    """There is nothing to save; the main thread may wait in the rendezvous until the deadline."""
    pid = os.fork()
    if pid == 0:
        with StopRequest(Config(), joins=True):
            os.kill(os.getpid(), number)
            time.sleep(20)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
