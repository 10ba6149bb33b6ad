"""Logging: INFO from rank 0, warnings from every rank with its number, optionally log files."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import NoReturn

from samestep.addresses import shown
from samestep.environment import visible

FILES = "SAMESTEP_LOGS"
_at_once: list[bool] = []  # not empty after `end_at_once`
"""Environment variable with a folder for a log file of each rank, INFO included."""


class _Formatter(logging.Formatter):
    """Leaves credentials out of addresses, and shows control characters, whoever logs them.

    Rich would obey some of these, above a progress line.
    """

    def format(self, record: logging.LogRecord) -> str:
        return visible(shown(super().format(record)))


class _StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, which progress bars replace to stay below log lines."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:  # as in every handler: a closed terminal must not end the run
            self.handleError(record)


def set_up(rank: int | None = None, verbose: bool = False) -> None:
    """Sends log records to stderr; ranks other than 0 log only warnings, with their rank.

    Args:
        rank: of a worker; None is a process without a launcher.
    """
    prefix = "" if not rank else f"[rank {rank}] "
    level = logging.DEBUG if verbose else logging.INFO
    stderr = _StderrHandler(logging.WARNING if rank else level)
    stderr.setFormatter(_Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    handlers: list[logging.Handler] = [stderr]
    folder = os.environ.get(FILES)
    # Only workers write files: the launcher, which has no rank, would write to rank 0's.
    if folder and rank is not None and os.path.isdir(folder):
        file = logging.FileHandler(Path(folder) / f"rank-{rank:05}.log")
        file.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append(file)
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    for package in ("samestep", "trainer", "data_pipeline", "launch"):
        logging.getLogger(package).setLevel(level)
    for noisy in ("torch.distributed", "torch.distributed.elastic"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # logs the stack of every failure
    if not verbose:
        warnings.filterwarnings("ignore", module=r"torch\..*")
        # C++ stack traces of this process when another one has died.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def end_at_once() -> None:
    """Has the program `samestep` end without the cleanup of Python and of C++ libraries.

    For libraries whose threads abort the process in it, now and then, so that its exit code says
    nothing. What was registered with `atexit` still runs.
    """
    _at_once.append(True)


def ends_at_once() -> bool:
    """Whether `end_at_once` was called."""
    return bool(_at_once)


def exit_now(code: int) -> NoReturn:
    """Ends this process, without waiting for other threads, after writing what was logged."""
    # logging.shutdown() would also close the handlers of libraries, and with them stderr.
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(code)
