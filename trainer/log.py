"""Logging set-up: INFO from rank 0, warnings from every rank with its number; all of it in files, where asked for."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

FILES = "SAMESTEP_LOGS"
"""The environment variable that names a folder for a file of each rank, with its INFO, too."""


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
    level = logging.DEBUG if verbose else logging.INFO
    stderr = _StderrHandler(logging.WARNING if rank else level)
    stderr.setFormatter(logging.Formatter(f"%(asctime)s {who}%(message)s", datefmt="%H:%M:%S"))
    handlers: list[logging.Handler] = [stderr]
    if (
        (folder := Path(os.environ.get(FILES, ""))).name
        and "RANK" in os.environ
        and folder.is_dir()
    ):
        handlers.append(logging.FileHandler(folder / f"rank-{rank:05}.log"))
        handlers[-1].setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        )
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    for package in ("trainer", "data_pipeline", "launch"):
        logging.getLogger(package).setLevel(level)
    for noisy in ("torch.distributed", "torch.distributed.elastic"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it shows the stack of every failure
    if not verbose:
        warnings.filterwarnings("ignore", module=r"torch\..*")
        os.environ.setdefault(
            "TORCH_CPP_LOG_LEVEL", "ERROR"
        )  # C++ stack traces when another process has died
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
