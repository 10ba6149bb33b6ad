"""Starts the processes of a run on this machine and reports for them: torch's elastic agent, owned by us."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer.errors import EXIT_DONE, LaunchError


def under_launcher() -> bool:
    """Whether a launcher (torchrun, or ourselves) has already started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def default_processes(on_cpu: bool) -> int:
    """One process a GPU, or a single one on the CPU."""
    return 1 if on_cpu else max(1, torch.cuda.device_count())


def run_workers(arguments: Sequence[str], processes: int) -> int:
    """Runs `samestep ARGUMENTS` in `processes` processes that form one run; returns the run's exit code.

    When one fails the others are stopped, and it has said on stderr what went wrong.

    Raises:
        LaunchError: a signal ended a process or all of them, which is a death without a word.
        KeyboardInterrupt: the user pressed Ctrl-C; the processes have ended.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages: a tenth of a small model's step on a CPU
    for noisy in ("agent.server.api", "multiprocessing.api"):  # they log what is said here in a user's words
        logging.getLogger(f"torch.distributed.elastic.{noisy}").setLevel(logging.CRITICAL)
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
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # or each run leaves a folder in /tmp
    )
    again = "run the same command again to go on from the newest checkpoint"
    try:
        elastic_launch(config, sys.executable)("-P", "-m", "trainer.cli", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        hint = "; the kernel does that when memory runs out (see dmesg)" if name == "SIGKILL" else ""
        raise LaunchError(f"rank {rank} was killed by {name}{hint}; {again}") from error
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from error
        raise LaunchError(f"stopped by {error.sigval.name}; {again}") from error
    return EXIT_DONE
