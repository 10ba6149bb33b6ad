"""The largest micro-batch: the search exceeds the budget only by a step it could not predict."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from trainer.accelerators.cpu import CpuAccelerator
from trainer.config import load
from trainer.errors import SamestepError
from trainer.training import run
from trainer.training.experiment import Experiment
from trainer.training.micro_batch import largest, without_probe

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
    monkeypatch.setattr("trainer.accelerators.cpu.CpuAccelerator", LimitedMemory)


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
    monkeypatch.setattr("trainer.training.micro_batch.probe", _run_out)
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


def test_measuring_changes_nothing(
    experiment_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights after two steps are equal to a run's without measuring."""
    _run(experiment_file, tmp_path / "without", "training.micro_batch_size=5")
    monkeypatch.setattr("trainer.accelerators.cpu.CpuAccelerator", LimitedMemory)
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
    monkeypatch.setattr("trainer.training.micro_batch.probe", _run_out)
    monkeypatch.setattr("trainer.accelerators.cpu.CpuAccelerator", LimitedMemory)
    with pytest.raises(
        SamestepError, match=r"2 GiB; set training\.activation_checkpointing=true, or use more"
    ):
        _run(experiment_file, tmp_path)
