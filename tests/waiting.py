"""Waiting for what another process, or thread, is about to do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(what: Callable[[], object], seconds: float = 120) -> None:
    """Waits for something that has to come true."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
