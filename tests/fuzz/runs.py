# ruff: noqa: E501
"""Run folders, stored JSON, and messages between the machines of a run."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from samestep.errors import SamestepError
from samestep.storage.channel import SECRET_BYTES, Channel
from samestep.storage.keeper import Keeper
from samestep.untrusted import read_stored
from tests.fuzz.mutations import blobs, jsons, named, one_of, trees
from tests.fuzz.trial import Files, Target
from tests.integration.test_hostile_json import SMALL
from trainer.checkpoint.lock import Owner
from trainer.elastic import rounds
from trainer.elastic.rendezvous import Rendezvous, RunEnded
from trainer.monitoring.report import Report, page
from trainer.strategies.agreement import Machine
from trainer.training.ledger import GENESIS, Ledger, chain, intact_rows

_CONFIG = {
    "output": "x", "seed": 1, "data": {"path": "d", "batch_tokens": 64},
    "model": {"kind": "bert", "vocab_size": 20, "layers": 1, "width": 8, "heads": 2, "ffn_width": 8,
              "max_positions": 8},
    "objective": {"kind": "mlm"}, "training": {"steps": 3},
}  # fmt: skip
_METRICS = [{"step": 1, "time": 1.0, "loss": 2.5, "lr": 1e-3, "tokens": 64, "section/data": 0.1},
            {"step": 2, "time": 2.0, "loss": float("nan"), "heldout/loss": 2.0, "name": "x"}]  # fmt: skip
_START = {"step": 0, "time": 1.0, "commit": "0" * 40, "samestep": "1", "world_size": 1}
_ALERT = {"step": 1, "time": 1.0, "level": "WARN", "title": "t", "text": "x"}
_LEDGER = [
    {"step": 0, "time": 1.5, "kind": "order", "order": 0, "basis": {"seed": 1}},
    {"step": 2, "time": 1.5, "kind": "fed", "order": 0, "first_step": 1, "examples": [[0, 8]],
     "digest": "0" * 64},
    {"step": 2, "time": 1.5, "kind": "excluded", "order": 0, "examples": [[8, 9]], "reason": "nan"},
    {"step": 2, "time": 1.5, "kind": "corrupt", "order": 0, "dataset": "d", "shard": "s", "first": 9},
    {"step": 2, "time": 1.5, "kind": "lost", "before": "x"},
]  # fmt: skip


_OWNER = asdict(Owner.this_process())


def _lines(rows: Sequence[object]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _rows(rows: Sequence[object]) -> SearchStrategy[bytes]:
    """Lines of which some were changed."""
    changed = trees(list(rows)).filter(lambda tree: isinstance(tree, list)).map(_lines)
    return st.one_of(changed, blobs(_lines(rows)))


def _chained(rows: Sequence[object]) -> bytes:
    """A ledger with right heads, which a stranger can compute as well."""
    head, lines = GENESIS, []
    for row in rows:
        if isinstance(row, dict):
            head = chain(head, row)
            row = {**row, "head": head}
        lines.append(row)
    return _lines(lines)


def _ledgers() -> SearchStrategy[bytes]:
    hostile = trees(_LEDGER).filter(lambda tree: isinstance(tree, list)).map(_chained)
    return st.one_of(hostile, hostile, blobs(_chained(_LEDGER)))


def read_ledger(folder: Path) -> object:
    """Reads a ledger, as `samestep ledger` does, and continues it."""
    path = folder / "ledger.jsonl"
    rows = list(intact_rows(path))
    ledger = Ledger()
    ledger.head = rows[-1][0]["head"] if rows else GENESIS
    ledger.open(path, 2)
    ledger.close()
    return rows


def read_run(folder: Path) -> object:
    """Opens a run folder as `samestep report` and `samestep watch` do."""
    report = Report([str(folder)])
    read_stored(folder / "config.yaml")
    return page(report.names, report.data())


def _runs() -> SearchStrategy[Files]:
    files = {
        "config.yaml": json.dumps(_CONFIG).encode(),
        "metrics.jsonl": _lines(_METRICS),
        "starts.jsonl": _lines([_START]),
        "alerts.jsonl": _lines([_ALERT]),
        "ledger.jsonl": _chained(_LEDGER),
    }
    return one_of(
        files,
        {
            "config.yaml": jsons(_CONFIG),
            "metrics.jsonl": _rows(_METRICS),
            "starts.jsonl": _rows([_START, _START]),
            "alerts.jsonl": _rows([_ALERT, _ALERT]),
            "ledger.jsonl": _ledgers(),
        },
    )


@st.composite
def _small(draw: DrawFn) -> Files:
    """One of the small files that runs, checkpoints, studies and jobs have."""
    kind = draw(st.sampled_from(sorted(SMALL)))
    file, content, _ = SMALL[kind]
    if kind == "owner":
        content = _OWNER
    found = {"kind": kind.encode()}
    if kind == "job":
        job = {"name": "j", "stage": "train", "arms": "a", "folder": "j", "run": "run"}
        study = {"question": "?", "slots": 2, "running": ["j"], "jobs": [job]}
        found["study.json"], file = json.dumps(study).encode(), f"j/{file}"
    if kind == "results on the page":
        found["suite.json"] = json.dumps(SMALL["suite"][1]).encode()
    return {**found, file: draw(jsons(content))}


def read_small(folder: Path) -> object:
    os.environ["XDG_STATE_HOME"] = str(folder)
    kind = (folder / "kind").read_text()
    (folder / "kind").unlink()
    return SMALL[kind][2](folder)


_LIMIT = 2**20
_SENT = 8_000  # bytes of a message; a socket's buffer takes three at once
_Message = dict[str, Any]


class _Pair(socket.socket):
    """One end of a socket pair, on which the options of TCP have no effect."""

    def setsockopt(self, *_: Any) -> None:
        pass


def _sockets() -> tuple[_Pair, _Pair]:
    first, second = socket.socketpair()
    return _Pair(fileno=first.detach()), _Pair(fileno=second.detach())


def _channels() -> tuple[Channel, Channel]:
    first, second = _sockets()
    return Channel(first, b"a", b"b", _LIMIT), Channel(second, b"b", b"a", _LIMIT)


def _messages(*seeds: object) -> SearchStrategy[Files]:
    """A file with a message of a peer in each line."""
    lines = jsons(*seeds).map(lambda message: message.replace(b"\n", b" ")[:_SENT])
    return named("messages", st.lists(lines, min_size=1, max_size=3).map(b"\n".join))


def _send(folder: Path, sender: Channel) -> None:
    for line in (folder / "messages").read_bytes().split(b"\n"):
        sender.send(line)
    sender.socket.shutdown(socket.SHUT_WR)


class _Renewal:
    """The record of a host that is replaced after some turns of its loop."""

    number = 1

    def __init__(self, turns: int) -> None:
        self._turns = turns

    @property
    def is_over(self) -> bool:
        self._turns -= 1
        return self._turns < 0

    def keep(self, _is_of_use: bool) -> None:
        pass

    def check(self) -> bool:
        return False

    def leave(self) -> None:
        pass


def read_as_host(folder: Path) -> object:
    """Hosts a rendezvous for an agent that sends hostile messages, and for one that does not."""
    rounds.POLL_SECONDS, rounds._LAST_CALL_SECONDS = 0.001, 0
    listening = socket.create_server(("127.0.0.1", 0))
    host = rounds.Host(listening, bytes(SECRET_BYTES), (1, 2), _Renewal(8))  # type: ignore[arg-type]
    ends = [_channels() for _ in range(2)]
    for _, own in ends:
        host._agents[own], host._heard[own] = None, float("inf")
        host._selector.register(own.socket, 1, own)
    (hostile, _), (good, _) = ends
    _send(folder, hostile)
    good.send_json({"ready": 1, "machine": asdict(Machine("good", {}))})
    host.run()
    heard: list[_Message] = []
    with suppress(OSError):  # the host has closed the connection
        while message := good.receive_json(0):
            heard.append(message)
    for channel, _ in ends:
        channel.close()
    if host.error is not None:
        raise host.error
    assert any(not {"round", "code", "differs"}.isdisjoint(message) for message in heard), heard
    return heard


def read_as_agent(folder: Path) -> object:
    """Is an agent to which the host sends hostile messages."""
    rounds.POLL_SECONDS = 0.001
    agent = Rendezvous("127.0.0.1:0", 1, 2, "run")
    host, agent._connection = _channels()
    with host:
        _send(folder, host)
        polls = iter(range(4))
        joined = agent.join(1, lambda: agent._connection is None or next(polls, None) is None)
        return joined, agent.event()


def read_as_keeper(folder: Path) -> object:
    """Serves snapshots to a worker that sends hostile requests, then to one that does not."""
    keeper = Keeper(bytes(SECRET_BYTES))
    keeper._blobs["snapshots/a"] = [bytearray(9), bytearray(5)]
    try:
        for is_hostile in (True, False):
            worker, own = _channels()
            with worker:
                if is_hostile:
                    _send(folder, worker)
                else:
                    worker.send_json({"do": "find", "names": ["snapshots"]})
                keeper._serve(own)
                answer = worker.receive_json(0) if not is_hostile else None
        assert answer is not None
        return answer
    finally:
        keeper.close()


def read_channel(folder: Path) -> object:
    """Receives bytes that somebody between two peers has changed."""
    first, second = _sockets()
    with first, Channel(second, b"b", b"a", _LIMIT) as own:
        first.sendall((folder / "bytes").read_bytes()[:_SENT])
        first.shutdown(socket.SHUT_WR)
        while (message := own.receive_json(0)) is not None:
            pass
        return message


def _wire() -> bytes:
    """The bytes of three messages."""
    first, second = _sockets()
    with Channel(first, b"a", b"b", _LIMIT) as sender, second:
        for message in ({"ready": 1}, {"do": "find", "names": ["x" * 999]}, {}):
            sender.send_json(message)
        return second.recv(_SENT)


_READY = {"ready": 1, "machine": {"name": "m", "facts": {"seed": "7", "x": None}, "has_run": False}}
_FROM_AGENT = [_READY, {"code": 1, "reason": "x"}, {"alive": True}]
_ROUND = {"first_rank": 0, "world_size": 2, "port": 1, "order": [0, 1]}
_FROM_HOST = [{"round": _ROUND}, {"event": "lost"}, {"differs": "x"}, {"refused": "x"},
              {"here": 1}, {"code": 1, "reason": "x"}, {"alive": True}]  # fmt: skip
_REQUESTS: list[_Message] = [
    {"do": "put", "names": ["snapshots/a"]}, {"do": "remove", "names": ["snapshots"]},
    {"do": "get", "names": ["snapshots/a"], "start": 0, "stop": 9},
]  # fmt: skip


def _target(
    name: str, files: Callable[[], SearchStrategy[Files]], read: Callable[[Path], object],
    *others: type[BaseException],
) -> Target:  # fmt: skip
    return Target(name, files, read, (SamestepError, *others))


TARGETS = [
    _target("run folder", _runs, read_run),
    _target("ledger", lambda: named("ledger.jsonl", _ledgers()), read_ledger),
    _target("JSON of runs, studies and jobs", _small, read_small),
    _target("channel", lambda: named("bytes", blobs(_wire())), read_channel, OSError),
    _target("message to the rendezvous", lambda: _messages(*_FROM_AGENT), read_as_host),
    _target("message of the rendezvous", lambda: _messages(*_FROM_HOST), read_as_agent, RunEnded),
    _target("request to a keeper", lambda: _messages(*_REQUESTS), read_as_keeper),
]
