"""Runs a function in several real processes that form one gloo world, quickly: forked from a server that has torch."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["trainer.run", "trainer.export"])


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 200) -> list[Any]:
    """Calls `function(*arguments)` in every process, RANK and WORLD_SIZE set; returns the results by rank.

    `function` must be importable by name. Raises the first failure, with the child's own traceback.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    environment = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_child, args=(sender, {**environment, "RANK": str(rank)}, function, arguments), daemon=True
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results = []
    try:
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(timeout):
                raise AssertionError(f"rank {rank} of {world_size} has not answered within {timeout} s")
            try:
                ok, result = pipe.recv()
            except EOFError:
                processes[rank].join(5)
                raise AssertionError(
                    f"rank {rank} of {world_size} died, exit code {processes[rank].exitcode}"
                ) from None
            if not ok:
                raise AssertionError(f"rank {rank} of {world_size} failed:\n{result}")
            results.append(result)
    finally:
        for process in processes:
            process.join(5 if len(results) == world_size else 0)
            process.kill()
    return results


def _child(pipe: Any, environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
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
