"""The same step on GPUs as in a single process on the CPU; skipped where there are none.

Batches are equal. Losses of 30 steps agree within 1e-4 relative in fp32 without TF32, where only
the order of sums differs, and within 2e-2 in bf16, which rounds each factor of a product to 8 bits.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conformance.worker import Record, batch_digests, losses
from tests.processes import run_ranks
from trainer.config import load
from trainer.models.dropout import dropout, split_key
from trainer.strategies.world import World
from trainer.training.experiment import Experiment

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS == 0, reason="torch finds no CUDA device here")

STEPS, BATCHES = 30, 40
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
SPLITS = [
    (1, "single"),
    *((size, strategy) for size in sorted({1, GPUS} - {0}) for strategy in ("ddp", "fsdp")),
]


def record(file: str, overrides: list[str], resume: int | None = None) -> Record:
    """What a rank saw, on the GPU with its number or on the CPU."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    accelerator = load(Experiment, file, overrides).accelerator.build()
    world = World.start(60)
    world.connect(accelerator.collective_backend)
    seen = Record(
        batch_digests(file, overrides, world, BATCHES),
        losses(file, overrides, world, resume=resume),
    )
    world.close()
    return seen


def settings(output: Path, packing: str) -> list[str]:
    return [
        f"output={output}",
        f"data.packing={packing}",
        f"training.steps={STEPS}",
        "checkpoint.keep_last=9",
    ]


@pytest.fixture(scope="module")
def on_cpu(
    experiment_file: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Record]]:
    """The run's folder and what its only process saw, by packing.

    Rows of `concat` need no mask, those of others do.
    """
    runs = {}
    for packing in ("concat", "best_fit"):
        folder = tmp_path_factory.mktemp(packing)
        overrides = [*settings(folder, packing), "strategy=single", "checkpoint.every=10"]
        runs[packing] = (folder, run_ranks(1, record, experiment_file, overrides)[0])
    return runs


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("size", "strategy"), SPLITS)
def test_same_batches_and_losses(
    experiment_file: str,
    tmp_path: Path,
    on_cpu: dict[str, tuple[Path, Record]],
    size: int,
    strategy: str,
    precision: str,
    packing: str,
):
    overrides = [*settings(tmp_path, packing), "accelerator=cuda", f"strategy={strategy}"]
    ranks = run_ranks(
        size, record, experiment_file, [*overrides, f"training.precision={precision}"]
    )
    _, reference = on_cpu[packing]
    assert np.array_equal(
        np.sum([rank.digests for rank in ranks], axis=0, dtype=np.uint64), reference.digests
    )
    np.testing.assert_allclose(ranks[0].losses, reference.losses, rtol=TOLERANCE[precision])


def test_compiled(experiment_file: str, tmp_path: Path, on_cpu: dict[str, tuple[Path, Record]]):
    overrides = [
        *settings(tmp_path, "concat"),
        "accelerator=cuda",
        "strategy=single",
        "training.compile=true",
    ]
    (compiled,) = run_ranks(1, record, experiment_file, overrides)
    np.testing.assert_allclose(compiled.losses, on_cpu["concat"][1].losses, rtol=TOLERANCE["fp32"])


def test_continues_what_a_cpu_began(experiment_file: str, on_cpu: dict[str, tuple[Path, Record]]):
    folder, reference = on_cpu["concat"]
    overrides = [
        *settings(folder, "concat"),
        "accelerator=cuda",
        "strategy=fsdp",
        "checkpoint.every=1000",
    ]
    continued = run_ranks(GPUS, record, experiment_file, overrides, 10)[0]
    np.testing.assert_allclose(continued.losses, reference.losses[10:], rtol=TOLERANCE["fp32"])


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_has_the_same_bits(p: float):
    keys = split_key(torch.arange(32, dtype=torch.int32), 3)[1]
    mask = dropout(torch.ones(32, 100, 64), p, keys)
    for function in (dropout, torch.compile(dropout)):
        assert torch.equal(
            function(torch.ones(32, 100, 64, device="cuda"), p, keys.cuda()).cpu(), mask
        )
