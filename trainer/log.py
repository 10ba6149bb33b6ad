"""Logging set-up: INFO from rank 0, warnings from every rank with its number."""

from __future__ import annotations

import logging
import os
import sys
import warnings


class _StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at the time: progress bars put themselves there to keep below such lines."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:  # as in every handler: a terminal that is gone must not end the run
            self.handleError(record)


def set_up(rank: int = 0, verbose: bool = False) -> None:
    """Sends log records to stderr; ranks other than 0 only speak from WARNING up, and say who they are."""
    who = "" if rank == 0 else f"[rank {rank}] "
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s {who}%(message)s", datefmt="%H:%M:%S"))
    level = logging.WARNING if rank else logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in ("trainer", "data_pipeline", "launch"):
        logging.getLogger(package).setLevel(level)
    for noisy in ("torch.distributed", "torch.distributed.elastic"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it shows the stack of every failure
    if not verbose:
        warnings.filterwarnings("ignore", module=r"torch\..*")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # C++ stack traces when another process has died
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
