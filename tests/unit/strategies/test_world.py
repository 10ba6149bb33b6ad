"""The processes of a run: what they share, and for how long."""

from __future__ import annotations

import os

from tests.processes import run_ranks
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
