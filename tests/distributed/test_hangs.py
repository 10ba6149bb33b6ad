"""Runs that hang end soon, and one line says which rank it was and where; slow ones go on."""

from __future__ import annotations

import logging
import os
import pickle
import re
from pathlib import Path

import pytest

from samestep.config import load
from tests.processes import run_ranks
from trainer.training.experiment import Experiment
from trainer.training.run import train as train_run

TIMEOUT = 4.0


def train(file: str, folder: str, overrides: list[str]) -> None:
    handler = logging.FileHandler(f"{folder}/log-{os.environ['RANK']}")
    logging.basicConfig(handlers=[handler], level=logging.ERROR, force=True)
    train_run(load(Experiment, file, [f"output={folder}/run", *overrides]))


def train_to_the_end(ranks: int, file: str, folder: Path, *overrides: str) -> str:
    """Runs an experiment that fails; returns what its ranks have said."""
    settings = ["training.micro_batch_size=10", *overrides]
    with pytest.raises(AssertionError) as failure:
        run_ranks(ranks, train, file, str(folder), settings)
    return str(failure.value) + "".join(
        (folder / f"log-{rank}").read_text() for rank in range(ranks)
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("mishap", "ranks", "strategy", "line"),
    [
        (
            "data hang",
            2,
            "ddp",
            r"rank 1 .*: \d+ s in data fetch of step \d; 1 other waiting in all_reduce of step ",
        ),
        (
            "loss hangs",
            2,
            "ddp",
            r"rank 1 \(.*, pid \d+\): \d+ s in forward of step 3; 1 other in backward of step 3;",
        ),
        pytest.param(
            "stops",
            2,
            "fsdp",
            r"rank 1 .*: no sign of life for \d+ s, at last .* of step [23]; 1 other waiting in ",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_line_names_the_rank(
    mishap: str, ranks: int, strategy: str, line: str, experiment_file: str, tmp_path: Path
):
    objective = f"objective={{kind: tests.distributed.mishaps, mishap: {mishap}, slow: 1.0}}"
    timeout = f"training.hang_timeout={TIMEOUT}"
    said = train_to_the_end(
        ranks, experiment_file, tmp_path, objective, timeout, f"strategy={strategy}"
    )
    assert said.count("the run hangs") == 1
    assert re.search(line, said), said
    alive = [rank for rank in range(ranks) if rank != 1 or mishap != "stops"]
    files = {f"rank-{rank}.txt" for rank in alive} | {f"collectives-{rank}" for rank in alive}
    assert {file.name for file in (tmp_path / "run" / "stacks").iterdir()} == files
    dump = (tmp_path / "run" / "stacks" / "collectives-0").read_bytes()
    recorded = pickle.loads(dump)  # noqa: S301
    assert "gloo:all_reduce" in {entry["profiling_name"] for entry in recorded["entries"]}
    if "hang" in mishap:
        assert "time.sleep(FOREVER)" in (tmp_path / "run" / "stacks" / "rank-1.txt").read_text()
