"""`python -m tests.chaos.machine train ...`: the command samestep, on a machine of `network`.

The machines of a test share one kernel, so this takes away what real ones do not share:
`fcntl.flock`, which tells processes of one machine at once that another one is gone; and the clock,
which may be wrong by CHAOS_SKEW seconds. CHAOS_SECONDS, as JSON, makes waits shorter:
{"trainer.elastic.host._SILENT_SECONDS": 3}.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import json
import os
import sys
import time


def _no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "no locks available")


def main() -> int:
    # Workers are forked from this process, and so have the same.
    fcntl.flock = _no_locks
    now, skew = time.time, float(os.environ.get("CHAOS_SKEW", "0"))
    time.time = lambda: now() + skew
    for name, seconds in json.loads(os.environ.get("CHAOS_SECONDS", "{}")).items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, seconds)
    from samestep.cli import main as samestep

    return samestep(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
