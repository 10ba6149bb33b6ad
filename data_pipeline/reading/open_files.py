"""How many shards a process may have open."""

from __future__ import annotations

import functools

from samestep.environment import open_files
from samestep.errors import ConfigError

MAX_OPEN_SHARDS = 2048  # per split; 64 lanes with windows of 4 shards need about 320
_FEW_SHARDS = 128  # where the limit of open files is unknown


@functools.cache
def max_open_shards() -> int:
    """Maximum number of open shards per split: `MAX_OPEN_SHARDS`, or less if the system says so.

    Each needs a file descriptor, and a process may start with as few as 256. The first call raises
    the limit to three times `MAX_OPEN_SHARDS`: for training, for evaluation, and for all else.
    """
    limits = open_files(3 * MAX_OPEN_SHARDS)
    return _FEW_SHARDS if limits is None else int(max(1, min(MAX_OPEN_SHARDS, limits[0] // 3)))


def check_open_shards(needed: int, lanes: int, window: int) -> None:
    """Rejects an order that reads more shards at a time than may be open.

    Raises:
        ConfigError: names the settings of the order.
    """
    if needed > max_open_shards():
        raise ConfigError(
            f"data.lanes {lanes} and data.window {window} need {needed} open shards "
            f"in this process, which can open {max_open_shards()}. Lower one of them (in a new "
            "run), use more devices, or raise the limit of open files (ulimit -n)."
        )
