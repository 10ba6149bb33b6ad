"""The processes of a run: what they share, and for how long."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
import torch.distributed as dist

from tests.processes import run_ranks
from trainer.errors import EXIT_CRASHED, ConnectError
from trainer.strategies.world import PROGRESS, World


def test_each_attempt_begins_with_an_empty_store() -> None:
    """torchrun keeps one store over its restarts, and in it what ended the attempts before."""
    assert run_ranks(1, two_attempts) == [[False, False]]


def two_attempts() -> list[bool]:
    found = []
    for attempt in ("0", "1"):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
        world = World.start(20)
        assert world.store is not None
        found.append(world.store.check([PROGRESS]))
        world.tell_progress(2)
    return found


def test_who_ends_first_is_not_taken_for_dead() -> None:
    """However long the others take from the last barrier on, as on a machine that is too busy."""
    assert run_ranks(2, end_slowly) == [None, None]


def end_slowly() -> None:
    world = World.start(20)
    world.connect("gloo")
    barrier, rank = dist.barrier, world.rank
    dist.barrier = lambda: (barrier(), time.sleep(2 * rank))
    time.sleep(1)  # until they watch each other
    world.close()


def test_no_thread_is_left_in_the_store() -> None:
    """One that is inside its C++ code when the interpreter ends aborts the process."""
    assert run_ranks(2, threads_after_the_end) == [[], []]


def threads_after_the_end() -> list[str]:
    world = World.start(20)
    world.connect("gloo")
    world.close()
    return [each.name for each in threading.enumerate() if each.name == "failure-watch"]


def test_an_elastic_run_starts_again_when_its_processes_cannot_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network may fail at any moment, this one included."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        values = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(
            ConnectError, match="rank 1 could not connect to the other ranks"
        ) as error:
            World.start(1.0)
    assert error.value.exit_code == EXIT_CRASHED
