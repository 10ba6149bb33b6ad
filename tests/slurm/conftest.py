"""Runs that are submitted to a real Slurm."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.integration.commands import Samestep
from tests.slurm.cluster import Slurm, missing, started

PACED = """
import time
from dataclasses import dataclass
from pathlib import Path
from trainer.objectives.kinds import mlm

@dataclass(frozen=True)
class Config(mlm.Config):
    def build(self, vocabulary):
        return Objective(self, vocabulary)

class Objective(mlm.MaskedLM):
    def weights(self, batch):  # called for each micro-batch
        time.sleep(0.3 if Path("slow").exists() else 0)
        return super().weights(batch)
"""
CLUSTER = """
kind: slurm
nodes: 2
interface: lo
environment: {variables: {OMP_NUM_THREADS: "1", WANDB_MODE: offline}}
"""

Launched: TypeAlias = Callable[..., str]
"""Submits a run with `samestep launch`; returns the job's id."""


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if not os.environ.get("SAMESTEP_SLURM"):
        pytest.skip("make test-slurm installs Slurm and starts one for these tests")
    if reason := missing():
        pytest.fail(reason)
    root = tmp_path_factory.mktemp("slurm")
    for folder in (root, *root.parents[:2]):
        folder.chmod(0o755)  # munge wants its socket to be reachable
    with started(root) as cluster:
        yield cluster


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that jobs are submitted from.

    A git repository with an objective of its own, and a cluster's file.
    """
    folder = tmp_path / "project"
    (folder / "own").mkdir(parents=True)
    (folder / "own" / "paced.py").write_text(PACED)
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "slow").touch()  # until a test has done to the run what it wants to
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return folder


@pytest.fixture
def launched(slurm: Slurm, project: Path, samestep: Samestep, experiment_file: str) -> Launched:
    slurm.wait_until_idle()

    def launch(*settings: str, file: str = experiment_file) -> str:
        result = samestep("launch", "cluster.yaml", file, *settings)
        assert result.code == 0, result.err
        return result.out.split(" job ")[1].split(";")[0]

    return launch
