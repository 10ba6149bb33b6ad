"""One fault after another happens to a small run.

Each ends as if it had not, or without what it says it left out.

`python -m tests.chaos.table` runs all of them and writes what each has cost to docs/reliability.md.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.outcome import Observer
from tests.chaos.runs import Run, assert_same_run, kill
from tests.faulty_proxy import Fault, FaultyProxy
from tests.integration.commands import Process, Samestep, Start
from tests.ports import free_port
from trainer.monitoring.jsonl import read_rows

STEP_SECONDS = float(os.environ.get("CHAOS_STEP_SECONDS", "0.2"))
ELASTIC = ("--elastic", "1:1")
AGAIN = "starting again from the newest checkpoint"
LONG = pytest.mark.chaos

Survived = Callable[..., str]
"""Waits for the end of a run, and shows that it has got over its fault.

Returns what it has said.
"""

pytestmark = pytest.mark.usefixtures("nothing_left")


def paced(**settings: Any) -> str:
    """The objective of these runs, with more settings."""
    return f"objective={ {'kind': 'tests.chaos.paced', 'seconds': STEP_SECONDS} | settings }"


@pytest.fixture
def run(start: Start, experiment_file: str, tmp_path: Path) -> Run:
    """24 steps of two processes, one micro-batch each, and a checkpoint every 4."""
    settings = (
        *(
            "training.steps=24",
            "training.micro_batch_size=50",
            "data.threads=0",
            "strategy=ddp",
            "--processes=2",
        ),
        *("checkpoint.every=4", "checkpoint.keep_last=3", paced()),
    )
    return Run(tmp_path / "run", experiment_file, settings, start)


@pytest.fixture
def survived(
    samestep: Samestep,
    experiment_file: str,
    tmp_path_factory: pytest.TempPathFactory,
    record_property: Callable[[str, object], None],
    undisturbed: dict[tuple[str, ...], Path],
) -> Survived:
    """Compares with a run of one process, with settings, to which nothing happens.

    Records what the fault has cost.
    """

    def check(observer: Observer, process: Process, *settings: str) -> str:
        result = observer.end(process)
        assert result.code == 0, result.err
        outcome = observer.outcome()
        assert (outcome.lost, outcome.repeated) == (0, 0)
        if settings not in undisturbed:
            folder = undisturbed[settings] = tmp_path_factory.mktemp("undisturbed") / "run"
            assert (
                samestep(
                    "train", experiment_file, f"output={folder}", "training.steps=24", *settings
                ).code
                == 0
            )
        assert_same_run(samestep, observer.run, undisturbed[settings])
        record_property("outcome", asdict(outcome))
        return result.err

    return check


@pytest.fixture(scope="session")
def undisturbed() -> dict[tuple[str, ...], Path]:
    """The runs that nothing happened to, by their settings."""
    return {}


# Processes


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "source", "settings"),
    [
        ("two", "disk", ()),
        pytest.param("four", "disk", ("--processes=4",), marks=LONG),
        pytest.param(
            "four",
            "memory",
            ("--processes=4", "checkpoint.every=1000", "checkpoint.snapshot_every=2"),
            marks=LONG,
        ),
    ],
)
def test_a_killed_worker(
    run: Run, workers: str, source: str, settings: tuple[str, ...], survived: Survived
) -> None:
    observer = Observer(
        f"one of {workers} workers killed (`kill -9`), back from {source}", run.folder, AGAIN
    )
    process = run.train(*ELASTIC, *settings)
    observer.reach(process, 10)
    observer.strike()
    os.kill(process.workers[1], signal.SIGKILL)
    said = survived(observer, process)
    assert "rank 1 was killed by SIGKILL" in said
    assert "Traceback" not in said


@LONG
def test_a_killed_agent(run: Run, survived: Survived) -> None:
    elastic = ("--elastic=1:2", f"--rendezvous=127.0.0.1:{free_port()}", "--processes=1")
    victim, survivor = run.train(*elastic), run.train(*elastic)
    observer = Observer(
        "one of two agents killed (`kill -9`), back from disk",
        run.folder,
        "stopping because|1 x CPU",
    )
    observer.reach(survivor, 10)
    observer.strike()
    victim.popen.kill()
    survived(observer, survivor)
    assert [start["devices"].split()[0] for start in read_rows(run.folder / "starts.jsonl")] == [
        "2",
        "1",
    ]


@LONG
def test_a_stopped_rank(run: Run, survived: Survived) -> None:
    observer = Observer(
        "one of two workers stopped (`kill -STOP`), `hang_timeout: 3`", run.folder, "the run hangs"
    )
    process = run.train(*ELASTIC, "training.hang_timeout=3")
    observer.reach(process, 10)
    observer.strike()
    os.kill(process.workers[1], signal.SIGSTOP)
    assert "the run hangs: rank 1 " in survived(observer, process)


@LONG
@pytest.mark.parametrize("politely", [True, False], ids=["SIGTERM", "SIGKILL"])
def test_a_run_that_is_ended(run: Run, politely: bool, survived: Survived) -> None:
    name = (
        "preempted (SIGTERM, `deadline: 30`)"
        if politely
        else "all processes killed at once (`kill -9`)"
    )
    observer = Observer(
        f"{name}, started again",
        run.folder,
        "stopping     on SIGTERM" if politely else "continuing ",
    )
    first = run.train("training.preemption.deadline=30")
    observer.reach(first, 10)
    observer.strike()
    if politely:
        first.popen.terminate()
        assert observer.end(first).code == 75
    else:
        kill(first)
    survived(observer, run.train())


# Storage


@LONG
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("answers 503 to four of eight requests", 503),
        ("closes four of eight connections", "drop"),
        ("cuts four of eight answers off", "truncate"),
        ("answers four of eight requests 2 s late", "delay"),
        ("is gone for 5 s", None),
        ("rejects accepted credentials for 5 s", 401),
    ],
)
def test_a_failing_store(
    run: Run,
    name: str,
    fault: Fault,
    remote: tuple[str, ...],
    s3_proxy: FaultyProxy,
    survived: Survived,
) -> None:
    """Of the dataset and of the checkpoints, while shards come and checkpoints go."""
    # Of a closed connection we may never hear: the client asks again on another one by itself if it
    # had kept it.
    sign = None if fault in ("delay", "drop") else "trying again in"
    observer = Observer(f"object store {name}", run.folder, sign)
    process = run.train(*remote)
    observer.reach(process, 6)
    some = fault not in (None, 401)
    s3_proxy.delay, s3_proxy.faults = 2.0, [fault, None] * 4 if some else []
    if not some:
        s3_proxy.always, over = fault or "drop", time.monotonic() + 5
        observer.until(process, lambda: time.monotonic() > over)
        s3_proxy.always = None
    observer.end(process)
    observer.strike(s3_proxy.first_fault)
    survived(observer, process, *ONE_BY_ONE)


ONE_BY_ONE = ("data.lanes=1", "data.window=1", "training.global_batch_size=100")
"""Settings with which a run reads one shard after another."""


@pytest.fixture
def remote(
    samestep: Samestep,
    dataset_folder: Path,
    s3_folder: str,
    s3_proxy: FaultyProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[str, ...]:
    """Settings of a run on a dataset in the store, with a cache of the shards that its processes
    read at a time, and checkpoints there.
    """
    assert samestep("data", "push", dataset_folder, f"{s3_folder}/dataset").code == 0
    s3_proxy.behave()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_proxy.url)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # of Amazon's own client, below ours
    cache = (f"data.cache={tmp_path / 'cache'}", "data.cache_size=210kB")
    return (
        f"data.path={s3_folder}/dataset",
        *cache,
        f"checkpoint.folder={s3_folder}/checkpoints",
        *ONE_BY_ONE,
    )


@LONG
def test_a_damaged_shard(
    run: Run, dataset_folder: Path, tmp_path: Path, survived: Survived
) -> None:
    """It ends the run, and when it is back the run goes on."""
    dataset = shutil.copytree(dataset_folder, tmp_path / "dataset")
    observer = Observer(
        "shard on the disk truncated, run killed and started again",
        run.folder,
        "error: .*train-000002.tar",
    )
    first = run.train(f"data.path={dataset}")
    observer.reach(first, 10)
    kill(first)
    shard = dataset / "train-000002.tar"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    observer.strike()
    refused = observer.end(run.train(f"data.path={dataset}"))
    assert refused.code == 1
    assert "train-000002.tar" in refused.message
    shard.write_bytes(content)
    survived(observer, run.train(f"data.path={dataset}"))


@LONG
def test_a_damaged_cache(
    run: Run, remote: tuple[str, ...], tmp_path: Path, survived: Survived
) -> None:
    sign = "was damaged on this disk; downloading it again"
    observer = Observer(
        "bit flipped in each cached shard, run killed and started again", run.folder, sign
    )
    first = run.train(*remote)
    observer.reach(first, 10)
    kill(first)
    for shard in (tmp_path / "cache" / "shards").glob("*.tar"):
        flip_a_bit(shard)
    observer.strike()
    survived(observer, run.train(*remote), *ONE_BY_ONE)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@LONG
def test_damaged_checkpoints(run: Run, survived: Survived) -> None:
    """The run goes on from the one before them."""
    sign = "skipping the checkpoint of step .*rank-00001.safetensors"
    name = (
        "newest checkpoint truncated, a bit flipped in the one before, run killed and started again"
    )
    observer = Observer(name, run.folder, sign)
    first = run.train()
    first.wait_for_step(run.folder, 12)
    kill(first)
    sound, flipped, torn = sorted(
        file.parent for file in run.folder.glob("checkpoints/*/COMMITTED")
    )
    observer.strike()
    os.truncate(torn / "rank-00000.safetensors", 1000)
    flip_a_bit(flipped / "rank-00001.safetensors")
    said = survived(observer, run.train())
    assert f"continuing   at step {int(sound.name.removeprefix('step-'))}" in said
    assert said.count("skipping the checkpoint of step") == 2


@LONG
@pytest.mark.parametrize("small_disk", ["8m"], indirect=True)
def test_a_full_disk(run: Run, small_disk: Path, survived: Survived) -> None:
    """Of checkpoints, metrics and ledger: the run goes on, and saves again once there is room."""
    run = replace(run, folder=small_disk / "run")
    observer = Observer(
        "disk full until a checkpoint could not be saved", run.folder, "No space left on device"
    )
    process = run.train()
    observer.reach(process, 9)
    observer.strike()
    ballast = small_disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    observer.until(process, lambda: "the next save tries again" in process.stderr.read_text())
    ballast.unlink()
    survived(observer, process)


# Numbers


@LONG
@pytest.mark.parametrize(
    ("name", "sick", "faults", "excluded"),
    [
        ("`action: skip`", {"sick": [75]}, "{action: skip}", "[[70, 80]]"),
        ("`action: rewind`", {"sick": [75]}, "{action: rewind, around: 1}", "[[60, 90]]"),
        ("once only", {"sick": [75], "passing": True}, "{action: skip}", "[]"),
    ],
)
def test_a_gradient_that_is_not_a_number(
    run: Run, name: str, sick: dict[str, Any], faults: str, excluded: str, survived: Survived
) -> None:
    """Of one of two ranks, at step 8."""
    observer = Observer(
        f"NaN in a gradient, {name}", run.folder, "recomputing it from the same batch"
    )
    process = run.train(paced(**sick), f"training.faults={faults}")
    observer.end(process)
    observer.strike(observer.when(7))
    survived(observer, process, f"data.exclude={excluded}")


@LONG
def test_a_flipped_bit(run: Run, tmp_path: Path, survived: Survived) -> None:
    """In the weights of one of two replicas.

    It is not saved, and the same command goes on from before.
    """
    name = (
        "bit flipped in the weights of one of two replicas, `verify_state_every: 2`, started again"
    )
    observer = Observer(name, run.folder, "silent corruption on rank")
    settings = (paced(flip=str(tmp_path / "flip")), "training.verify_state_every=2")
    first = run.train(*settings)
    observer.reach(first, 10)
    observer.strike()
    (tmp_path / "flip").touch()
    stopped = observer.end(first)
    assert stopped.code == 1
    assert "silent corruption on rank 0" in stopped.message
    survived(observer, run.train(*settings))
