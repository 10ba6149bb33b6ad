"""`make bench-gpu`, on the CPU with tiny models."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from itertools import islice
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_tables
from benchmarks.models import initialized
from benchmarks.sides import LAUNCH, Job, SideFailed, Turn, Turns
from benchmarks.turn_record import ALLOCATOR, StepRecorder
from trainer.accelerators.kinds import cuda
from trainer.models.codecs import codec_of
from trainer.strategies import Replica
from trainer.training.compose import open_loader
from trainer.training.model import build_objectives

pytest.importorskip("accelerate", reason="Hugging Face Trainer needs accelerate")

SIDES = [
    "samestep",
    "samestep, compiled",
    "Hugging Face Trainer",
    "Hugging Face Trainer, compiled",
]


def tiny(folder: Path, recipe: str = "bert_base_128", micro_batch: int = 4) -> gpu.GpuJob:
    return gpu.GpuJob(
        folder=str(folder),
        batch=4,
        micro_batch=micro_batch,
        threads=1,
        backend="eager",
        recipe=gpu.RECIPES[recipe],
        tiny=True,
    )


@pytest.mark.parametrize("recipe", gpu.RECIPES)
def test_both_sides_have_the_same_loss(recipe: str, tmp_path: Path):
    from benchmarks import huggingface

    job = tiny(tmp_path, recipe, micro_batch=2)
    job.write_data()
    experiment = job.experiment()
    dataset, (phase,) = experiment.data.open(), experiment.resolved_phases()
    (objective,) = build_objectives(experiment, dataset)
    model = initialized(experiment.model).eval()
    their_model = huggingface.build_model(experiment.model).eval()
    weights = codec_of(experiment.model).export_tensors(dict(model.named_parameters()))
    assert not their_model.load_state_dict(weights, strict=False).unexpected_keys
    # A head of its own is not tied to the embeddings, so both optimizers have the same work.
    assert their_model.num_parameters() == sum(each.numel() for each in model.parameters())
    assert their_model.config._attn_implementation == "sdpa"
    with open_loader(experiment, dataset, Replica(0, 1), phase) as loader:
        batches = [batch for step in islice(loader, 3) for batch in step]
    for batch in batches:
        totals = {name: torch.tensor(each) for name, each in objective.weights(batch).items()}
        columns = huggingface.their_columns(batch, getattr(experiment.model, "position_offset", 0))
        assert ("attention_mask" in columns) == job.recipe.packed
        with torch.no_grad():
            ours, theirs = objective.loss(model, batch, totals).total, their_model(**columns).loss
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(
            name, marks=pytest.mark.long if name == "t5_base_512" else pytest.mark.exhaustive
        )
        for name in gpu.RECIPES
    ],
)
def test_smallest_run(recipe: str, tmp_path: Path):
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text(f"before\n{gpu_tables.BEGIN}\nold\n{gpu_tables.END}\nafter\n")
    options = ["--repeats", "2", "--turn", "1", "--page", str(page), "--json", str(figures)]
    assert gpu.main(["--device", "cpu", "--recipe", recipe, *options]) == 0
    (measured,) = json.loads(figures.read_text())["measured"]
    turns = measured["turns"]
    rounds = [*SIDES, *SIDES, *reversed(SIDES), *SIDES]  # warm-up, two rounds, profile
    assert [turn["side"] for turn in turns] == rounds
    purposes = ["warm-up"] * 4 + ["measured"] * 8 + ["profiled"] * 4
    assert [turn["purpose"] for turn in turns] == purposes
    began = [turn["measured"]["began"] for turn in turns]
    assert began == sorted(began)
    for turn in turns:
        steps = turn["measured"]["by_step"]
        assert len(steps) == turn["measured"]["steps"]
        compiles = turn["purpose"] == "warm-up" and "compiled" in turn["side"]
        assert any(step["graphs"] for step in steps) == compiles
    assert [row["side"] for row in measured["rows"]] == SIDES
    for row in measured["rows"]:
        assert row["failure"] is None
        assert len(row["rates"]) == 2
        assert min(row["rates"]) > 0
        assert 0 <= row["waiting"] < 1
        assert row["peak_memory"] > 2**20
    text = page.read_text()
    assert text.startswith(f"before\n{gpu_tables.BEGIN}\nMeasured on ")
    assert text.endswith(f"|\n{gpu_tables.END}\nafter\n")
    assert "old" not in text
    assert gpu.RECIPES[recipe].title in text


def test_a_turn_records_each_step() -> None:
    ours, theirs = Pipe()
    turns = Turns("cpu", theirs)
    for turn in (Turn(untimed=2, timed=3), Turn(untimed=0, timed=1), None):
        ours.send(turn)
    turns.wait()
    before = time.time()
    paused, going = 0, True
    while going:
        paused += 1
        if paused == 4:  # the second timed step
            time.sleep(0.3)
        going = turns.step()
    first, second = ours.recv(), ours.recv()
    assert [len(each.by_step) for each in (first, second)] == [3, 1]
    assert before - 1 < first.began < second.began < time.time() + 1
    for measured in (first, second):
        for name in ("seconds", "cpu_seconds"):
            each = [getattr(step, name) for step in measured.by_step]
            assert sum(each) == pytest.approx(getattr(measured, name), abs=0.05)
    slow = [step.seconds > 0.25 for step in first.by_step]
    assert slow == [False, True, False]
    assert all(step.cpu_seconds < 0.2 for step in first.by_step)  # it waited
    (step,) = second.by_step
    assert (step.device_seconds, step.graphs, step.allocator, step.gpu) == (None, 0, None, None)


class Nvml(ModuleType):
    """A GPU that its power limit slows down, of a driver that does not tell the temperature."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    nvmlClocksEventReasonGpuIdle, nvmlClocksEventReasonSwPowerCap = 1, 4
    nvmlClocksEventReasonAll = 5

    class NVMLError(Exception): ...

    def __init__(self) -> None:
        super().__init__("pynvml")
        vars(self).update({name: value for name, value in vars(Nvml).items() if name[0] != "_"})
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
        self.nvmlDeviceGetClockInfo = lambda handle, kind: {1: 1200, 2: 3201}[kind]
        self.nvmlDeviceGetPowerUsage = lambda handle: 699_500
        self.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 4
        self.nvmlDeviceGetTemperature = self._fails

    def _fails(self, *_: Any) -> None:
        raise self.NVMLError


class Event:
    """The n-th event is n seconds after the first."""

    count = 0

    def __init__(self, enable_timing: bool) -> None: ...

    def record(self) -> None:
        Event.count += 1
        self.number = Event.count

    def elapsed_time(self, other: Event) -> float:
        return 1000.0 * (other.number - self.number)


def test_a_step_on_a_gpu_records_clocks_and_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(0, 100, 10))
    stats = {"num_ooms": 0, "num_alloc_retries": 1, "allocation": {}}
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    for name, replacement in {
        "Event": Event,
        "current_device": lambda: 0,
        "get_device_properties": lambda device: SimpleNamespace(uuid="1-2"),
        "memory_stats_as_nested_dict": lambda: {**stats, "num_device_alloc": next(calls)},
    }.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    recorder = StepRecorder("cuda")
    recorder.start()
    recorder.end_step()
    (step,) = recorder.records()
    assert step.device_seconds == 1.0
    assert step.allocator == dict.fromkeys(ALLOCATOR, 0) | {"num_device_alloc": 10}
    assert step.gpu == {
        "sm_mhz": 1200,
        "memory_mhz": 3201,
        "watts": 699.5,
        "celsius": None,
        "lowered_by": ["SwPowerCap"],
    }
    monkeypatch.setitem(sys.modules, "pynvml", None)
    without = StepRecorder("cuda")
    without.start()
    without.end_step()
    assert without.records()[0].gpu is None


@pytest.mark.parametrize("recipe", ["bert_large_512", "t5_base_512"])
def test_rows_of_a_benchmark_have_no_padding(recipe: str, tmp_path: Path) -> None:
    """A row with padding needs another kernel, and Trainer another graph."""
    job = dataclasses.replace(tiny(tmp_path, recipe), tiny=False, batch=2, micro_batch=2)
    job.write_data()
    experiment = job.experiment()
    dataset, (phase,) = experiment.data.open(), experiment.resolved_phases()
    with open_loader(experiment, dataset, Replica(0, 1), phase) as loader:
        assert loader.examples > 100
        for (batch,) in islice(loader, loader.examples):
            assert (batch["segments"] == 1).all()


def in_little_memory(job: Job, turns: Turns, most: int = 0) -> None:
    """A side whose micro-batches may have `most` sequences."""
    going = turns.wait()
    while going:
        if job.micro_batch > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        going = turns.step()


def in_half_the_memory(job: Job, turns: Turns) -> None:
    in_little_memory(job, turns, most=2)


def without_a_kernel(job: Job, turns: Turns) -> None:
    raise SideFailed("no fused attention on this machine")


def failing(job: Job, turns: Turns) -> None:
    raise ValueError("with a | in it\nand a second line")


def killed(job: Job, turns: Turns) -> None:
    sys.exit(3)


@pytest.mark.long
def test_one_side_fails_and_the_others_are_measured(tmp_path: Path):
    job = tiny(tmp_path)
    job.write_data()
    serve = [in_half_the_memory, in_little_memory, without_a_kernel, failing, killed]
    sides = [gpu.Contestant(each.__name__, each) for each in serve]
    result = gpu.measure(job, sides, Turn(untimed=1, timed=1), repeats=2)
    assert [row.failure for row in result.rows] == [
        None,
        "out of memory",
        "no fused attention on this machine",
        "failed: ValueError: with a | in it",
        "failed: its process ended with 3",
    ]
    assert result.rows[0].micro_batch == 2
    assert len(result.rows[0].rates) == 2
    *_, measured, none_fits, _, error, _ = gpu_tables.table(result).splitlines()
    assert measured.startswith("| in_half_the_memory | ")
    assert none_fits.startswith("| in_little_memory | out of memory |")
    assert error.startswith("| failing | failed: ValueError: with a / in it |")
    assert len({line.count("|") for line in gpu_tables.table(result).splitlines()[2:]}) == 1


@pytest.mark.parametrize("recipe", gpu.RECIPES)
def test_each_side_of_a_gpu_has_valid_settings(recipe: str, tmp_path: Path):
    sides = gpu.contestants("cuda").values()
    has_setting = "fused_attention" in {each.name for each in dataclasses.fields(cuda.Config)}
    assert len(sides) == 4 + 3 * has_setting
    job = dataclasses.replace(tiny(tmp_path, recipe), device="cuda", tiny=False)
    seen = set()
    for side in sides:
        found = dataclasses.replace(job, settings=side.settings).experiment()
        assert found.training.precision == "bf16"
        assert isinstance(found.accelerator, cuda.Config)
        assert (found.model.dropout, found.model.attention_dropout) == (0.1, 0.1)
        if side.settings:
            fused = getattr(found.accelerator, "fused_attention", None)
            seen.add((found.training.compile, fused))
            assert found.training.residual == "fp32" or fused
            assert not found.training.fp8 or found.training.residual == "bf16"
    expected = {(False, False), (True, False), (True, True)}
    assert seen == (expected if has_setting else {(False, None), (True, None)})


@pytest.mark.long
def test_the_server_of_processes_does_not_import_transformers():
    """Which initializes CUDA in some environments; forks could then not use it."""
    code = "import benchmarks.sides, sys; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=gpu.ROOT).returncode == 0


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a CUDA device, and something to measure"
)
def test_says_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str]):
    assert gpu.main([]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("bench-gpu: nothing measured, as torch finds no GPU. ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_page_needs_the_markers(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(f"{gpu_tables.END} and {gpu_tables.BEGIN}")
    with pytest.raises(SystemExit, match="Add the lines <!-- bench-gpu --> and <!-- /bench-gpu"):
        gpu_tables.replace_tables(page, "tables")
    gpu_tables.replace_tables(new := tmp_path / "new.md", "tables")
    assert new.read_text() == f"{gpu_tables.BEGIN}\ntables\n{gpu_tables.END}\n"


def test_names_of_kernel_launches():
    launches = (
        "cudaLaunchKernel cudaLaunchKernelExC cuLaunchKernel cuLaunchKernelEx cudaGraphLaunch "
        "cudaLaunchCooperativeKernel hipLaunchKernel hipExtLaunchKernel hipModuleLaunchKernel "
        "hipExtModuleLaunchKernel hipGraphLaunch"
    )
    others = "cudaMemcpyAsync cudaStreamSynchronize cudaLaunchHostFunc aten::add hipMemcpyAsync"
    assert all(LAUNCH.fullmatch(name) for name in launches.split())
    assert not any(LAUNCH.fullmatch(name) for name in others.split())


def test_the_page_has_the_markers():
    text = gpu.PAGE.read_text(encoding="utf-8")
    assert text.count(gpu_tables.BEGIN) == text.count(gpu_tables.END) == 1
    assert text.index(gpu_tables.BEGIN) < text.index(gpu_tables.END)
