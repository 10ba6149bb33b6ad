"""The largest micro-batch: the search exceeds the budget only by a step it could not predict."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.config import load
from samestep.errors import SamestepError
from trainer.accelerators.kinds.cpu import CpuAccelerator
from trainer.training import run
from trainer.training.compute import micro_batch
from trainer.training.compute.micro_batch import largest
from trainer.training.experiment import Experiment
from trainer.training.phases import without_probe

GIB = 2**30


class Memory:
    """A device where a pass over n examples takes fixed + n * each bytes; records the passes."""

    def __init__(self, fixed: int, each: int) -> None:
        self.fixed, self.each, self.tried = fixed, each, [0]

    def __call__(self, rows: int) -> int:
        self.tried.append(rows)
        return self.fixed + self.each * rows


@pytest.mark.parametrize("fixed", [0, GIB, 8 * GIB, 9 * GIB])
@pytest.mark.parametrize("each", [1, 10**6, 10**8, 7 * 10**8])
@pytest.mark.parametrize("most", [1, 2, 3, 100, 4096])
def test_the_largest_that_fits_is_found_without_trying_one_that_does_not(
    fixed: int, each: int, most: int
) -> None:
    memory = Memory(fixed, each)
    found = largest(memory, 10 * GIB, most)
    assert found == min(most, (10 * GIB - fixed) // each)
    assert max(memory.tried) == found
    assert len(memory.tried) <= 16


def test_a_size_that_takes_more_than_predicted_is_not_chosen() -> None:
    assert largest(lambda rows: rows if rows <= 8 else 1000, budget=100, most=64) == 8


def micro_batches(size: int, examples: int) -> int:
    return -(-examples // size)


@pytest.mark.parametrize("fixed", [0, GIB, 5 * GIB])
@pytest.mark.parametrize("each", [10**6, 10**8, 7 * 10**8])
@pytest.mark.parametrize("most", [1, 2, 3, 100, 4096])
@pytest.mark.parametrize("uncompiled", [1, 3])
def test_few_sizes_are_tried_if_each_has_to_be_compiled(
    fixed: int, each: int, most: int, uncompiled: int
) -> None:
    """A pass takes 256 MiB besides its examples. Over one example, it is not compiled."""
    tried: list[int] = []

    def peak(rows: int) -> int:
        if not rows:
            return fixed
        tried.append(rows)
        return fixed + GIB // 4 + rows * each * (uncompiled if rows == 1 else 1)

    found = largest(peak, 10 * GIB, most, sparse=True)
    fits = min(most, (10 * GIB - GIB // 4 - fixed) // each)
    assert micro_batches(found, most) == micro_batches(fits, most)
    assert tried[-1] == found  # so none was too large, and the run has its graphs
    assert len(tried) <= 5


def test_a_pass_whose_first_examples_need_no_more_memory_stays_in_the_budget() -> None:
    """Until 20 examples, something else is the peak."""
    tried = []

    def peak(rows: int) -> int:
        tried.append(rows)
        return max(30, 10 + rows) if rows else 0

    assert largest(peak, 100, 1000, sparse=True) == 84  # 12 micro-batches, as with 90
    assert max(tried) <= 90


def test_a_single_example_that_is_too_much_is_still_the_answer() -> None:
    assert largest(lambda rows: 1000 + rows, budget=10, most=64) == 1


def test_on_the_host_long_examples_come_in_small_micro_batches() -> None:
    assert [without_probe(1000, length) for length in (128, 512, 100_000)] == [32, 8, 1]
    assert without_probe(3, 128) == 3


class LimitedMemory(CpuAccelerator):
    """A CPU with the memory of a device: 1000 bytes, of which each example of a pass takes 100.

    As under FSDP2, a second pass meets whole gradients of the first.
    """

    def memory(self) -> int:  # type: ignore[override]
        return 1000

    def reset_peak_memory(self) -> None:
        self.rows = self.passes = 0

    def to_device(self, batch):  # type: ignore[no-untyped-def]
        if "tokens" in batch:
            self.rows = len(batch["tokens"])
            self.passes += 1
        return super().to_device(batch)

    def peak_memory(self) -> int:  # type: ignore[override]
        return 200 + 100 * self.rows + 100 * (self.passes > 1)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.accelerators.kinds.cpu.CpuAccelerator", LimitedMemory)


def _run(file: str, output: Path, *overrides: str) -> None:
    run.train(
        load(
            Experiment,
            file,
            [
                f"output={output}",
                "strategy=single",
                "training.steps=2",
                "schedule.warmup_steps=0",
                *overrides,
            ],
        )
    )


@pytest.mark.usefixtures("limited")
def test_auto_measures_on_the_device_and_is_recorded(experiment_file: str, tmp_path: Path) -> None:
    """Of 10 examples 7 would fit in a pass alone, and 6 beside the gradients of another."""
    _run(experiment_file, tmp_path, "training.micro_batch_size=auto")
    assert (
        '"micro_batch_sizes": [\n  6\n ]'
        in (tmp_path / "checkpoints/step-00000002/meta.json").read_text()
    )


@pytest.mark.usefixtures("limited")
def test_a_run_measures_once(
    experiment_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(experiment_file, tmp_path, "training.micro_batch_size=auto")
    kept = tmp_path / "micro_batch.json"
    assert list(json.loads(kept.read_text()).values()) == [6]
    monkeypatch.setattr("trainer.training.compute.micro_batch.probe", _run_out)
    shutil.rmtree(tmp_path / "checkpoints")  # another start, from step 0
    _run(experiment_file, tmp_path, "training.micro_batch_size=auto")
    shutil.rmtree(tmp_path / "checkpoints")
    kept.write_text("{")  # damaged
    with pytest.raises(SamestepError, match="2 GiB"):
        _run(experiment_file, tmp_path, "training.micro_batch_size=auto")


@pytest.mark.usefixtures("limited")
def test_each_phase_is_measured(experiment_file: str, tmp_path: Path) -> None:
    """Longer rows take more memory, also where phases have equal batch sizes."""
    phases = "phases=[{steps: 1, sequence_length: 16}, {steps: 1, sequence_length: 32}]"
    _run(experiment_file, tmp_path, phases, "training.micro_batch_size=auto")
    assert list(json.loads((tmp_path / "micro_batch.json").read_text()).values()) == [6, 6]


@pytest.mark.long
@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(("size", "passes"), [("3", []), ("auto", [1, 3, 5])])
def test_graphs_of_few_sizes_are_compiled(
    size: str,
    passes: list[int],
    experiment_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None of one example, and those of the size that is taken are not compiled again."""
    compilations: list[int] = []  # rows of each graph
    rows_of_passes: list[int] = []
    original = micro_batch.accumulate_gradients

    def compile_nothing(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        hidden = next(each for each in inputs if each.ndim == 3)
        compilations.append(len(hidden))
        return graph.forward

    def accumulate(*arguments: Any) -> Any:
        rows_of_passes.append(len(arguments[-1][0]["tokens"]))
        return original(*arguments)

    monkeypatch.setattr(CpuAccelerator, "compile_options", {"backend": compile_nothing})
    monkeypatch.setattr(micro_batch, "accumulate_gradients", accumulate)
    settings = [f"training.micro_batch_size={size}", "training.compile=true"]
    try:
        _run(experiment_file, tmp_path, *settings, "training.evaluate_every=null")
    finally:
        torch.compiler.reset()
    assert rows_of_passes == passes
    # A layer that computes all positions, and the last one.
    assert compilations == [rows for rows in passes[1:] or [3] for _ in range(2)]


def test_measuring_changes_nothing(
    experiment_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights after two steps are equal to a run's without measuring."""
    _run(experiment_file, tmp_path / "without", "training.micro_batch_size=5")
    monkeypatch.setattr("trainer.accelerators.kinds.cpu.CpuAccelerator", LimitedMemory)
    _run(experiment_file, tmp_path / "with", "training.micro_batch_size=5")
    name = "checkpoints/step-00000002/rank-00000.safetensors"
    assert (tmp_path / "without" / name).read_bytes() == (tmp_path / "with" / name).read_bytes()


def _run_out(*_: object) -> None:
    raise torch.OutOfMemoryError("tried to allocate 2 GiB")


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["training.micro_batch_size=9"], "set training.micro_batch_size=6 (it is 9"),
        (
            ["phases=[{steps: 1, micro_batch_size: 8}, {steps: 1}]"],
            "set phases.0.micro_batch_size=6 (it is 8",
        ),
    ],
)
def test_when_memory_runs_out_a_size_that_fits_is_named(
    experiment_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    fix: str,
) -> None:
    monkeypatch.setattr("trainer.training.loop.Trainer.train_step", _run_out)
    with pytest.raises(SamestepError, match=re.escape(fix)):
        _run(experiment_file, tmp_path, *overrides)


def test_when_not_even_one_example_fits_the_rest_is_named(
    experiment_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.training.compute.micro_batch.probe", _run_out)
    monkeypatch.setattr("trainer.accelerators.kinds.cpu.CpuAccelerator", LimitedMemory)
    with pytest.raises(
        SamestepError, match=r"2 GiB; set training\.activation_checkpointing=true, or use more"
    ):
        _run(experiment_file, tmp_path)
