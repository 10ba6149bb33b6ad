"""A shard whose bytes have changed, through the command line.

The run stops, or passes over it and can prove that.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.commands import Samestep, Start, losses

SHARD = "train-000002.tar"


@pytest.fixture
def corrupt(dataset_folder: Path, experiment_file: str, samestep: Samestep, tmp_path: Path) -> Path:
    """A dataset of which a shard has changed after a run has counted its examples."""
    folder = Path(shutil.copytree(dataset_folder, tmp_path / "dataset"))
    one_step = ("training.steps=1", "schedule.warmup_steps=0")
    assert (
        samestep(
            "train", experiment_file, f"output={tmp_path}/first", f"data.path={folder}", *one_step
        ).code
        == 0
    )
    content = bytearray((folder / SHARD).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / SHARD).write_bytes(content)
    return folder


def fed(run: Path) -> list[str]:
    rows = map(json.loads, (run / "ledger.jsonl").read_text().splitlines())
    return [row["digest"] for row in rows if row["kind"] == "fed"]


@pytest.mark.long
def test_a_run_passes_over_it_wherever_it_is_resumed(
    samestep: Samestep,
    start: Start,
    experiment_file: str,
    dataset_folder: Path,
    corrupt: Path,
    tmp_path: Path,
) -> None:
    train = ("train", experiment_file, f"data.path={corrupt}", "schedule.warmup_steps=0")
    skip = (*train, "data.on_corrupt=skip")
    whole, cut, two = (tmp_path / name for name in ("whole", "cut", "two"))
    both = start(*skip, f"output={two}", "--processes", 2)
    stopped = samestep(*train, f"output={tmp_path}/stopped")
    assert stopped.code == 1
    assert f"{SHARD} is truncated or damaged" in stopped.message
    assert samestep(*skip, f"output={whole}").code == 0
    for steps in (6, 12):
        assert (
            samestep(*skip, f"output={cut}", f"training.steps={steps}", "data.threads=0").code == 0
        )
    assert both.wait().code == 0
    assert fed(whole) == fed(cut) == fed(two)
    assert losses(two) == pytest.approx(losses(whole), rel=1e-5)

    for dataset in (corrupt, dataset_folder):  # even where the shard has been put right since
        proven = samestep("ledger", "verify", cut, f"data.path={dataset}")
        assert proven.code == 0, proven.out
        assert (
            f"examples 0 and later that are in {SHARD} of data order 0 (its bytes have changed"
            in proven.out
        )
    found = json.loads(samestep("ledger", "step", cut, 3, "--json").out)["examples"]
    assert len(found) == 10
    unknown = sum(not example["documents"] for example in found)
    replayed = samestep("replay", cut, 3, "--json")
    assert len(json.loads(replayed.out)["examples"]) == 10 - unknown


ONE_BY_ONE = ("data.lanes=1", "data.window=1", "training.global_batch_size=40", "seed=2")
"""Settings with which a run opens its shards one after another, and this one late."""


@pytest.mark.long
def test_the_last_step_is_saved_before_it_ends_the_run(
    samestep: Samestep, experiment_file: str, dataset_folder: Path, corrupt: Path, tmp_path: Path
) -> None:
    train = ("train", experiment_file, *ONE_BY_ONE, "training.steps=9", "data.threads=0")
    run = tmp_path / "run"
    stopped = samestep(*train, f"output={run}", f"data.path={corrupt}")
    assert stopped.code == 1
    assert SHARD in stopped.message
    last = max(losses(run))
    assert 0 < last < 8
    assert f"saved        step {last}, as an error ends the run" in stopped.err
    continued = samestep(*train, f"output={run}", f"data.path={dataset_folder}")
    assert continued.code == 0
    assert f"continuing   at step {last}" in continued.err
    assert samestep(*train, f"output={tmp_path}/whole", f"data.path={dataset_folder}").code == 0
    assert losses(run) == losses(tmp_path / "whole")


@pytest.mark.chaos
def test_all_ranks_save_a_step_before_an_error_ahead(
    start: Start, experiment_file: str, corrupt: Path, tmp_path: Path
) -> None:
    """One of them has batches that are ready when it finds the error."""
    paced = "objective={kind: tests.chaos.paced, seconds: 0.4}"
    train = ("train", experiment_file, *ONE_BY_ONE, paced, "data.prefetch=3", "--processes=2")
    run = tmp_path / "run"
    stopped = start(*train, f"output={run}", f"data.path={corrupt}", "training.micro_batch_size=20")
    result = stopped.wait()
    assert result.code == 1
    assert SHARD in result.message
    last = max(losses(run))
    assert (run / "checkpoints" / f"step-{last:08d}" / "COMMITTED").exists()
