"""Requests to stop: what one process is asked, all agree on, after the same step."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.processes import run_ranks
from trainer.errors import EXIT_PREEMPTED, EXIT_REGROUP, ConfigError
from trainer.strategies.world import World
from trainer.training.preemption import Config, StopRequest


def test_a_single_process_stops_when_it_is_asked_and_not_before() -> None:
    handler = signal.getsignal(signal.SIGUSR1)
    with StopRequest(Config()) as stop:
        stop.join(world_size=1)
        assert not stop.decide()
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until_asked(stop)
        assert stop.decide()
        assert stop.exit_code == EXIT_PREEMPTED
    assert signal.getsignal(signal.SIGUSR1) is handler
    assert signal.set_wakeup_fd(-1) == -1


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
        stop.join(world.size)
        while True:
            step += 1
            if step == 5 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR2)
                wait_until_asked(stop)
            if stop.decide():
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
