"""Starts the processes of a run on this machine and reports for them: torch's elastic agent, owned by us."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer.errors import EXIT_DONE, EXIT_FAILED

logger = logging.getLogger(__name__)


def under_launcher() -> bool:
    """Whether a launcher (torchrun, or ourselves) has already started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def default_processes(on_cpu: bool) -> int:
    """One process a GPU, or a single one on the CPU."""
    return 1 if on_cpu else max(1, torch.cuda.device_count())


def run_workers(arguments: Sequence[str], processes: int) -> int:
    """Runs `samestep ARGUMENTS` in `processes` processes that form one run; returns the run's exit code.

    When one fails the others are stopped. Each has said on stderr what went wrong, so only deaths without a word
    (signals) are explained here.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="samestep",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "trainer.cli", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        hint = "; the kernel does that when memory runs out (see dmesg)" if name == "SIGKILL" else ""
        logger.error(
            "rank %d was killed by %s%s; run the same command again to go on from the newest checkpoint",
            rank,
            name,
            hint,
        )
        return EXIT_FAILED
    return EXIT_DONE
