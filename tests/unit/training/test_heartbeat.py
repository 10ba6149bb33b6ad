"""Who is to blame for a hang, as the ranks' own words tell it."""

from __future__ import annotations

import ctypes
import importlib
import operator
import os
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samestep import storage
from samestep.storage.attempts import attempt
from tests.processes import fork
from trainer.accelerators.kinds.xla import XlaAccelerator
from trainer.checkpoint import Checkpointer, Config
from trainer.strategies.world import World
from trainer.training.observers import heartbeat
from trainer.training.observers.heartbeat import PARTS, Beat, explain, place_of

WAITING = Beat(0, "node-a", 100, 1000.0, 12, "forward", "all_reduce", 40.0, "", False)


def ranks(*others: dict[str, Any], size: int = 8) -> dict[int, Beat]:
    """Beats of ranks that wait in the all-reduce of step 12; those in `others` differ."""
    beats = {rank: replace(WAITING, rank=rank, pid=100 + rank) for rank in range(size)}
    return beats | {other["rank"]: replace(beats[other["rank"]], **other) for other in others}


def test_who_is_in_no_collective_holds_the_others_up():
    fetches = {
        "rank": 3,
        "doing": "data fetch",
        "collective": "",
        "seconds": 41.2,
        "what": "s3://bucket/shard.tar",
    }
    expected = (
        "rank 3 (node-a, pid 103): 41 s in data fetch s3://bucket/shard.tar of step 12; "
        "7 others waiting in all_reduce of step 12"
    )
    assert explain(ranks(fetches), []) == expected


def test_a_process_without_a_sign_of_life_comes_first():
    stopped = {"rank": 2, "time": 959.0, "doing": "backward", "collective": ""}
    line = explain(ranks(stopped, {"rank": 3, "collective": ""}, size=4), [2])
    assert line.startswith(
        "rank 2 (node-a, pid 102): no sign of life for 41 s, at last in backward of step 12; "
    )


def test_of_those_in_no_collective_the_one_behind_is_to_blame():
    """As under DDP, where the others wait for its gradients in what looks like a backward pass."""
    others = [{"rank": rank, "doing": "backward", "collective": ""} for rank in range(8)]
    assert explain(ranks(*others, {"rank": 5, "collective": ""}), []).startswith("rank 5 ")
    ahead = [
        {"rank": rank, "step": 13, "doing": "data fetch", "collective": ""} for rank in range(8)
    ]
    assert explain(ranks(*ahead, {"rank": 6, "doing": "logging", "collective": ""}), []).startswith(
        "rank 6 "
    )


def test_who_waits_for_the_device_has_evaluated_and_not_saved():
    beats = [
        {"rank": rank, "doing": doing, "collective": ""}
        for rank, doing in enumerate(("evaluation", "waiting for the device", "checkpoint"))
    ]
    assert explain(ranks(*beats), []).startswith("rank 0 ")
    assert explain(ranks(*beats[1:]), []).startswith("rank 1 ")


def test_where_all_wait_all_are_named():
    line = explain(ranks(size=6), [])
    assert line.startswith("rank 0 (node-a, pid 100), rank 1 ")
    assert line.endswith(
        "rank 3 (node-a, pid 103) and 2 more ranks: 40 s waiting in all_reduce of step 12"
    )


@pytest.mark.parametrize("place", PARTS, ids="-".join)
def test_the_functions_that_are_looked_for_exist(place: tuple[str, str]):
    module, name = place
    assert operator.attrgetter(name)(importlib.import_module(module)).__code__.co_qualname == name


def test_waiting_for_the_last_save_is_part_of_a_checkpoint(tmp_path: Path):
    """Which may take its time, where the end of a run otherwise is quick."""
    written = threading.Event()
    checkpointer = Checkpointer(tmp_path, Config(), rank=0, world_size=1)
    checkpointer._thread = threading.Thread(target=written.wait)
    checkpointer._thread.start()
    waiting = threading.Thread(target=checkpointer.wait)
    waiting.start()
    time.sleep(0.2)
    assert place_of(waiting.ident or 0).doing == "checkpoint"
    written.set()
    waiting.join()


def test_a_graph_that_is_compiled_may_take_its_time(monkeypatch: pytest.MonkeyPatch):
    compiled = threading.Event()
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(sync=compiled.wait))
    accelerator = object.__new__(XlaAccelerator)
    compiling = threading.Thread(target=accelerator._compile)
    compiling.start()
    time.sleep(0.2)
    assert place_of(compiling.ident or 0).doing in heartbeat._LONG
    compiled.set()
    compiling.join()


def test_a_recorder_that_hangs_does_not_keep_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """It asks the device, under the interpreter's lock: no other thread could end the process."""
    monkeypatch.setattr(heartbeat, "_DUMP_SECONDS", 0.5)
    monkeypatch.setattr(
        heartbeat, "_recorded_collectives", lambda: ctypes.PyDLL(None).sleep(20) or b""
    )
    world = World(0, 2, None, timedelta(seconds=1))
    pid = fork()
    if pid == 0:
        heartbeat.Heartbeat(world, 60.0, tmp_path, print)._write_collectives()
        os._exit(0)
    started = time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert time.monotonic() - started < 10


def test_requests_under_way_are_known_by_their_addresses():
    url = "http://user:secret@127.0.0.1:9/shard.tar?signature=secret"
    assert storage.under_way() == []
    assert attempt("read", url, lambda system, path: storage.under_way()) == [
        "http://127.0.0.1:9/shard.tar"
    ]
    assert storage.under_way() == []
