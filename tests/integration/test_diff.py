"""`samestep diff`: the first step, and there the first tensor, in which two runs differ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.commands import Result, Samestep
from trainer.inspect.replay.difference import Difference, first_difference
from trainer.strategies import Strategy

BITWISE = (
    "strategy=single",
    "training.exact=bitwise",
    "training.micro_batch_size=5",
    "accelerator={kind: cpu, threads: 1}",
)
TENSOR = "layers.1.ffn.down.weight"


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "digests.jsonl").read_text().splitlines()
    return [{**json.loads(line), "time": 0} for line in lines]


@contextmanager
def flipped_bit(step: int, tensor: str = TENSOR, bit: int = 20) -> Iterator[None]:
    """Flips a bit of an element of a weight after a step's update, in this process."""
    update, taken, times = Strategy.step, 0, 1

    def faulty(self: Strategy, optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> None:
        nonlocal taken, times
        update(self, optimizer, norm)
        taken += 1
        if taken == step and times:
            times -= 1
            self.parameters[tensor].detach().view(torch.int32).view(-1)[7] ^= 1 << bit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Strategy, "step", faulty)
        yield


@pytest.fixture
def train(samestep: Samestep, experiment_file: str, tmp_path: Path):  # type: ignore[no-untyped-def]
    def run(name: str, *overrides: str) -> Path:
        result = samestep(
            "train", experiment_file, f"output={tmp_path / name}", *BITWISE, *overrides
        )
        assert result.code == 0, result.err
        return tmp_path / name

    return run


def compared(samestep: Samestep, *arguments: object) -> Result:
    result = samestep("diff", *arguments)
    assert not result.err.count("error: "), result.err
    return result


@pytest.mark.long
def test_equal_runs(train: Any, samestep: Samestep) -> None:
    """Another strategy, more evaluations, and rows in other steps."""
    one = train("one", "training.digest_every=2")
    two = train("two", "training.digest_every=3", "strategy=fsdp", "training.evaluate_every=5")
    result = compared(samestep, one, two)
    assert result.code == 0
    assert "setting     strategy.kind: single -> fsdp" in result.out
    assert "equal       in all rows that both have, up to step 12" in result.out


@pytest.mark.long
def test_names_the_tensor_of_a_flipped_bit(train: Any, samestep: Samestep) -> None:
    one = train("one", "training.digest_every=1", "checkpoint.every=4", "checkpoint.keep_last=9")
    with flipped_bit(7):
        two = train(
            "two", "training.digest_every=1", "checkpoint.every=4", "checkpoint.keep_last=9"
        )
    result = compared(samestep, one, two)
    assert result.code == 1
    assert "equal       up to step 6\n" in result.out
    assert f"step 7: the state after the update: model/{TENSOR} (1 of " in result.out
    assert f"recomputed  steps 5 to 7 of {one}: as in the run" in result.out
    assert f"recomputed  steps 5 to 7 of {two}: NOT as in the run" in result.out
    assert f"{two} had a fault after step 6, up to step 7" in result.out


@pytest.mark.long
def test_norms_name_the_step_between_rows(train: Any, samestep: Samestep) -> None:
    one = train("one", "training.digest_every=4", "checkpoint.every=4", "checkpoint.keep_last=9")
    with flipped_bit(6):
        two = train(
            "two", "training.digest_every=4", "checkpoint.every=4", "checkpoint.keep_last=9"
        )
    result = compared(samestep, one, two)
    assert "equal       up to step 4\n" in result.out
    assert "different   step 7: the norm of the gradient\n" in result.out
    assert f"recomputed  steps 5 to 7 of {two}: NOT as in the run" in result.out
    assert f"{two} had a fault after step 4, up to step 7" in result.out


@pytest.mark.long
def test_another_setting_is_recomputed_and_named(train: Any, samestep: Samestep) -> None:
    one = train("one", "training.digest_every=6")
    two = train("two", "training.digest_every=6", "data.exclude=[[13, 14]]")
    result = compared(samestep, one, two)
    assert result.code == 1
    assert "setting     data.exclude: [] -> [[13, 14]]" in result.out
    assert "different   step 2: the norm of the gradient" in result.out
    assert result.out.count(": as in the run") == 2
    assert "recomputed, the runs first differ in step 2: the examples of the batch" in result.out


@pytest.mark.long
def test_rows_are_cut_back_by_a_restart(train: Any, experiment_file: str, tmp_path: Path) -> None:
    settings = ("training.digest_every=2", "checkpoint.every=5", "checkpoint.keep_last=9")
    whole = train("whole", *settings)
    resumed = train("resumed", *settings)
    for step in (10, 12):
        shutil.rmtree(resumed / "checkpoints" / f"step-{step:08}")
    train("resumed", *settings)
    ends = [{**row, "norms": row["norms"][-1:]} for row in rows(whole)]
    assert [{**row, "norms": row["norms"][-1:]} for row in rows(resumed)] == ends
    assert (resumed / "ledger.jsonl").read_text().count('"state"') == 6
    heads = [
        [json.loads(line)["head"] for line in (run / "ledger.jsonl").read_text().splitlines()]
        for run in (whole, resumed)
    ]
    assert heads[0] == heads[1]


@pytest.mark.long
def test_why_nothing_was_recomputed(train: Any, samestep: Samestep) -> None:
    ordinary = ("training.exact=tolerance", "training.digest_every=4")
    one, two = train("one", *ordinary), train("two", *ordinary, "seed=1")
    result = compared(samestep, one, two)
    assert result.code == 1
    assert "nothing was recomputed: training.exact is tolerance" in result.out
    exact = train("three", "training.digest_every=4")
    with flipped_bit(10):
        faulty = train("four", "training.digest_every=4")
    result = compared(samestep, exact, faulty, "--steps", 5)
    assert "different   step 11: the norm of the gradient\n" in result.out
    assert "Use --steps 11 to recompute these" in result.out


@pytest.mark.long
def test_wrong_input(
    train: Any, samestep: Samestep, finished_run: Path, experiment_file: str, tmp_path: Path
) -> None:
    one = train("one", "training.digest_every=6")
    assert samestep("diff", one, finished_run).message.endswith("training.digest_every=10.")
    assert "is not a run" in samestep("diff", one, tmp_path).message
    other = train("other", "training.digest_every=6", "optimizer.kind=lamb")
    narrow = train("narrow", "training.digest_every=6", "model.layers=1")
    assert "training.digest_every=6" not in samestep("diff", one, other).out
    assert "only one has " in samestep("diff", one, narrow).message
    assert "--steps is -1" in samestep("diff", one, other, "--steps", -1).message
    result = samestep("train", experiment_file, f"output={tmp_path}/x", "training.digest_every=0")
    assert "digest_every" in result.message


def test_the_first_stage_that_differs() -> None:
    state = {"a": "1", "b": "2"}
    row = {"batch": "x", "loss": 1.0, "norms": [3.0, 4.0], "gradients": state, "state": state}
    changed = {**row, "gradients": {"a": "7", "b": "8"}, "state": {"a": "1", "b": "9"}}
    assert first_difference({2: row}, {2: row}) is None
    found = first_difference({2: row, 4: row}, {2: row, 4: changed, 6: row})
    assert found == Difference(2, 4, "gradients", ("b", "a"), 0)
    loss = {**changed, "loss": np.nextafter(1.0, 2)}
    assert first_difference({4: row}, {4: loss}) == Difference(0, 4, "loss")
    norms = {**loss, "norms": [3.5, 4.0]}
    assert first_difference({4: row}, {4: norms}) == Difference(0, 3, "norm")
    # A row after a restart has norms of the steps since then only.
    assert first_difference({4: row}, {4: {**row, "norms": [4.0]}}) is None
    assert first_difference({4: row}, {4: {**row, "loss": float("nan")}}) is not None
    broken = {**row, "loss": float("nan")}
    assert first_difference({4: broken}, {4: broken}) is None


@pytest.mark.chaos
def test_one_bit_in_a_thousand_steps(train: Any, samestep: Samestep) -> None:
    """Any bit of any weight, after any step: found with at most ten recomputed steps."""
    chance = np.random.default_rng()
    settings = (
        *("training.steps=1000", "training.digest_every=1", "training.log_every=100"),
        *("checkpoint.every=10", "checkpoint.keep_last=200", "checkpoint.asynchronous=false"),
    )
    one = train("one", *settings)
    tensors = [name for name in rows(one)[0]["state"] if name.startswith("model/")]
    tensor = chance.choice(tensors)
    step, bit = int(chance.integers(1, 1000)), int(chance.integers(23))
    with flipped_bit(step, tensor.removeprefix("model/"), bit):
        two = train("two", *settings)
    result = compared(samestep, one, two, "--steps", 10)
    where = f"{tensor}, bit {bit}, step {step}: {result.out}"
    assert f"different   step {step}: the state after the update: {tensor} (1 of " in result.out, (
        where
    )
    assert f"{two} had a fault after step {step - 1}, up to step {step}" in result.out, where
