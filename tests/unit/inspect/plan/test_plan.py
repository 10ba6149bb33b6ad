"""The plan of an experiment: what fits, what is refused, and what the command prints."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samestep.config import load
from tests.integration.commands import Samestep
from trainer.inspect.plan.plan import STRATEGIES, Planner, memory_of_run
from trainer.inspect.plan.strategies import Collective
from trainer.inspect.plan.trace import Activations, Step
from trainer.training.compute.micro_batch import SHARE
from trainer.training.experiment import Experiment


@pytest.fixture(scope="module")
def planner(experiment_file: str) -> Planner:
    overrides = ["training.micro_batch_size=auto", "training.global_batch_size=256"]
    experiment = load(Experiment, experiment_file, overrides)
    return Planner(experiment, experiment.resolved_phases()[0], 4, Step(experiment, on_cpu=True))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_the_largest_micro_batch_fits(planner: Planner, strategy: str) -> None:
    whole = planner.plan(strategy, memory=2**40)
    assert (whole.micro_batch, whole.micro_batches, whole.largest) == (64, 1, 64)
    memory = whole.held.total // 2
    half = planner.plan(strategy, memory)
    assert 0 < half.micro_batch < 64
    assert half.micro_batch * half.micro_batches >= 64
    assert half.held.total <= SHARE * memory
    assert planner.plan(strategy, memory=1000).largest == 0


def test_a_single_example_is_traced_only_where_the_whole_batch_does_not_fit(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, activations = list[int](), Planner._activations

    def trace(self: Planner, size: int, fused: bool) -> Activations:
        sizes.append(size)
        return activations(self, size, fused)

    monkeypatch.setattr(Planner, "_activations", trace)
    whole = planner.plan("ddp", memory=2**40)
    assert set(sizes) == {64}
    planner.plan("ddp", whole.held.total // 2)
    assert 1 in sizes


def test_a_line_says_what_is_done_before_torch_is_imported() -> None:
    code = """
import logging, sys
from samestep.cli import main

class First(logging.Handler):
    def emit(self, record):
        sys.exit(f"{record.getMessage()} {'torch' in sys.modules}")

logging.getLogger("trainer").addHandler(First())
main(["plan", "x.yaml", "--devices", "1"])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = "planning x.yaml: its steps run on tensors without memory False\n"
    assert result.stderr.endswith(said)


def test_gradients_of_several_micro_batches_are_whole_under_fsdp(planner: Planner) -> None:
    one, several = planner.plan("fsdp", memory=2**40), planner.plan("fsdp")
    assert several.micro_batches == 64
    assert several.held.gradients == pytest.approx(one.held.gradients * 5, rel=0.01)
    gathered = [{each.kind: each.nbytes for each in plan.exchanged} for plan in (one, several)]
    assert gathered[1]["all-gather"] == 64 * gathered[0]["all-gather"]
    assert gathered[1]["reduce-scatter"] == gathered[0]["reduce-scatter"]


def test_each_stage_of_zero_holds_less(planner: Planner) -> None:
    held = [planner.plan(f"zero{stage}").held for stage in (1, 2, 3)]
    assert held[0].gradients > held[1].gradients == held[2].gradients
    assert held[0].optimizer == held[1].optimizer == held[2].optimizer
    assert held[0].optimizer == pytest.approx(
        planner.plan("fsdp").held.optimizer, rel=0.01
    )  # whole rows there


def test_a_ring_sends_each_part_to_each_other() -> None:
    assert Collective("all-gather", 800, 4).sent == 600
    assert Collective("all-reduce", 800, 4).sent == 1200


def test_the_command_prints_json(samestep: Samestep, experiment_file: str) -> None:
    arguments = [
        "plan",
        experiment_file,
        "--devices",
        4,
        "--memory",
        "1GiB",
        "--json",
        "model.layers=1",
    ]
    result = samestep(*arguments)
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    (phase,) = found["phases"]
    assert [plan["strategy"] for plan in phase["plans"]] == list(STRATEGIES)
    for plan in phase["plans"]:
        held = plan["bytes"]
        peak = (
            held["state"]
            + held["gradients"]
            + max(held["activations"] + held["buffers"], held["update"])
        )
        assert held["total"] == peak
        assert plan["largest_micro_batch"] == math.ceil(
            10 / (1 if plan["strategy"] == "single" else 4)
        )


@pytest.mark.long
def test_bert_large_is_planned_without_scores_where_attention_is_fused(samestep: Samestep) -> None:
    layers, rows = 2, 8
    command = [
        *("plan", "configs/pretrain/bert_large_lamb.yaml", "--devices", 1, "--strategy", "single"),
        *(f"model.layers={layers}", f"training.micro_batch_size={rows}", "--json"),
    ]

    def planned(*settings: str) -> int:
        result = samestep(*command, *settings)
        assert result.code == 0, result.err
        phase = json.loads(result.out)["phases"][-1]
        assert phase["sequence_length"] == 512
        activations: int = phase["plans"][0]["bytes"]["activations"]
        return activations

    fused, unfused = planned(), planned("accelerator={kind: cuda, fused_attention: false}")
    assert planned("accelerator=cuda") == fused  # which a plan assumes
    # Of each layer, probabilities and the dropout's factors in fp32, and their product in bf16.
    scores = rows * 16 * 512 * 512
    assert unfused - fused == pytest.approx(layers * scores * (4 + 4 + 2), rel=0.2)


def test_several_numbers_of_devices_are_planned_one_after_the_other(
    samestep: Samestep, experiment_file: str
) -> None:
    command = ("plan", experiment_file, "--strategy", "ddp", "model.layers=1", "--devices")
    found = json.loads(samestep(*command, "2,5", "--json").out)
    assert [each["devices"] for each in found] == [2, 5]
    assert [each["phases"][0]["plans"][0]["micro_batch"] for each in found] == [4, 2]
    assert "--devices is 2;5. Use numbers" in samestep(*command, "2;5").message


@pytest.mark.long
def test_each_number_of_devices_has_its_table_and_its_time(
    samestep: Samestep, experiment_file: str
) -> None:
    command = ("plan", experiment_file, "--strategy", "ddp", "model.layers=1")
    shown = " ".join(samestep(*command, "--devices", "2,5").out.split())
    parts = [f"{part} {count} devices" for count in (2, 5) for part in ("a step on", "With")]
    assert sorted(parts, key=shown.index) == parts


def test_the_table_names_what_it_shows(samestep: Samestep, experiment_file: str) -> None:
    named = ["--strategy", "zero2", "fsdp", "--memory", "100KiB"]
    result = samestep("plan", experiment_file, "--devices", 2, *named, "model.layers=1")
    assert result.code == 0, result.err
    (heading,) = (line for line in result.out.splitlines() if "params" in line)
    assert heading.split() == [
        "batch",
        "params",
        "grads",
        "optim",
        "activ",
        "buffers",
        "update",
        "peak",
        "sent",
        "fits",
    ]
    assert "none" in result.out
    assert "zero2" in result.out
    assert "ddp" not in result.out
    assert "on 2 devices" in " ".join(result.out.split())
    assert "XLA" not in result.out


@pytest.mark.long
def test_an_automatic_micro_batch_without_memory_names_the_device_assumed(
    samestep: Samestep, experiment_file: str
) -> None:
    auto = ["training.micro_batch_size=auto", "model.layers=1"]
    command = ["plan", experiment_file, "--devices", 2, "--strategy", "ddp", *auto]
    assumed = samestep(*command, "accelerator=cuda")
    assert assumed.code == 0, assumed.err
    said = " ".join(assumed.out.split())
    assert "micro_batch_size is auto: assuming 80GiB per device, as an H100" in said
    assert "fits" in said
    given = samestep(*command, "accelerator=cuda", "--memory", "80GiB")
    assert "assuming" not in given.out
    assert given.out.splitlines()[-8:] == assumed.out.splitlines()[-8:], "the same plan"
    (found, named) = (
        json.loads(samestep(*command, "accelerator=cuda", "--json", *more).out)
        for more in ((), ("--memory", "24GiB"))
    )
    assert (found["memory"], found["memory_assumed"]) == (80 * 2**30, True)
    assert (named["memory"], named["memory_assumed"]) == (24 * 2**30, False)
    # A number that the experiment sets needs no assumption.
    fixed = samestep(*command, "accelerator=cuda", "training.micro_batch_size=2")
    assert "assuming" not in fixed.out


def test_an_automatic_micro_batch_on_a_cpu_is_the_one_of_training(
    samestep: Samestep, experiment_file: str
) -> None:
    settings = ["training.micro_batch_size=auto", "training.global_batch_size=600"]
    command = ["plan", experiment_file, "--devices", 2, "--strategy", "ddp", *settings]
    result = samestep(*command, "model.layers=1", "accelerator=cpu")
    assert result.code == 0, result.err
    assert "memory is not measured" in " ".join(result.out.split())
    # 4,096 positions in sequences of 32.
    assert "128 x 3" in result.out


def test_what_a_plan_says_of_tpus_is_said(samestep: Samestep, experiment_file: str) -> None:
    settings = ("accelerator=xla", "strategy={kind: xla_spmd, replicas: 4}", "model.layers=1")
    result = samestep("plan", experiment_file, "--devices", 8, "--strategy", "hsdp", *settings)
    assert result.code == 0, result.err
    assert "TPUs under XLA: take the row of fsdp (or hsdp, with replicas)" in " ".join(
        result.out.split()
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--devices", "0"], "--devices is 0"),
        (["--devices", "2", "--strategy", "zero4"], "zero4"),
        (["--devices", "2", "--memory", "much"], "--memory"),
        (["--devices", "3", "--strategy", "hsdp"], "does not divide 3 devices"),
    ],
)
def test_mistakes_are_named(
    samestep: Samestep, experiment_file: str, arguments: list[str], named: str
) -> None:
    result = samestep("plan", experiment_file, *arguments)
    assert result.code == 2
    assert named in result.err
    assert "Traceback" not in result.err


def test_a_run_is_planned_as_it_was_started(finished_run: Path, tmp_path: Path) -> None:
    planned = memory_of_run(finished_run)
    assert planned is not None
    assert 0 < planned < 1
    assert memory_of_run(tmp_path) is None
