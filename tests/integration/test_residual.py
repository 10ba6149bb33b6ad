"""A residual stream in bf16: its dtype in every family, and losses near those of an fp32 stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from samestep.config import load
from samestep.errors import ConfigError
from tests.conformance import worker
from tests.processes import run_ranks
from trainer.models import FeedsResidual, Model
from trainer.strategies.world import World
from trainer.training.experiment import Experiment
from trainer.training.model import build_model, build_objectives
from trainer.training.recorder import Destinations

TOLERANCE = 1e-3
"""Largest relative difference of a loss in 8 steps, from the loss with an fp32 stream."""

SMALL = "vocab_size: 600, layers: 2, width: 32, heads: 2, ffn_width: 64, max_positions: 32"
GPT = "vocab_size: 700, layers: 2, width: 32, heads: 2, ffn_width: 64, max_positions: 64"
BERT_FAMILIES = {
    "bert": [],
    "bert of pre-norm": ["model.norm=pre"],
    "bert with segments": [*worker.TASKS["mlm_nsp"], "data.packing=pairs"],
    "roberta": [f"model={{kind: roberta, {SMALL}}}"],
    "distilbert": [f"model={{kind: distilbert, {SMALL}}}"],
    "mpnet": [f"model={{kind: mpnet, {SMALL}}}"],
    "albert": [*worker.TASKS["albert"], "data.packing=pairs"],
    **{name: worker.TASKS[name] for name in ("electra", "modernbert", "xlnet")},
    **{name: worker.TASKS[name] for name in ("deberta", "deberta_v3", "spanbert")},
}
T5_FAMILIES = {
    "t5": [],
    "t5 with shared layers": ["model.architecture=shared_encoder_decoder"],
    "bart": worker.TASKS["bart"],
    "gpt2": ["objective=causal_lm", f"model={{kind: gpt2, {GPT}}}"],
    "openai_gpt": ["objective=causal_lm", f"model={{kind: openai_gpt, {GPT}}}"],
}
BF16 = ["training.precision=bf16", "strategy=single", "training.steps=8"]


class Run(NamedTuple):
    """Losses of each step, and the dtypes of outputs: of layers, and of embeddings and norms."""

    losses: list[float]
    layers: set[torch.dtype]
    sources: set[torch.dtype]


def run_all(file: str, cases: list[list[str]]) -> list[Run]:
    """Runs experiments one after another in one process."""
    world = World.start(60)
    world.connect("gloo")
    runs = [run(file, overrides, world) for overrides in cases]
    world.close()
    return runs


def run(file: str, overrides: list[str], world: World) -> Run:
    """Trains with hooks on all layers, embeddings and norms."""
    trainer = worker.make_trainer(load(Experiment, file, overrides), world)
    found = Run([], set(), set())

    def keep(module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = (output,) if isinstance(output, Tensor) else output
        if hasattr(module, "static"):
            found.layers.update(each.dtype for each in tensors)
        elif isinstance(module, FeedsResidual):
            found.sources.add(tensors[0].dtype)

    hook = nn.modules.module.register_module_forward_hook(keep)
    tracker = worker.Losses()
    trainer.fit(Destinations([tracker]))
    hook.remove()
    trainer.close()
    found.losses.extend(tracker.values)
    return found


def check(file: str, folder: Path, families: dict[str, list[str]]) -> None:
    cases = [
        [f"output={folder / name / residual}", *overrides, *BF16, f"training.residual={residual}"]
        for name, overrides in families.items()
        for residual in ("fp32", "bf16")
    ]
    (runs,) = run_ranks(1, run_all, file, cases)
    for name, wide, narrow in zip(families, runs[::2], runs[1::2], strict=True):
        assert wide.layers == {torch.float32}, name
        assert narrow.layers == {torch.bfloat16}, name
        assert narrow.sources == {torch.bfloat16}, name
        assert wide.losses != narrow.losses, name
        np.testing.assert_allclose(narrow.losses, wide.losses, rtol=TOLERANCE, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fixture", "families"),
    [("experiment_file", BERT_FAMILIES), ("t5_experiment", T5_FAMILIES)],
    ids=["encoders", "decoders"],
)
def test_every_family(
    fixture: str,
    families: dict[str, list[str]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    check(request.getfixturevalue(fixture), tmp_path, families)


@pytest.mark.long
def test_the_default_is_fp32(experiment_file: str, tmp_path: Path) -> None:
    default, fp32 = [], ["training.residual=fp32"]
    cases = [
        [f"output={tmp_path / str(number)}", *BF16, *overrides]
        for number, overrides in enumerate((default, fp32))
    ]
    ((first, second),) = run_ranks(1, run_all, experiment_file, cases)
    assert first.losses == second.losses


@pytest.mark.long
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_micro_batches_and_checkpointing_change_nothing(
    experiment_file: str, tmp_path: Path, norm: str
) -> None:
    """The streams of a row do not depend on its micro-batch, nor on when they are computed."""
    cases = [
        [
            f"output={tmp_path / str(number)}",
            *BF16,
            "training.residual=bf16",
            f"model.norm={norm}",
            f"training.micro_batch_size={rows}",
            f"training.activation_checkpointing={recomputes}",
        ]
        for number, (rows, recomputes) in enumerate([(10, "false"), (4, "false"), (10, "true")])
    ]
    ((whole, cut, recomputed),) = run_ranks(1, run_all, experiment_file, cases)
    assert recomputed.losses == whole.losses
    np.testing.assert_allclose(cut.losses, whole.losses, rtol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_other_precisions_are_refused(experiment_file: str, precision: str) -> None:
    overrides = ["output=x", "training.residual=bf16", f"training.precision={precision}"]
    with pytest.raises(ConfigError, match="residual is bf16 and precision is fp"):
        load(Experiment, experiment_file, overrides)


def test_a_model_without_such_modules_is_refused(
    experiment_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["output=x", *BF16, "training.residual=bf16"]
    experiment = load(Experiment, experiment_file, overrides)
    dataset = experiment.data.open()
    objectives = build_objectives(experiment, dataset)
    build_model(experiment, dataset, objectives)
    without = property(lambda model: None, lambda model, dtype: None)
    monkeypatch.setattr(Model, "residual_dtype", without)
    with pytest.raises(ConfigError, match=r"training\.residual is bf16, and this model"):
        build_model(experiment, dataset, objectives)
