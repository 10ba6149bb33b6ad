"""What ranks exchange at a start and in a step, and what the store of rank 0 bears.

A start is counted on real processes with gloo, and a step as rank 0 of processes that are not
there, in PyTorch's fake process group. The store's clients are threads of one process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.growth import Figures, Growth, measure, timed
from samestep.config import load
from trainer.accelerators.kinds.cpu import CpuAccelerator
from trainer.inspect.plan.batch import example, stand_in
from trainer.strategies import Strategy
from trainer.strategies.announcements import Announcements
from trainer.strategies.kinds import ddp, fsdp
from trainer.strategies.neighbor import FEWEST_CONNECTIONS, allow_ranks
from trainer.strategies.world import World
from trainer.training.experiment import Experiment
from trainer.training.observers.heartbeat import Heartbeat
from trainer.training.passes import accumulate_gradients
from trainer.training.preemption import Config as Preemption
from trainer.training.preemption import StopRequest

_FILE = Path(__file__).parents[1] / "configs" / "debug" / "bert_mini.yaml"
_SMALL = ("model.vocab_size=128", "model.layers=2", "model.width=32", "model.ffn_width=64")
_THREADS = 32  # of clients of the store
_BLOCKS = 10  # that ranks announce
_TIMEOUT = timedelta(minutes=5)
_SETTLED_SECONDS = 15.0
_CPU = torch.profiler.ProfilerActivity.CPU
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["benchmarks.scale_ranks", "torch._dynamo"])


def _step(strategy: Strategy) -> int:
    """Takes two steps of a small BERT; returns the number of collectives in the second."""
    experiment = load(Experiment, str(_FILE), list(_SMALL))
    phase = experiment.resolved_phases()[0]
    objective = experiment.objective.build(stand_in(experiment.model.vocab_size))
    columns = example(experiment, objective, phase)
    batch = {name: torch.from_numpy(column) for name, column in columns.items()}
    model, optimizer = strategy.prepare(
        experiment.model.build(),
        experiment.optimizer.build,
        lambda _, start, stop: torch.zeros(stop - start),
    )
    count = 0
    with StopRequest(Preemption(signals=())) as stop:
        stop.join(strategy.world)
        shared = partial(stop.all_reduce, strategy)
        for number in range(2):
            with torch.profiler.profile(activities=[_CPU]) as profile:
                accumulate_gradients(model, objective, strategy, [batch], all_reduce=shared)
                strategy.step(optimizer, strategy.clip_grad_norm(1.0))
            assert not stop.decide(number)
            optimizer.zero_grad()
            count = sum(event.name.startswith("c10d::") for event in profile.events())
    return count


def steps_of(ranks: int) -> Figures:
    """The collectives of a step as rank 0 of this many, and the process groups that it has.

    Of FSDP2: DDP does not work in the fake process group.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        world = World(0, ranks, None, _TIMEOUT)
        strategy = fsdp.Config().build(CpuAccelerator(), world, "fp32")
        collectives = _step(strategy)
        groups = len(dist.distributed_c10d._world.pg_map)
    finally:
        dist.destroy_process_group()
    return {
        "FSDP2: collectives of a step": collectives,
        "FSDP2: process groups of a rank": groups,
    }


class _CountedStore(Store):
    """Counts torch's requests to a store."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.requests, self._store = 0, store

    def has_extended_api(self) -> bool:
        return True


def _counted(name: str) -> Callable[..., Any]:
    def method(self: _CountedStore, *arguments: Any) -> Any:
        self.requests += 1
        return getattr(self._store, name)(*arguments)

    return method


for _name in (
    *("set", "get", "add", "check", "wait", "append", "multi_get", "multi_set"),
    *("compare_set", "delete_key"),
):
    setattr(_CountedStore, _name, _counted(_name))


def _sockets() -> int:
    """Number of sockets that this process has open. Linux only."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return found


def _settled() -> int:
    """The number of sockets when it has not changed for a while: threads still connect."""
    found, since = _sockets(), time.monotonic()
    while time.monotonic() < since + _SETTLED_SECONDS:
        time.sleep(0.5)
        if (now := _sockets()) != found:
            found, since = now, time.monotonic()
    return found


def _start(pipe: Connection, rank: int, ranks: int, port: int) -> None:
    """Starts as a rank of a run, takes two steps, and sends what it has opened."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    before = _sockets()
    world = World.start(_TIMEOUT.total_seconds())
    assert world.store is not None
    store = _CountedStore(world.store)
    started = replace(world, store=store)
    started.connect("gloo")
    strategy = ddp.Config().build(CpuAccelerator(), started, "fp32")
    with tempfile.TemporaryDirectory() as folder, Heartbeat(world, 600.0, Path(folder), print):
        collectives = _step(strategy)
        pipe.send((_settled() - before, store.requests, collectives))
        signal.pause()  # until all have been counted


def starts_of(ranks: int) -> Figures:
    """The sockets and requests of a start of processes on this machine, with gloo."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank in range(ranks):
        parent, child = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_start, args=(child, rank, ranks, port), daemon=True)
        process.start()
        pipes.append(parent)
        processes.append(process)
    try:
        counts = [pipe.recv() for pipe in pipes]
    finally:
        for process in reversed(processes):  # the store's last
            process.kill()
            process.join()
    (first, *_), *others = counts
    return {
        "sockets of rank 0, with the store's": first,
        "sockets of another rank": max(sockets for sockets, *_ in others),
        "requests to the store, all ranks": sum(requests for _, requests, _ in counts),
        "DDP: collectives of a step": max(collectives for *_, collectives in counts),
        "messages of gloo's all-reduce, one after another": 2 * (ranks - 1),
    }


def _continued(growths: list[Growth], sizes: Sequence[int]) -> list[Growth]:
    """Continues counts, which are polynomials of the number of ranks that the last size confirms.

    Raises:
        ValueError: a count is no such polynomial of degree 1 or 2.
    """
    for growth in growths:
        *known, last = growth.measured.items()
        for degree in (1, 2):
            if len(known) > degree:
                sizes_known, counts = zip(*known[-degree - 1 :], strict=True)
                line = np.polyfit(np.array(sizes_known), np.array(counts), degree)
                if abs(np.polyval(line, last[0]) - last[1]) < 0.5:
                    growth.extrapolated = {
                        size: float(np.polyval(line, size))
                        for size in sizes
                        if size not in growth.measured
                    }
                    break
        else:
            raise ValueError(f"{growth.title} is no polynomial: {growth.measured}")
    return growths


def _serve(pipe: Connection, ranks: int) -> None:
    """Hosts a store as rank 0 does, with the limit of open files that it sets for itself."""
    assert not (problem := allow_ranks(ranks, "hosts the store of the run")), problem
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while pipe.recv():
        pipe.send(time.process_time())


def store_of(ranks: int) -> Figures:
    """Connects all ranks to a store, and announces blocks as for `data.on_corrupt: skip`."""
    assert not (problem := allow_ranks(ranks, "connects all ranks")), problem
    pipe, child = _CONTEXT.Pipe()
    server = _CONTEXT.Process(target=_serve, args=(child, ranks), daemon=True)
    server.start()
    port = pipe.recv()

    def connect() -> tuple[list[TCPStore], list[socket.socket]]:
        clients = [
            TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT) for _ in range(ranks)
        ]
        # Further connections of a rank are of no use here, but the store must accept them.
        others = (FEWEST_CONNECTIONS - 1) * ranks
        return clients, [socket.create_connection(("127.0.0.1", port)) for _ in range(others)]

    def cpu_seconds() -> float:
        pipe.send(True)
        return cast(float, pipe.recv())

    with ThreadPoolExecutor(_THREADS) as pool:
        connecting, (clients, others) = timed(connect)
        told = [Announcements(each, each, "loader 1", ranks, 0) for each in clients]
        began = cpu_seconds()

        def announce(each: Announcements, block: int) -> None:
            each.announce(block, 0)

        def announce_all() -> None:
            for block in range(_BLOCKS):
                list(pool.map(partial(announce, block=block), told))
                list(pool.map(partial(Announcements.largest, block=block), told))

        announcing, _ = timed(announce_all)
        used = cpu_seconds() - began
    server.kill()
    server.join()
    for each in others:
        each.close()
    return {
        "connections to the store": FEWEST_CONNECTIONS * ranks,
        "all connect, s": connecting,
        "all announce a block and read the result, s": announcing / _BLOCKS,
        "of that, the store's CPU time, s": max(used / _BLOCKS, 1e-6),
    }


def costs(
    ranks: Sequence[int], processes: Sequence[int], seconds: float
) -> Iterator[tuple[str, list[Growth]]]:
    """Measures these numbers of simulated ranks, and of real processes."""
    # torch looks up the name of each peer, and a name server may be slow.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    yield "A step of ranks", measure("ranks", ranks, steps_of, seconds)
    starts = measure("ranks", processes, starts_of, seconds)
    yield "A start of ranks with gloo", _continued(starts, ranks)
    yield "The store of ranks", measure("ranks", ranks, store_of, seconds)
