"""Runs a function in several real processes that form one gloo world, quickly.

Forked from a server that has torch.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import TCPStore

CONTEXT = multiprocessing.get_context("forkserver")
# What ranks and commands import before and during a short run. `torch._dynamo` is for FSDP2.
CONTEXT.set_forkserver_preload(
    [
        "data_pipeline.packing.bins",
        "data_pipeline.reading.loader",
        "data_pipeline.tokenizers.huggingface",
        "encodings.idna",
        "numpy.ma",
        "samestep.cli",
        "torch._dynamo",
        "torch.profiler._cupti_monitor",
        "trainer.elastic.cli",
        "trainer.models.families.bert",
        "trainer.models.families.t5",
        "trainer.objectives.kinds.mlm",
        "trainer.objectives.kinds.span_corruption",
        "trainer.optim.kinds.adafactor",
        "trainer.optim.kinds.adamw",
        "trainer.publish.export",
        "trainer.strategies.kinds.ddp",
        "trainer.strategies.kinds.fsdp",
        "trainer.strategies.kinds.single",
        "trainer.training.observers.heartbeat",
        "trainer.training.observers.profiler",
        "trainer.training.observers.state_check",
        "trainer.training.run",
    ]
)


def run_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 200
) -> list[Any]:
    """Calls `function(*arguments)` in every process, RANK and WORLD_SIZE set.

    Returns the results by rank.

    `function` must be importable by name. Raises the first failure, with the child's own traceback.
    The processes end with their groups: one that destroys its group before a DDP module is gone may
    hang (see `World.close`).
    """
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
    environment = {
        **os.environ,  # what has been set since the server was started
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    pipes: list[Connection] = []
    processes = []
    for rank in range(world_size):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(
            target=_child,
            args=(sender, {**environment, "RANK": str(rank)}, function, arguments),
            daemon=True,
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return _collect(pipes, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store  # a failure's traceback would keep it, and its thread


class FastSpawn:
    """In place of `multiprocessing` in a module, whose spawned processes come from the server."""

    parent_process = staticmethod(multiprocessing.parent_process)

    def get_context(self, method: str) -> FastSpawn:
        assert method == "spawn"
        return self

    def Pipe(self) -> tuple[Connection, Connection]:
        return CONTEXT.Pipe()

    def Process(self, target: Callable[..., None], args: tuple[Any, ...], daemon: bool) -> Any:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return CONTEXT.Process(
            target=_spawned, args=(dict(os.environ), blocked, target, args), daemon=daemon
        )


def _spawned(
    environment: dict[str, str], blocked: set[int], target: Callable[..., None], args: Any
) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


def fork() -> int:
    """`os.fork` for tests: the child does not collect the garbage of former ones, some of which had
    threads there.
    """
    gc.freeze()
    child = os.fork()
    if child:
        gc.unfreeze()
    return child


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    """The results by rank; raises the first failure that comes with a reason."""
    results: dict[int, Any] = {}
    silent: list[int] = []
    while len(results) + len(silent) < len(pipes):
        waiting = {
            pipe: rank
            for rank, pipe in enumerate(pipes)
            if rank not in results and rank not in silent
        }
        patience = (
            5.0 if silent else deadline - time.monotonic()
        )  # a death is often the echo of another rank's failure
        ready = wait(list(waiting), max(0.0, patience))
        if not ready:
            break
        for pipe in ready:
            rank = waiting[pipe]
            try:
                ok, result = pipe.recv()
            except EOFError:
                silent.append(rank)
                continue
            if not ok:
                raise AssertionError(f"rank {rank} of {len(pipes)} failed:\n{result}")
            results[rank] = result
    if len(results) < len(pipes):
        missing = sorted(set(range(len(pipes))) - results.keys())
        raise AssertionError(
            f"of {len(pipes)} ranks, {missing} did not answer in time; {silent} died without a word"
        )
    return [results[rank] for rank in range(len(pipes))]


def _child(
    pipe: Any, environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        message = (True, function(*arguments))
    except BaseException:
        message = (False, traceback.format_exc())
    pipe.send(message)
    pipe.close()
    os._exit(0)  # without waiting for peers' sockets and threads
