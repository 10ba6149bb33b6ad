"""Options that change memory and speed train, and reach what the plain run reaches."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.format.manifest import Manifest
from data_pipeline.format.shards import Shard
from data_pipeline.format.writing import write_shard
from samestep.config import load
from tests.conformance import worker
from tests.integration.commands import Samestep, losses
from tests.processes import run_ranks
from trainer.inference.evaluate import evaluate
from trainer.strategies.world import World
from trainer.training.experiment import Experiment


@pytest.mark.parametrize(
    ("override", "tolerance"),
    [
        ("training.activation_checkpointing=true", 1e-6),
        ("training.precision=bf16", 1e-3),
        ("strategy=ddp", 1e-5),
        ("data.threads=3", 0),
    ],
)
def test_option(
    samestep: Samestep,
    experiment_file: str,
    finished_run: Path,
    tmp_path: Path,
    override: str,
    tolerance: float,
) -> None:
    assert samestep("train", experiment_file, f"output={tmp_path}", override).code == 0
    run, plain = list(losses(tmp_path).values()), list(losses(finished_run).values())
    np.testing.assert_allclose(run, plain, rtol=tolerance)
    if "precision" in override:
        assert run != plain


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU"
)
def test_compile(
    samestep: Samestep, experiment_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activation checkpointing with it, as that is the harder case."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Ten long rows always need a mask; a second graph, without one, would take as long again.
    settings = [
        "data.sequence_length=128",
        "model.max_positions=128",
        "training.micro_batch_size=10",
    ]
    settings += ["model.layers=1", "training.steps=6"]
    for name, more in (
        ("plain", []),
        ("compiled", ["training.compile=true", "training.activation_checkpointing=true"]),
    ):
        assert (
            samestep("train", experiment_file, f"output={tmp_path / name}", *settings, *more).code
            == 0
        )
    compiled, plain = losses(tmp_path / "compiled"), losses(tmp_path / "plain")
    np.testing.assert_allclose(list(compiled.values()), list(plain.values()), rtol=1e-5)


VARIANTS = {
    "left to right": ["objective=causal_lm", "model.causal=true"],
    "whole words": ["objective={kind: mlm, whole_words: true}"],
    "next sentences": ["objective=mlm_nsp", "data.packing=pairs", "model.nsp=true"],
    "LAMB of the paper": ["optimizer={kind: lamb, lr: 1e-1}"],
    "LAMB of NVIDIA": ["optimizer={kind: lamb, lr: 1e-1, variant: nvidia, max_trust_ratio: 10}"],
    "fp16": ["training.precision=fp16"],
    "warm-up, stable, decay": ["schedule={decay: 1-sqrt, warmup_steps: 2, decay_start: 8}"],
    "pre-LN, gated": ["model.norm=pre", "model.activation=geglu"],
}


@pytest.mark.long
def test_every_variant_learns(experiment_file: str, tmp_path: Path) -> None:
    """All in one process, as each takes a second."""
    runs = [
        [f"output={tmp_path / name}", "optimizer.lr=1e-2", *settings]
        for name, settings in VARIANTS.items()
    ]
    (traces,) = run_ranks(1, train_all, experiment_file, runs)
    for name, trace in zip(VARIANTS, traces, strict=True):
        assert np.mean(trace[-3:]) < np.mean(trace[:3]) - 0.05, f"{name}: {trace}"


def train_all(file: str, runs: list[list[str]]) -> list[list[float]]:
    """The loss traces of several runs, one after the other in this process."""
    world = World.start(60)
    world.connect("gloo")
    traces = [worker.losses(file, ["strategy=single", *overrides], world) for overrides in runs]
    world.close()
    return traces


@pytest.mark.long
def test_fewer_heldout_examples_than_replicas(
    experiment_file: str, finished_run: Path, dataset_folder: Path, tmp_path: Path
) -> None:
    """Replicas without held-out examples of their own take part, and the score is that of one
    process.
    """
    folder = Path(shutil.copytree(dataset_folder, tmp_path / "dataset"))
    manifest = Manifest.load(folder)
    whole = Shard.open(folder / manifest.splits["heldout"][0].name, manifest.token_dtype)
    shortest = int(whole.length.argmin())
    tokens = whole.tokens[whole.start[shortest] :][: whole.length[shortest]]
    shard = write_shard(
        folder / "heldout-one.tar", [tokens], whole.origin[:1], manifest.token_dtype
    )
    dataclasses.replace(manifest, splits={**manifest.splits, "heldout": (shard,)}).save(folder)

    overrides = [f"output={finished_run}", f"data.path={folder}"]
    (one,) = run_ranks(1, score, experiment_file, overrides)
    three = run_ranks(3, score, experiment_file, overrides)
    assert one["loss"] > 0
    assert three[0] == three[1] == three[2] == pytest.approx(one, rel=1e-5)


def score(file: str, overrides: list[str]) -> dict[str, float]:
    """What one rank of an evaluation finds."""
    return evaluate(load(Experiment, file, overrides), step=None)
