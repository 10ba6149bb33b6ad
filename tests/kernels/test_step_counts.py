"""Kernels and memory traffic of a micro-batch: no change may make these grow unnoticed.

Counts of `samestep plan --throughput` for both passes, before fusion (eager) and after it (compiled
layers, one attention kernel). tests/unit/optim/test_launches.py counts the kernels of updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from samestep.config import load
from trainer.inspect.plan.batch import example, stand_in
from trainer.inspect.plan.fusion import EAGER, FUSED, Kernel, kernels
from trainer.inspect.plan.trace import Step
from trainer.training.experiment import Experiment

CONFIGS = Path(__file__).parents[2] / "configs" / "pretrain"
SIZE = 8
"""Sequences of the micro-batch."""


def counts(found: Sequence[Kernel]) -> tuple[int, float, float]:
    """Launches, gigabytes of memory traffic, and teraFLOPs."""
    return (
        sum(each.launches for each in found),
        sum(each.nbytes for each in found) / 1e9,
        sum(each.flops for each in found) / 1e12,
    )


@pytest.mark.parametrize(
    ("recipe", "phase", "settings", "eager", "fused"),
    [
        ("bert_large_lamb", 1, [], (4400, 205.0), (1550, 38.5)),
        ("bert_large_lamb", 1, ["training.residual=bf16"], (4450, 204.0), (1550, 36.0)),
        ("roberta_base", 0, [], (2200, 76.5), (820, 16.5)),
        ("t5_base", 0, [], (7050, 134.0), (1650, 26.5)),
    ],
    ids=["BERT-large 512", "with a bf16 residual", "RoBERTa-base 512", "T5-base 512/114"],
)
def test_passes_have_no_more_kernels_and_traffic_than_before(
    recipe: str,
    phase: int,
    settings: list[str],
    eager: tuple[int, float],
    fused: tuple[int, float],
) -> None:
    experiment = load(Experiment, str(CONFIGS / f"{recipe}.yaml"), settings)
    of_phase = experiment.resolved_phases()[phase]
    objective = of_phase.objective.build(stand_in(experiment.model.vocab_size))
    step = Step(experiment, on_cpu=False)
    operators = step.operators(objective, example(experiment, objective, of_phase), SIZE)
    before, after = (counts(kernels(operators, how)) for how in (EAGER, FUSED))
    for (launches, traffic, _), (most, gigabytes) in ((before, eager), (after, fused)):
        assert 0.9 * most < launches <= most
        assert 0.9 * gigabytes < traffic <= gigabytes
    assert after[2] >= before[2]  # the attention kernel computes scores again
