"""The same step on GPUs as in a single process on the CPU; skipped where there are none.

Batches are equal. Losses of 30 steps agree within 1e-4 relative in fp32 without TF32, where only
the order of sums differs, and within 2e-2 in bf16 and fp16, which round each factor of a product.

With SAMESTEP_CUDA_TESTS=cpu two CPU processes stand for GPUs, to try these tests themselves.
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from samestep.config import load
from tests.conformance.test_phases import SETTINGS as TWO_PHASES
from tests.conformance.worker import (
    FAMILIES,
    STRATEGIES,
    TASKS,
    TEXT_TASKS,
    Losses,
    Record,
    batch_digests,
    make_trainer,
    recorded,
)
from tests.processes import run_ranks
from trainer.accelerators.kinds import cuda
from trainer.models.layers.dropout import dropout, split_key
from trainer.models.layers.embeddings import Embeddings
from trainer.strategies.world import World
from trainer.training.experiment import Experiment
from trainer.training.recorder import Destinations

ON_CPU = os.environ.get("SAMESTEP_CUDA_TESTS") == "cpu"
GPUS = 2 if ON_CPU else torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS == 0, reason="torch finds no CUDA device here")
on_a_gpu = pytest.mark.skipif(ON_CPU, reason="is about a GPU's own kernels")

STEPS, BATCHES = 30, 40
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
DEVICE = "accelerator=cpu" if ON_CPU else "accelerator=cuda"


class Run(NamedTuple):
    """What one process saw: batches, training losses, held-out losses, and fused attention."""

    record: Record
    heldout: list[float]
    fused: bool


def record(file: str, overrides: list[str], resume: int | None = None) -> Run:
    """Runs on the GPU with this rank's number, or on the CPU."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    accelerator = load(Experiment, file, overrides).accelerator.build()
    world = World.start(60)
    world.connect(accelerator.collective_backend, accelerator.collective_device)
    digests = batch_digests(file, overrides, world, BATCHES)
    trainer = make_trainer(load(Experiment, file, overrides), world)
    if resume is not None:
        trainer.restore(resume)
    losses, heldout = Losses(), Losses("heldout/loss")
    with recorded():
        trainer.fit(Destinations([losses, heldout]))
    trainer.loader.close()
    world.close()
    model = getattr(trainer.model, "module", trainer.model)  # DDP wraps it
    return Run(Record(digests, losses.values), heldout.values, model.fuses_attention)


def on_cpu(file: str, output: Path, *overrides: str) -> Run:
    settings = [f"output={output}", "accelerator=cpu", "strategy=single", *overrides]
    return run_ranks(1, record, file, settings)[0]


def on_gpus(file: str, output: Path, size: int, strategy: str, *overrides: str) -> list[Run]:
    strategy = STRATEGIES.get(strategy, strategy)
    settings = [f"output={output}", DEVICE, f"strategy={strategy}", *overrides]
    return run_ranks(size, record, file, settings)


def assert_same(ranks: list[Run], reference: Run, precision: str = "fp32") -> None:
    digests = np.sum([rank.record.digests for rank in ranks], axis=0, dtype=np.uint64)
    assert np.array_equal(digests, reference.record.digests)
    tolerance = TOLERANCE[precision]
    np.testing.assert_allclose(ranks[0].record.losses, reference.record.losses, rtol=tolerance)
    np.testing.assert_allclose(ranks[0].heldout, reference.heldout, rtol=tolerance)


def settings(packing: str) -> list[str]:
    steps = [f"training.steps={STEPS}", "training.evaluate_every=10", "checkpoint.keep_last=9"]
    return [f"data.packing={packing}", *steps]


@pytest.fixture(scope="module")
def references(
    experiment_file: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Run]]:
    """The run's folder and what its only process saw, by packing.

    Rows of `concat` need no mask, those of others do.
    """
    runs = {}
    for packing in ("concat", "best_fit"):
        folder = tmp_path_factory.mktemp(packing)
        run = on_cpu(experiment_file, folder, *settings(packing), "checkpoint.every=10")
        runs[packing] = (folder, run)
    return runs


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (1, "single"),
        *((size, name) for size in sorted({1, GPUS} - {0}) for name in ("ddp", "fsdp")),
    ],
)
def test_same_batches_and_losses(
    experiment_file: str,
    tmp_path: Path,
    references: dict[str, tuple[Path, Run]],
    size: int,
    strategy: str,
    precision: str,
    packing: str,
) -> None:
    changed = [*settings(packing), f"training.precision={precision}"]
    ranks = on_gpus(experiment_file, tmp_path, size, strategy, *changed)
    assert_same(ranks, references[packing][1], precision)


@pytest.mark.parametrize("strategy", ["hsdp", "zero-1", "zero-2", "zero-3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_strategies(
    experiment_file: str,
    tmp_path: Path,
    references: dict[str, tuple[Path, Run]],
    strategy: str,
    precision: str,
) -> None:
    if strategy == "hsdp" and GPUS % 2:
        pytest.skip("two copies of the model need an even number of GPUs")
    changed = [*settings("best_fit"), f"training.precision={precision}"]
    ranks = on_gpus(experiment_file, tmp_path, GPUS, strategy, *changed)
    assert_same(ranks, references["best_fit"][1], precision)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_compiled(
    experiment_file: str,
    tmp_path: Path,
    references: dict[str, tuple[Path, Run]],
    strategy: str,
    packing: str,
) -> None:
    """With masks (best_fit) and without."""
    size = 1 if strategy == "single" else GPUS
    changed = [*settings(packing), "training.compile=true"]
    ranks = on_gpus(experiment_file, tmp_path, size, strategy, *changed)
    assert_same(ranks, references[packing][1])


@pytest.mark.parametrize("task", ["mlm_lamb", *FAMILIES])
def test_families_and_optimizers(
    experiment_file: str, t5_experiment: str, tmp_path: Path, task: str
) -> None:
    file = t5_experiment if task in TEXT_TASKS else experiment_file
    packing = FAMILIES.get(task, "best_fit")
    changed = [f"data.packing={packing}", "training.steps=12", *TASKS[task]]
    reference = on_cpu(file, tmp_path / "cpu", *changed)
    assert_same(on_gpus(file, tmp_path / "gpu", GPUS, "fsdp", *changed), reference)


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("task", ["span_corruption", "causal_lm"])
def test_decoders(
    t5_experiment: str, tmp_path: Path, task: str, precision: str, compiled: str
) -> None:
    """T5's relative biases have a gradient through attention; Adafactor updates them."""
    reference = on_cpu(t5_experiment, tmp_path / "cpu", *TASKS[task])
    changed = [*TASKS[task], f"training.precision={precision}", f"training.compile={compiled}"]
    ranks = on_gpus(t5_experiment, tmp_path / "gpu", GPUS, "fsdp", *changed)
    assert_same(ranks, reference, precision)


WIDE_HEADS = {
    "mlm": ["model.heads=1"],
    "modernbert": [*TASKS["modernbert"], "model.heads=1"],
    "span_corruption": ["model.heads=1", "model.head_width=32"],
    "causal_lm": [*TASKS["causal_lm"], "model.heads=1"],
}
"""Tasks whose heads are wide enough for the fused kernel, 32."""


@on_a_gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("task", WIDE_HEADS)
def test_fused_attention_with_dropout(
    experiment_file: str,
    t5_experiment: str,
    tmp_path: Path,
    task: str,
    precision: str,
    compiled: str,
) -> None:
    file = t5_experiment if task in TEXT_TASKS else experiment_file
    changed = [*WIDE_HEADS[task], "model.attention_dropout=0.1", "training.evaluate_every=6"]
    reference = on_cpu(file, tmp_path / "cpu", *changed)
    changed += [f"training.precision={precision}", f"training.compile={compiled}"]
    ranks = on_gpus(file, tmp_path / "gpu", GPUS, "ddp", *changed)
    assert all(rank.fused for rank in ranks)
    assert_same(ranks, reference, precision)


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_two_phases(experiment_file: str, tmp_path: Path, compiled: str) -> None:
    changed = [*TWO_PHASES, "training.evaluate_every=7"]
    reference = on_cpu(experiment_file, tmp_path / "cpu", *changed)
    changed.append(f"training.compile={compiled}")
    assert_same(on_gpus(experiment_file, tmp_path / "gpu", GPUS, "fsdp", *changed), reference)


@pytest.mark.parametrize("length", [64, 192, 320])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lengths_at_which_cudnn_gave_nan(
    experiment_file: str, tmp_path: Path, length: int, precision: str
) -> None:
    """64 more than a multiple of 128 (pytorch#196678), with masks."""
    changed = [
        f"data.sequence_length={length}",
        f"model.max_positions={length}",
        "data.packing=best_fit",
        "training.steps=8",
    ]
    reference = on_cpu(experiment_file, tmp_path / "cpu", *changed)
    changed.append(f"training.precision={precision}")
    ranks = on_gpus(experiment_file, tmp_path / "gpu", 1, "single", *changed)
    assert_same(ranks, reference, precision)


def test_continues_what_a_cpu_began(
    experiment_file: str, references: dict[str, tuple[Path, Run]]
) -> None:
    folder, reference = references["concat"]
    overrides = [f"output={folder}", *settings("concat"), DEVICE, "strategy=fsdp"]
    overrides.append("checkpoint.every=1000")
    continued = run_ranks(GPUS, record, experiment_file, overrides, 10)[0]
    np.testing.assert_allclose(
        continued.record.losses, reference.record.losses[10:], rtol=TOLERANCE["fp32"]
    )


@on_a_gpu
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_has_the_same_bits(p: float) -> None:
    keys = split_key(torch.arange(32, dtype=torch.int32), 3)[1]
    mask = dropout(torch.ones(32, 100, 64), p, keys)
    for function in (dropout, torch.compile(dropout)):
        assert torch.equal(
            function(torch.ones(32, 100, 64, device="cuda"), p, keys.cuda()).cpu(), mask
        )


@on_a_gpu
def test_gradients_of_embeddings_have_the_same_bits_each_time(experiment_file: str) -> None:
    cuda.Config().build()
    config = load(Experiment, experiment_file, ["output=unused"]).model
    embeddings = Embeddings(config).cuda()
    tokens = torch.randint(0, 9, (64, 32), device="cuda")  # each token hundreds of times
    positions = torch.arange(32, device="cuda").expand(64, -1)
    found = []
    for _ in range(5):
        embeddings.zero_grad()
        hidden, _ = embeddings(tokens, positions)
        (
            hidden * torch.linspace(0.1, 3, hidden.numel(), device="cuda").view_as(hidden)
        ).sum().backward()
        found.append(embeddings.tokens.weight.grad.clone())
    assert all(torch.equal(each, found[0]) for each in found)


@on_a_gpu
def test_a_number_is_read_without_waiting_for_work_enqueued_since() -> None:
    accelerator = cuda.Config().build()
    read = accelerator.read_later(torch.full((), 3.0, dtype=torch.float64, device="cuda"))
    torch.cuda._sleep(2_000_000_000)  # cycles, about a second
    is_over = torch.cuda.Event()
    is_over.record()
    assert read() == 3.0
    assert not is_over.query()
