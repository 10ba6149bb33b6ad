"""Jobs on this machine, and the look at a run before it is submitted anywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.commands import Result, Samestep, losses

PACED = """
import time
from dataclasses import dataclass
from trainer.objectives.kinds import mlm

@dataclass(frozen=True)
class Config(mlm.Config):
    def build(self, vocabulary):
        time.sleep(0)
        return Objective(self, vocabulary)

class Objective(mlm.MaskedLM):
    def weights(self, batch):  # called for each micro-batch
        time.sleep(0.2)
        return super().weights(batch)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a project"
    (folder / "own").mkdir(parents=True)
    (folder / "own" / "slow.py").write_text(PACED)
    (folder / "local.yaml").write_text(
        "kind: local\nprocesses: 2\nenvironment: {variables: {OMP_NUM_THREADS: '1'}}\n"
    )
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return folder


@pytest.mark.long
def test_followed_to_the_end(
    project: Path, samestep: Samestep, experiment_file: str, finished_run: Path
) -> None:
    result = samestep("launch", "local.yaml", experiment_file, "output=run", "--follow")
    assert result.code == 0, result.err
    assert result.out.startswith("submitted run as local job local-")
    assert "step 12/12" in result.out
    assert result.out.endswith(": done\n")
    assert losses(project / "run") == pytest.approx(losses(finished_run), rel=1e-5)
    kept = project / "run" / "launch" / "001"
    assert sorted(path.name for path in kept.iterdir()) == [
        *("cluster.yaml", "code", "commit", "config.yaml", "exit", "job.log", "job.sh", "logs")
    ]
    texts = {path.name: path.read_text() for path in (kept / "logs").iterdir()}
    assert sorted(texts) == ["rank-00000.log", "rank-00001.log"]
    assert "INFO trainer.monitoring.progress: step 12/12" in texts["rank-00000.log"]
    job = json.loads((project.parent / "state" / "samestep" / "jobs.jsonl").read_text())["id"]
    for named in (job, "run"):
        assert samestep("logs", named).out == (kept / "job.log").read_text()
    listed = samestep("jobs").out.splitlines()
    assert listed[1].split()[:4] == [job, "local", "done", "12/12"]
    again = samestep("launch", "local.yaml", experiment_file, "output=run", "--follow")
    assert "nothing to do" in again.out
    assert (project / "run" / "launch" / "002").exists()


@pytest.mark.long
def test_a_run_that_fails(project: Path, samestep: Samestep, experiment_file: str) -> None:
    wrong = "        raise ConfigError('no such weights')\n"
    text = (
        PACED.replace("        time.sleep(0.2)\n", wrong)
        + "\nfrom samestep.errors import ConfigError\n"
    )
    (project / "own" / "slow.py").write_text(text)
    result = samestep(
        "launch", "local.yaml", experiment_file, "output=run", "objective=own.slow", "--follow"
    )
    assert result.code == 1
    assert "no such weights" in result.out
    assert result.out.endswith(": failed\n")


@pytest.mark.long
def test_cancelled(project: Path, samestep: Samestep, experiment_file: str) -> None:
    """It runs the code of the moment of submission, and a checkpoint comes first."""
    arguments = (
        "launch",
        "local.yaml",
        experiment_file,
        "output=run",
        "objective=own.slow",
        "training.steps=500",
    )
    assert samestep(*arguments).code == 0
    (project / "own" / "slow.py").write_text("raise SystemExit('edited meanwhile')")
    run, until = project / "run", time.monotonic() + 60
    while not losses(run):
        assert time.monotonic() < until, samestep("logs", "run").out
        time.sleep(0.1)
    (project / "own" / "slow.py").write_text(PACED)
    assert "(running) works on run already" in samestep(*arguments).message
    assert samestep("jobs").out.splitlines()[1].split()[2] == "running"
    assert samestep("cancel", "run").code == 0
    while samestep("jobs").out.splitlines()[1].split()[2] == "running":
        assert time.monotonic() < until
        time.sleep(0.1)
    assert samestep("jobs").out.splitlines()[1].split()[2] == "stopped"
    assert (run / "checkpoints" / f"step-{max(losses(run)):08d}" / "COMMITTED").exists()
    assert "has ended already" in samestep("cancel", "run").message


@pytest.mark.parametrize(
    ("overrides", "devices", "message"),
    [
        ([], "11", "global_batch_size 10 is less than the 11 data-parallel devices"),
        ([], "2,11", "less than the 11"),
        (
            ["strategy={kind: fsdp, replicas: 3}"],
            "4",
            "strategy.replicas 3 does not divide the 4 devices. Use one of [1, 2, 4]",
        ),
        (
            ["strategy={kind: xla_spmd, replicas: 3}"],
            "4",
            "strategy.replicas 3 does not divide the 4 devices",
        ),
        (["strategy=single"], "2", "strategy single runs in one process, and there are 2"),
        (["data.path=nowhere"], "2", "nowhere holds no finished dataset"),
        (["data.sequence_length=64"], "2", "is over the model's position table of 32"),
        (["model.vocab_size=100"], "2", "set model.vocab_size to 600 or more"),
        (["objective=causal_lm"], "2", "needs next_tokens, and the model, bert, offers"),
        (["data.lanes=100000"], "2", "lanes"),
        (
            ["strategy={kind: fsdp, replicas: 4}"],
            "4,6,8",
            "strategy.replicas 4 does not divide the 6 devices",
        ),
        (
            ["init_from=nowhere"],
            "2",
            "nowhere is neither a run (with checkpoints), nor a checkpoint",
        ),
        (
            ["checkpoint.folder=/proc/run"],
            "2",
            "cannot write in /proc, which checkpoint.folder=/proc/run needs",
        ),
        (["training.evaluate_every=4", "output=/proc/run"], "2", "cannot write in /proc"),
        ([], "none", "--devices is none. Use numbers of at least 1, such as 8 or 8,64, or here"),
        ([], "0", "--devices is 0. Use numbers of at least 1, such as 8 or 8,64, or here"),
    ],
)
def test_what_would_keep_a_run_from_starting(
    samestep: Samestep,
    experiment_file: str,
    tmp_path: Path,
    overrides: list[str],
    devices: str,
    message: str,
) -> None:
    output = [f"output={tmp_path / 'run'}"] * ("output=" not in "".join(overrides))
    result = samestep("config", experiment_file, "--devices", devices, *output, *overrides)
    assert result.code in (1, 2)
    assert message in result.message
    assert not (tmp_path / "run").exists()


def test_a_run_that_could_start(samestep: Samestep, experiment_file: str, tmp_path: Path) -> None:
    settings = [f"output={tmp_path / 'run'}", "training.evaluate_every=4"]
    result = samestep("config", experiment_file, "--devices", "1,2,here", *settings)
    assert result.code == 0, result.err
    assert "micro_batch_size: 4" in result.out
    assert not os.listdir(tmp_path)


def test_weights_to_start_from(
    samestep: Samestep, experiment_file: str, finished_run: Path, tmp_path: Path
) -> None:
    def start(run: Path, weights: Path) -> Result:
        return samestep(
            "config", experiment_file, "--devices", "2", f"output={run}", f"init_from={weights}"
        )

    *_, step = sorted((finished_run / "checkpoints").glob("step-*"))
    for weights in (finished_run, step):
        assert start(tmp_path / "run", weights).code == 0
    copy = tmp_path / "copy"
    shutil.copytree(finished_run, copy)
    (content, *_) = (copy / "checkpoints" / step.name).glob("*.safetensors")
    content.write_bytes(b"cut short")
    assert "is damaged: it has 9 bytes" in start(tmp_path / "run", content.parent).message
    for committed in (copy / "checkpoints").glob("*/COMMITTED"):
        committed.unlink()
    assert "has no checkpoint yet" in start(tmp_path / "run", copy).message
    assert start(finished_run, copy).code == 0  # goes on from its own
    (tmp_path / "config.json").write_text("{}")
    assert "has neither model.safetensors nor" in start(tmp_path / "run", tmp_path).message


def test_a_bucket_for_checkpoints(
    samestep: Samestep, experiment_file: str, tmp_path: Path, s3_folder: str
) -> None:
    checked = ("config", experiment_file, "--devices", "2", f"output={tmp_path / 'run'}")
    assert samestep(*checked, f"checkpoint.folder={s3_folder}").code == 0
    assert "no-bucket" in samestep(*checked, "checkpoint.folder=s3://no-bucket/run").message
    assert samestep(*checked, "checkpoint.folder=s3://no-bucket/run", "--elsewhere").code == 0


def test_folders_of_other_machines_are_not_looked_at(
    samestep: Samestep, experiment_file: str
) -> None:
    elsewhere = ["output=/proc/run", "data.path=/not/here", "init_from=/not/here", "--elsewhere"]
    assert samestep("config", experiment_file, "--devices", "2", *elsewhere).code == 0
    assert (
        "less than the 11"
        in samestep("config", experiment_file, "--devices", "11", *elsewhere).message
    )
    task = Path(experiment_file).with_name("task.yaml")  # whose model is that of weights elsewhere
    task.write_text(Path(experiment_file).read_text().replace("kind: bert, vocab_size: 600,", ""))
    there = samestep("config", task, "--devices", "2", *elsewhere)
    assert there.code == 0, there.err
    assert "width: 32" in there.out
    assert "less than the 11" in samestep("config", task, "--devices", "11", *elsewhere).message
    assert "/not/here" in samestep("config", task, *elsewhere[:-1]).message
