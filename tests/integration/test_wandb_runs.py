"""What W&B is told in the life of a run that is cut, fails, hangs, skips steps, or is a trial of a
sweep.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.commands import Samestep, Start, losses
from tests.unit.monitoring.offline_wandb import (
    ended,
    offline_alerts,
    offline_records,
    offline_rows,
    offline_summary,
)
from tests.waiting import until
from trainer.monitoring import WeightsAndBiases, tensorboard, wandb

pytest.importorskip("wandb")
SWEEP = Path(__file__).parents[2] / "configs" / "sweeps" / "bert_mini.yaml"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests see no W&B account of the person who runs them, start no statistics collector, and are
    in no job.
    """
    for name in [name for name in os.environ if name.startswith(("WANDB_", "SAMESTEP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB__DISABLE_STATS", "true")


@pytest.fixture
def settings(experiment_file: str, tmp_path: Path) -> list[str]:
    """The arguments of a run in the folder `run` that W&B is told of."""
    return [
        "train",
        experiment_file,
        f"output={tmp_path / 'run'}",
        "tracking.wandb={}",
        "data.threads=0",
    ]


def starts_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_run_that_is_cut_and_requeued_is_one_run(
    start: Start,
    samestep: Samestep,
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("SAMESTEP_JOB", "42")
    monkeypatch.setenv("SAMESTEP_NODES", "n1,n2")
    process = start(*settings, "objective={kind: tests.chaos.paced, seconds: 0.3}")
    while 2 not in losses(run):
        assert process.popen.poll() is None, process.stderr.read_text()
        time.sleep(0.05)
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait().code == 75
    assert 2 <= max(losses(run)) < 12
    assert ended(run) == [0]
    assert offline_alerts(run) == []  # pre-emption is no failure
    first = json.loads((run / "wandb_run.json").read_text())["id"]
    assert offline_summary(run)["restarts"] == 0

    resumed_at = max(losses(run))
    assert samestep(*settings).code == 0
    assert ended(run) == [0]
    assert [record.run_id for record in offline_records(run, "run")] == [first]
    assert [row["_step"] for row in offline_rows(run)] == list(range(1, 13))
    facts = {"job": "42", "nodes": "n1,n2", "restarts": 1}
    assert offline_summary(run).items() >= {**facts, "loss/train_loss": losses(run)[12]}.items()
    (described,) = offline_records(run, "run")
    config = {item.key: json.loads(item.value_json) for item in described.config.update}
    assert (config["training"]["steps"], config["optimizer"]["lr"]) == (12, 1e-3)
    assert [row["restarts"] for row in starts_of(run)] == [0, 1]
    assert starts_of(run)[1].items() >= facts.items()
    (alert,) = offline_alerts(run)
    assert alert == (
        "INFO",
        "The run was started again",
        f"from step {resumed_at}; job: 42, nodes: n1,n2, restarts: 1",
    )


@pytest.mark.parametrize(
    ("tracker", "files"),
    [
        ("tensorboard", "tensorboard/*"),
        pytest.param("wandb", "wandb/offline-run-*/*.wandb", marks=pytest.mark.long),
    ],
)
def test_a_finished_run_sends_what_its_tracker_has_lost(
    samestep: Samestep, experiment_file: str, tmp_path: Path, tracker: str, files: str
) -> None:
    """At its next start, and by `samestep sync`, as after a full disk."""
    run = tmp_path / "run"
    settings = ["train", experiment_file, f"output={run}", f"tracking.{tracker}={{}}"]
    settings.append("data.threads=0")
    holds: Any = {
        "tensorboard": tensorboard.holds,
        "wandb": partial(wandb.holds, WeightsAndBiases()),
    }[tracker]
    assert samestep(*settings).code == 0
    until(lambda: holds(run), 60)
    for again in (settings, ["sync", str(run)]):
        (lost,) = run.glob(files)
        os.truncate(lost, lost.stat().st_size // 2)
        assert not holds(run)
        result = samestep(*again)
        assert result.code == 0
        assert (
            "nothing to do" in result.err or result.out == f"all of {run}/metrics.jsonl is sent\n"
        )
        assert holds(run)
        (written,) = run.glob(files)
        assert written != lost
        assert samestep(*again).code == 0
        assert list(run.glob(files)) == [written], "it has all"
    if tracker == "wandb":
        rows = [row for row in offline_rows(run) if "loss/train_loss" in row]
        assert {row["_step"]: row["loss/train_loss"] for row in rows} == losses(run)
        assert offline_summary(run)["restarts"] == 0


def test_sync_names_what_is_missing(samestep: Samestep, finished_run: Path, tmp_path: Path) -> None:
    refused = samestep("sync", tmp_path)
    assert (refused.code, "is not a run" in refused.message) == (2, True)
    refused = samestep("sync", finished_run)
    assert refused.code == 2
    assert "tracking.tensorboard and tracking.wandb are null" in refused.message


@pytest.mark.long
def test_without_a_cluster_the_node_is_this_one(
    samestep: Samestep, settings: list[str], tmp_path: Path
) -> None:
    assert samestep(*settings, "training.steps=4").code == 0
    assert ended(tmp_path / "run") == [0]
    summary = offline_summary(tmp_path / "run")
    assert (summary["nodes"], summary["restarts"]) == (platform.node(), 0)
    assert "job" not in summary
    assert "job" not in starts_of(tmp_path / "run")[0]


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_a_failure_is_told(
    start: Start, settings: list[str], tmp_path: Path, processes: int
) -> None:
    """A global batch has 10 examples: step 3 takes 20 to 29.

    Workers end at once, without Python's farewells.
    """
    sick = "objective={kind: tests.sick_objective, sick: [25]}"
    process = start(*settings, sick, "training.faults.sigma=6", "--processes", processes)
    result = process.wait()
    assert result.code == 1
    assert ended(tmp_path / "run") == [1]
    (alert,) = offline_alerts(tmp_path / "run")
    assert alert[:2] == ("ERROR", "The run has failed")
    assert alert[2].startswith(
        "step 3 was not taken: the gradient norm is nan, also when recomputed. Its examples, by "
        "loss: "
    )
    assert alert[2] == result.message.splitlines()[0]


@pytest.mark.long
def test_skipped_spike(samestep: Samestep, settings: list[str], tmp_path: Path) -> None:
    spike = [
        "objective={kind: tests.sick_objective, sick: [75], factor: 100}",
        "checkpoint.every=5",
    ]
    faults = "training.faults={action: skip, sigma: 50, window: 5}"
    assert samestep(*settings, *spike, faults).code == 0
    assert ended(tmp_path / "run") == [0]
    (alert,) = offline_alerts(tmp_path / "run")
    assert alert[:2] == ("WARN", "A step was skipped")
    assert alert[2].startswith("step 8: the gradient norm is ")

    silent = [f"output={tmp_path / 'silent'}", "tracking.wandb.alerts=false"]
    assert samestep(*settings, *spike, faults, *silent).code == 0
    assert ended(tmp_path / "silent") == [0]
    assert len(offline_rows(tmp_path / "silent")) == 12
    assert offline_alerts(tmp_path / "silent") == []


@pytest.mark.long
def test_rewind(samestep: Samestep, settings: list[str], tmp_path: Path) -> None:
    """W&B's run is opened anew then, and offline that is all that is kept."""
    sick = "objective={kind: tests.sick_objective, sick: [75]}"
    result = samestep(
        *settings, sick, "checkpoint.every=3", "training.faults={action: rewind, around: 1}"
    )
    assert result.code == 0, result.err
    assert ended(tmp_path / "run") == [0]
    (alert,) = offline_alerts(tmp_path / "run")
    text = "the gradient norm is nan; the run continues from step 6, without the examples around the fault"  # noqa: E501
    assert alert == ("WARN", "The run has gone back", text)
    assert [row["_step"] for row in offline_rows(tmp_path / "run")] == list(range(1, 13))


HANGING_OBJECTIVE = """
import os, time
from dataclasses import dataclass
from trainer.objectives.kinds import mlm

@dataclass(frozen=True)
class Config(mlm.Config):
    def build(self, vocabulary):
        return Objective(self, vocabulary)

class Objective(mlm.MaskedLM):
    step = 0

    def weights(self, batch):
        self.step += 1
        if self.step == 3 and os.environ.get("RANK", "0") == os.environ["HANGS"]:
            time.sleep(1000)
        return super().weights(batch)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("processes", "hangs", "where"),
    [
        (1, 0, "forward"),
        (2, 1, "waiting in all_reduce"),
    ],
)
def test_a_hang_is_told(
    start: Start,
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    processes: int,
    hangs: int,
    where: str,
) -> None:
    """By rank 0, whichever hangs; and it ends."""
    monkeypatch.setenv("HANGS", str(hangs))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "hanging.py").write_text(HANGING_OBJECTIVE)
    more = ["objective=own.hanging", "training.micro_batch_size=10", "training.hang_timeout=4"]
    result = start(*settings, *more, "--processes", processes).wait()
    assert result.code == 1
    assert "the run hangs: " in result.err
    assert ended(tmp_path / "run") == [1]
    (alert,) = offline_alerts(tmp_path / "run")
    assert alert[:2] == ("ERROR", "The run hangs")
    assert alert[2].startswith(f"rank 0 ({platform.node()}, pid ")
    assert where in alert[2]
    assert str(tmp_path / "run" / "stacks") in alert[2]


@pytest.mark.long
def test_sweep(
    samestep: Samestep, experiment_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B's own agent runs two trials of the sweep's file.

    Only the server that would choose them is missing.
    """
    from wandb.wandb_agent import Agent

    (tmp_path / "configs" / "debug").mkdir(parents=True)
    (tmp_path / "configs" / "debug" / "bert_mini.yaml").write_text(
        Path(experiment_file).read_text()
    )
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"),
        ("WANDB_SWEEP_ID", "sweep"),
        ("WANDB_DIR", str(tmp_path)),
        *(
            (name, "") for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH")
        ),  # which the agent sets
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_RUN_ID")
    sweep = yaml.safe_load(SWEEP.read_text())
    assert sweep["parameters"].keys() == {"optimizer.lr", "schedule.warmup_steps"}
    agent = Agent(api=None, queue=None)
    agent._sweep_command = sweep["command"]
    for trial, rate in (("trial1", 0.0005), ("trial2", 1e-05)):
        arguments = {"optimizer.lr": {"value": rate}, "schedule.warmup_steps": {"value": 2}}
        command = {"type": "run", "program": sweep["program"], "run_id": trial, "args": arguments}
        assert "exception" not in agent._process_command(command)
        assert agent._run_processes[trial].wait(100) == 0
        run = tmp_path / "runs" / "sweep" / trial
        assert ended(run) == [0]
        (described,) = offline_records(run, "run")
        assert (described.run_id, described.sweep_id) == (trial, "sweep")
        assert json.loads((run / "wandb_run.json").read_text()) == {"id": trial}
        config = {item.key: json.loads(item.value_json) for item in described.config.update}
        assert config["optimizer"]["lr"] == config["optimizer.lr"] == rate
        assert config["schedule"]["warmup_steps"] == 2
        assert [row["_step"] for row in offline_rows(run)] == list(range(1, 13))
    assert sorted(path.name for path in (tmp_path / "runs" / "sweep").iterdir()) == [
        "trial1",
        "trial2",
    ]

    # A finished trial's folder, too, which would otherwise be left as it is, and counted as this
    # trial's success.
    result = samestep("train", experiment_file, "output=runs/sweep/trial1", "tracking.wandb={}")
    assert result.code == 2
    assert "holds the W&B run trial1, and trial trial2 of a sweep" in result.message


@pytest.mark.long
def test_without_the_package_a_run_warns_and_trains(
    samestep: Samestep,
    settings: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    few = ("training.steps=2", "schedule.warmup_steps=1")
    required = samestep(*settings, *few, "tracking.wandb.required=true")
    assert required.code == 2
    assert "tracking.wandb needs the package 'wandb'" in required.message
    result = samestep(*settings, *few)
    assert result.code == 0
    assert result.err.count("tracking.wandb needs the package 'wandb'") == 1
    run = tmp_path / "run"
    assert sorted(losses(run)) == [1, 2]
    assert not (run / "wandb_run.json").exists()
    refused = samestep("sync", run)
    assert (refused.code, "pip install" in refused.message) == (2, True)
