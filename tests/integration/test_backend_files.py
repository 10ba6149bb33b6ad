"""The experiment files of back-ends: their recipes' runs, which start."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.config import differences, load, read_tree
from tests.backend_files import STRATEGIES, TPU, small
from tests.integration.commands import Start, losses
from trainer.training.experiment import Experiment

_OF_BACK_ENDS = ("output", "accelerator", "strategy", "checkpoint.folder", "data.path")
_OF_SLICES = ("data.sources", "training.micro_batch_size", "training.preemption")


@pytest.mark.parametrize("file", [*TPU, *STRATEGIES], ids=lambda file: file.stem)
def test_only_the_back_end_differs_from_the_recipe(file: Path) -> None:
    (line,) = [line for line in file.read_text().splitlines() if line.startswith("base: ")]
    recipe, tree = read_tree(file.parent / line.removeprefix("base: ")), read_tree(file)
    allowed = (*_OF_BACK_ENDS, *(_OF_SLICES if file in TPU else ()))
    changed = differences(recipe, tree)
    assert changed
    assert not [name for name in changed if not name.startswith(allowed)]
    assert load(Experiment, file)  # every setting is valid


@pytest.mark.long
@pytest.mark.parametrize("file", STRATEGIES, ids=lambda file: file.stem)
def test_each_strategy_takes_the_steps_of_one_process(
    file: Path, dataset_folder: Path, t5_experiment: str, start: Start, tmp_path: Path
) -> None:
    sentinels = read_tree(t5_experiment)["data"]["path"]
    settings = [*small(file, str(dataset_folder), sentinels), "accelerator=cpu"]
    hsdp = ["strategy.replicas=2"] if "hsdp" in file.stem else []
    runs = {"two": [*hsdp, "--processes", "2"], "one": ["strategy=single"]}
    for name, further in runs.items():
        process = start("train", file, f"output={tmp_path / name}", *settings, *further)
        result = process.wait(240)
        assert result.code == 0, result.err
    assert len(losses(tmp_path / "one")) == 2
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
