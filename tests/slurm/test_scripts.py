"""The scripts of launch/scripts/slurm on three virtual nodes, unchanged but for their variables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from launch.scripts import FOLDER, write_slurm
from samestep.config import read_tree
from tests import waiting
from tests.backend_files import small
from tests.integration.commands import losses
from tests.slurm.cluster import NODES, Slurm

pytestmark = pytest.mark.timeout(600)
OF_THIS_CLUSTER = ("--partition=debug", "--gres=none")


def test_the_scripts_run(
    slurm: Slurm,
    dataset_folder: Path,
    t5_experiment: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slurm.wait_until_idle()
    monkeypatch.chdir(tmp_path)
    sentinels = read_tree(t5_experiment)["data"]["path"]
    on_cpus = "accelerator=cpu training.compile=false"
    variables = {"VENV": sys.prefix, "OVERRIDES": on_cpus, "OMP_NUM_THREADS": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    jobs = {}
    for script, run in write_slurm.runs().items():
        settings = small(FOLDER.parents[1] / run.experiment, str(dataset_folder), sentinels)
        replicas = ["strategy.replicas=1"] if "hsdp" in run.experiment else []
        tree = read_tree(run.experiment, [*settings, *replicas])
        experiment, output = tmp_path / f"{Path(script).stem}.yaml", tmp_path / Path(script).stem
        experiment.write_text(yaml.safe_dump(tree))
        monkeypatch.setenv("EXPERIMENT", str(experiment))
        monkeypatch.setenv("OUTPUT", str(output))
        nodes = len(NODES) if "lamb" in script else 1
        options = (*OF_THIS_CLUSTER, f"--nodes={nodes}", "--parsable")
        jobs[output] = slurm.run("sbatch", *options, str(FOLDER / script)).strip(), nodes
    for output, (job, nodes) in jobs.items():
        ended = slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", seconds=300)
        log = (tmp_path / f"{output.name}-{job}.log").read_text()
        assert ended["JobState"] == "COMPLETED", log
        assert len(losses(output)) == 2
        assert f"{nodes} x CPU" in log


def test_a_canceled_script_is_not_requeued(
    slurm: Slurm, experiment_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.wait_until_idle()
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "VENV": sys.prefix,
        "EXPERIMENT": experiment_file,
        "OUTPUT": str(tmp_path / "run"),
        "OVERRIDES": "training.steps=100000 checkpoint.every=100000 training.compile=false",
        "GLOO_SOCKET_IFNAME": "lo",
    }.items():
        monkeypatch.setenv(name, value)
    script = str(FOLDER / "slurm" / "roberta_large.sh")
    job = slurm.run("sbatch", *OF_THIS_CLUSTER, "--nodes=1", "--parsable", script).strip()
    waiting.until(lambda: max(losses(tmp_path / "run"), default=0) >= 3)
    subprocess.run(["scancel", job], check=True)
    assert slurm.wait_for(job, "CANCELLED")["Requeue"] == "1"
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))  # it had time for that
