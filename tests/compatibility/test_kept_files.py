"""Datasets, runs and exports of earlier commits, kept as files beside this one, are still read.

`write.py` has written them. A loss that differs means that a continued run is not the same run.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.compatibility import write
from tests.integration.commands import Samestep
from trainer.monitoring.jsonl import read_rows

ARCHIVES = sorted(Path(__file__).parent.glob("*.tar.xz"))


class Kept(NamedTuple):
    """The files of a commit, and what that commit has computed from them."""

    folder: Path
    expected: dict[str, Any]


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(request.param) as archive:
        archive.extractall(folder, filter="data")
    return Kept(folder, json.loads((folder / "expected.json").read_text()))


@pytest.fixture(autouse=True)
def in_a_folder(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept configurations have relative paths."""
    monkeypatch.chdir(kept.folder)


def test_the_archives_are_small() -> None:
    assert ARCHIVES
    assert sum(path.stat().st_size for path in ARCHIVES) < 300_000


def test_datasets_hold_the_same_tokens(kept: Kept, samestep: Samestep) -> None:
    for name, digest in kept.expected["datasets"].items():
        assert write.token_digest(kept.folder / "datasets" / name) == digest
        assert samestep("data", "verify", f"datasets/{name}").code == 0


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "name", ["single", "fsdp", pytest.param("ddp", marks=LONG), pytest.param("zero", marks=LONG)]
)
def test_runs_continue_with_the_same_losses(
    kept: Kept, samestep: Samestep, name: str, tmp_path: Path
) -> None:
    """On one process, whatever strategy and number of processes have written the checkpoint."""
    run = Path(shutil.copytree(kept.folder / "runs" / name, tmp_path / "run"))
    steps = f"training.steps={write.STEPS + write.MORE}"
    result = samestep("train", "experiment.yaml", f"output={run}", steps, "strategy=single")
    assert result.code == 0, result.err
    assert f"continuing   at step {write.STEPS}" in result.err
    assert "Traceback" not in result.err
    assert write.losses(run) == pytest.approx(kept.expected["losses"][name], rel=1e-6)
    verified = samestep("ledger", "verify", run)
    assert verified.code == 0, verified.out


@pytest.mark.parametrize(
    "packing",
    [pytest.param(packing, marks=() if packing == "pairs" else LONG) for packing in write.PACKINGS],
)
def test_packings_give_the_same_losses(
    kept: Kept, samestep: Samestep, packing: str, tmp_path: Path
) -> None:
    settings = [f"data.packing={packing}", *write.PAIRS * (packing == "pairs")]
    result = samestep("train", "experiment.yaml", f"output={tmp_path}/run", *settings)
    assert result.code == 0, result.err
    found = write.losses(tmp_path / "run")
    assert found == pytest.approx(kept.expected["losses"][packing], rel=1e-6)


def test_what_a_run_has_written_is_read(kept: Kept, samestep: Samestep) -> None:
    for name in write.RUNS:
        run = kept.folder / "runs" / name
        rows = list(read_rows(run / "metrics.jsonl"))
        assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
        assert samestep("checkpoint", "verify", run).code == 0
    report = kept.folder / "report.html"
    assert samestep("report", *sorted(kept.folder.glob("runs/*")), "--output", report).code == 0


@LONG
def test_exports_are_loaded(kept: Kept, samestep: Samestep, tmp_path: Path) -> None:
    logits = pytest.approx(kept.expected["logits"], rel=1e-4, abs=1e-5)
    assert write.exported_logits(kept.folder / "exported") == logits
    assert samestep("export", "runs/fsdp", tmp_path / "again").code == 0
    assert samestep("export", "runs/single", tmp_path / "single").code == 0
    assert write.exported_logits(tmp_path / "single") == logits
    start = ["init_from=exported", f"output={tmp_path}/tuned", "training.steps=1"]
    result = samestep("train", "experiment.yaml", *start, "schedule.warmup_steps=0")
    assert result.code == 0, result.err
