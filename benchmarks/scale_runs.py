"""The cost of a run's files against its steps, of the rendezvous against machines, and of planning
and rendering a job against nodes.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.growth import (
    Figures,
    Growth,
    cpu_timed,
    in_fresh_process,
    measure,
    resident,
    timed,
)
from launch.submission.submit import prepare
from samestep.config import load
from samestep.storage.channel import Channel, Message
from trainer.elastic.rendezvous import Rendezvous
from trainer.inspect.plan.plan import STRATEGIES, Planner
from trainer.inspect.plan.trace import Step
from trainer.monitoring.jsonl import JsonlTracker, read_metrics
from trainer.training.experiment import Experiment
from trainer.training.ledger import GENESIS, Ledger, chain, intact_rows

_CONFIGS = Path(__file__).parents[1] / "configs"
_CLUSTERS = ("slurm", "kubernetes_gpu")
_DEVICES = 8  # of a node
_METRICS = {f"perf/metric_{n}": 0.1 + n for n in range(12)}


def write_run(folder: Path, rows: int) -> str:
    """Writes metrics.jsonl and ledger.jsonl of a run; returns the head of the ledger."""
    head = GENESIS
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "ledger.jsonl").open("w") as to:
        for step in range(1, rows + 1):
            metrics.write(json.dumps({"step": step, "time": 1e9 + step, **_METRICS}) + "\n")
            fed = {"order": 0, "first_step": step, "examples": [[256 * step, 256 * step + 256]]}
            row = {"step": step, "kind": "fed", **fed, "digest": f"{step:016x}"}
            head = chain(head, row)
            to.write(json.dumps({**row, "time": 1e9 + step, "head": head}) + "\n")
    return head


def resume_run(folder: Path, rows: int, head: str) -> Figures:
    """Continues the files at their end, and reads them as `report` and `ledger verify` do."""
    ledger, path = Ledger(), folder / "ledger.jsonl"
    ledger.head = head
    opening, _ = cpu_timed(lambda: ledger.open(path, rows))
    ledger.close()
    tracking, tracker = cpu_timed(lambda: JsonlTracker(folder / "metrics.jsonl", rows))
    tracker.close()
    before = resident()
    following, intact = cpu_timed(lambda: list(intact_rows(path)))
    assert len(intact) == rows
    memory = resident(before)
    reading, _ = cpu_timed(lambda: read_metrics(folder))
    return {
        "resume ledger.jsonl, CPU s": opening,
        "resume metrics.jsonl, CPU s": tracking,
        "ledger verify: the chain, CPU s": following,
        "ledger verify: memory of its rows, MiB": memory,
        "report: read metrics.jsonl, CPU s": reading,
    }


def files_of(rows: int) -> Figures:
    """The costs of the files of a run with a row for each step."""
    with tempfile.TemporaryDirectory() as folder:
        head = write_run(Path(folder), rows)
        return in_fresh_process(resume_run, Path(folder), rows, head)


@contextmanager
def _counted_messages() -> Iterator[list[object]]:
    """Lists the messages that agents and host send."""
    sent: list[object] = []
    send = Channel.send_json

    def counted(self: Channel, message: Message) -> None:
        sent.append(message)
        send(self, message)

    Channel.send_json = counted  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        Channel.send_json = send  # type: ignore[method-assign]


def rendezvous_of(machines: int) -> Figures:
    """Joins, loses one machine, and joins again; agents are threads with sockets on loopback."""
    with tempfile.TemporaryDirectory() as folder:  # of the secret that the agents share
        return _rendezvous_of(machines, Path(folder))


def _rendezvous_of(machines: int, folder: Path) -> Figures:
    first = Rendezvous("127.0.0.1:0", machines - 1, machines, "train", folder)
    first._connect()
    address = f"127.0.0.1:{first._port}"
    number = range(machines - 1)
    others = (Rendezvous(address, machines - 1, machines, "train", folder) for _ in number)
    agents = [first, *others]

    def join(agent: Rendezvous) -> int:
        joined = agent.join(_DEVICES, lambda: False)
        assert joined is not None
        return joined.world_size

    def hear(agent: Rendezvous) -> None:
        while agent.event() != "lost":
            time.sleep(0.01)

    with ThreadPoolExecutor(machines) as pool, _counted_messages() as messages:
        joining, sizes = timed(lambda: list(pool.map(join, agents)))
        assert sizes == [machines * _DEVICES] * machines
        joined = len(messages)
        lost = agents.pop()
        assert lost._connection is not None
        lost._connection.socket.close()
        hearing, _ = timed(lambda: list(pool.map(hear, agents)))
        again, sizes = timed(lambda: list(pool.map(join, agents)))
        assert sizes == [(machines - 1) * _DEVICES] * (machines - 1)
        restarted = len(messages) - joined
        first.close(0, "done")
    return {
        "rendezvous of all, s": joining,
        "rendezvous: messages": joined,
        "all hear of a loss, s": hearing,
        "rendezvous of the others, s": again,
        "loss and second rendezvous: messages": restarted,
    }


def launching(nodes: int) -> Figures:
    """Plans and renders a job of BERT-large."""
    file = _CONFIGS / "pretrain" / "bert_large.yaml"
    devices = _DEVICES * nodes
    experiment = load(Experiment, str(file), [])
    phase = replace(
        experiment.resolved_phases()[-1], micro_batch_size=8, global_batch_size=8 * devices
    )
    planner = Planner(experiment, phase, devices, Step(experiment, on_cpu=False))
    planner.plan("ddp")  # traces the step, which is the same for any number of devices
    planning, _ = cpu_timed(lambda: [planner.plan(strategy) for strategy in STRATEGIES])
    figures = {"plan of all strategies, CPU s": planning}
    for kind in _CLUSTERS:
        cluster = str(_CONFIGS / "launch" / f"{kind}.yaml")
        render = partial(prepare, cluster, str(file), [f"cluster.nodes={nodes}"])
        figures[f"launch --dry-run, {kind}: render, CPU s"] = cpu_timed(render)[0]
    return figures


def costs(
    rows: Sequence[int], machines: Sequence[int], nodes: Sequence[int], seconds: float
) -> Iterator[tuple[str, list[Growth]]]:
    """Measures these numbers of rows, machines and nodes."""
    yield "Files of a run", measure("rows", rows, files_of, seconds)
    yield "Rendezvous of an elastic run", measure("machines", machines, rendezvous_of, seconds)
    yield "Planning and launching", measure("nodes", nodes, launching, seconds)
