"""Requests to stop: what one process is asked, all agree on, after the same step."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from samestep import log
from samestep.config import load
from samestep.errors import EXIT_PREEMPTED, EXIT_REGROUP, ConfigError
from tests.processes import run_ranks
from trainer.accelerators.kinds.cpu import CpuAccelerator
from trainer.checkpoint.manager import Checkpointer
from trainer.strategies.kinds.ddp import DataParallel
from trainer.strategies.world import World
from trainer.training.experiment import Experiment
from trainer.training.passes import global_weights
from trainer.training.preemption import TOGETHER_SECONDS, Config, StopRequest
from trainer.training.run import train


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
    assert "on SIGINT, after one of the next steps and a checkpoint. Ctrl-C again: at once" in lines
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


class Behind(CpuAccelerator):
    """A CPU whose host reads results a step later, as it does with GPUs."""

    runs_behind = True


@pytest.mark.parametrize(("kind", "last"), [(CpuAccelerator, 5), (Behind, 6)])
def test_all_ranks_stop_after_the_same_step(kind: type[CpuAccelerator], last: int) -> None:
    """Ranks ahead of the signaled one, too. Their exit codes tell which rank was signaled."""
    steps, codes, _, _ = zip(*run_ranks(3, stopping_rank, kind, True), strict=True)
    assert set(steps) == {last}
    assert codes == (EXIT_REGROUP, EXIT_PREEMPTED, EXIT_REGROUP)


@pytest.mark.parametrize(("kind", "last"), [(CpuAccelerator, 6), (Behind, 7)])
def test_a_signal_after_the_weights_of_a_step_travels_in_the_next(
    kind: type[CpuAccelerator], last: int
) -> None:
    found = run_ranks(2, stopping_rank, kind, False)
    assert {steps for steps, *_ in found} == {last}


def test_the_flag_needs_no_group_and_no_collective() -> None:
    """It travels in the one all-reduce that a step's weights need, and changes no weight."""
    for _, _, collectives, weights in run_ranks(2, stopping_rank, CpuAccelerator, True):
        assert collectives == ["all_reduce"] * 5  # one for each step, and no other
        assert weights == [6.5] * 5  # 3 + 3.5


def stopping_rank(
    kind: type[CpuAccelerator], before_the_weights: bool
) -> tuple[int, int, list[str], list[float]]:
    """Rank 1 gets a signal in step 5; returns the last step, and what ranks have exchanged."""
    world = World.start(60)
    world.connect("gloo")
    strategy = DataParallel(kind(), world, "fp32", 25)
    objective: Any = SimpleNamespace(weights=lambda batch: {"tokens": 3.0 + batch["more"]})
    weights = []
    with StopRequest(Config(signals=("SIGUSR2",))) as stop, collectives_of(world) as collectives:
        stop.join(world)
        shared = functools.partial(stop.all_reduce, strategy)
        for step in itertools.count(1):
            if step == 5 and world.rank == 1 and before_the_weights:
                ask(stop)
            batches: Any = [{"more": 0.5 * world.rank}]
            totals = global_weights(objective, strategy, batches, shared)
            weights.append(float(totals["tokens"]))
            if step == 5 and world.rank == 1 and not before_the_weights:
                ask(stop)
            if stop.decide(step):
                break
    world.close()
    return step, stop.exit_code, collectives, weights


@contextmanager
def collectives_of(world: World) -> Iterator[list[str]]:
    """Lists the collectives that this process begins, and asserts that it creates no group."""
    found: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield found
    found += [
        event.name.removeprefix("gloo:")
        for event in profile.events()
        if event.name.startswith("gloo:")
    ]
    assert len(dist.distributed_c10d._world.pg_map) == 1


@pytest.mark.parametrize("on_corrupt", ["stop", "skip"])
def test_a_run_creates_no_group_of_its_own(
    experiment_file: str, tmp_path: Path, on_corrupt: str
) -> None:
    """One of gloo connects each rank to all others: 523,776 connections of 1,024 ranks."""
    settings = [f"output={tmp_path / 'run'}", f"data.on_corrupt={on_corrupt}", "strategy=ddp"]
    assert run_ranks(2, groups_of_a_run, experiment_file, settings) == [(0, []), (0, [])]


def groups_of_a_run(file: str, settings: list[str]) -> tuple[int, list[str]]:
    created: list[str] = []
    new_group = dist.new_group

    def noted(*arguments: Any) -> Any:
        created.append(str(arguments))
        return new_group(*arguments)

    dist.new_group = noted
    settings = [*settings, "training.steps=4", "schedule.warmup_steps=1"]
    return train(load(Experiment, file, settings)), created


def ask(stop: StopRequest) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    wait_until_asked(stop)


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
