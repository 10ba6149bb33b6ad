"""The graphs of compiled layers in real runs: few, static, none of them split, none too many.

A run that compiles more graphs than Dynamo's limit would continue with eager layers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.conftest import make_dataset, write_t5_experiment
from tests.integration import tasks
from tests.kernels import graphs
from tests.processes import run_ranks
from trainer.training.compute import compiled

EVALUATED = ["training.evaluate_every=4", "training.steps=8", "optimizer.lr=1e-3"]


def phases(first: int, second: int) -> list[str]:
    """Two phases whose batches differ in both dimensions, with evaluations in both."""
    return [
        f"phases=[{{steps: 4, sequence_length: {first}, global_batch_size: 12}}, "
        f"{{steps: 4, sequence_length: {second}, global_batch_size: 5}}]",
        *EVALUATED,
    ]


SMALL = "vocab_size: 600, layers: 2, width: 32, heads: 2, ffn_width: 64, max_positions: 32"
RUNS = {
    "bert": [
        *phases(16, 32),
        "data.packing=pairs",
        "objective=mlm_nsp",
        "model.nsp=true",
    ],
    "roberta": [
        *EVALUATED,
        f"model={{kind: roberta, {SMALL}, attention_dropout: 0.0}}",
        "data.packing=best_fit",
    ],
    "t5": [*phases(32, 64), "training.evaluate_every=null"],
    "gpt2": [
        *EVALUATED,
        f"model={{kind: gpt2, {SMALL}, attention_dropout: 0.0}}",
        "objective=causal_lm",
    ],
    "electra": [
        *EVALUATED,
        f"model={{kind: electra, {SMALL}, attention_dropout: 0.0, embedding_width: 20, "
        "generator_divisor: 2}",
        "objective=replaced_tokens",
    ],
    "albert": [
        *EVALUATED,
        f"model={{kind: albert, {SMALL}, attention_dropout: 0.0, embedding_width: 20}}",
    ],
    "deberta": [*EVALUATED, f"model={{kind: deberta, {SMALL}, attention_dropout: 0.0}}"],
    "distillation": [*EVALUATED, "model.layers=1"],
}
GRAPHS = {
    "bert": 8,
    "roberta": 4,
    "t5": 8,
    "gpt2": 4,
    "electra": 6,
    "albert": 4,
    "deberta": 4,
    "distillation": 8,
}
"""The most graphs of each run in one process."""

QUICK = {("bert", "single"), ("t5", "single"), ("bert", "ddp"), ("gpt2", "fsdp")}


@pytest.fixture(scope="module")
def t5_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("graphs")
    return write_t5_experiment(
        make_dataset(folder / "dataset", "unigram"), folder / "experiment.yaml"
    )


def _cases() -> list[object]:
    found = [(name, strategy) for name in RUNS for strategy in ("single", "ddp", "fsdp")]
    return [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.long, id="-".join(case))
        for case in found
    ]


@pytest.mark.parametrize(("name", "strategy"), _cases())
def test_layers_have_few_static_graphs(
    name: str, strategy: str, request: pytest.FixtureRequest, experiment_file: str, tmp_path: Path
) -> None:
    file = request.getfixturevalue("t5_file") if name == "t5" else experiment_file
    settings = [f"strategy={strategy}", *RUNS[name]]
    if name == "distillation":
        teacher = request.getfixturevalue("finished_run")
        settings.append(
            f"objective={{kind: distillation, teacher: {teacher}, of: mlm, soft: 5.0, hard: 2.0, "
            "cosine: 1.0, positions: all}"
        )
    # Two processes where the strategy exchanges gradients inside of the backward pass.
    size = 1 if strategy == "single" else 2
    plain, found = (
        run_ranks(
            size, graphs.run, file, [*settings, f"output={tmp_path / str(each)}", f"{key}={each}"]
        )
        for key in ("training.compile",)
        for each in ("false", "true")
    )
    for without, rank in zip(plain, found, strict=True):
        assert without.graphs == 0
        assert not without.reported
        np.testing.assert_allclose(rank.losses, without.losses, rtol=1e-5)
        assert 0 < rank.graphs <= GRAPHS[name]
        assert rank.symbolic == 0
        # One more recompilation would be the one that found the limit and left layers eager.
        assert rank.recompilations < rank.graphs < compiled.LIMIT
        assert not rank.breaks
        # Only the first step of a phase and the first evaluation, which precedes the fifth row,
        # compile.
        assert len(set(rank.reported[:4])) == len(set(rank.reported[4:])) == 1
    if strategy == "single":
        (rank,) = found
        # The last evaluation is after the last row.
        assert rank.reported[-1] <= rank.graphs


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("roberta", "ddp"),
        pytest.param("gpt2", "fsdp", marks=pytest.mark.long),
        pytest.param("t5", "ddp", marks=pytest.mark.long),
        pytest.param("deberta", "fsdp", marks=pytest.mark.long),
    ],
)
def test_a_rank_compiles_nothing_for_its_own_data(
    name: str, strategy: str, request: pytest.FixtureRequest, experiment_file: str, tmp_path: Path
) -> None:
    """A rank that compiled in the middle of a phase would let all others wait."""
    file = request.getfixturevalue("t5_file") if name == "t5" else experiment_file
    batch = "training={compile: true, global_batch_size: 8, micro_batch_size: 2, steps: 6}"
    settings = [f"output={tmp_path}", f"strategy={strategy}", *RUNS[name], "phases=[]", batch]
    for counts in run_ranks(2, graphs.count_with_rare_batches, file, settings):
        steps, evaluations = counts[:6], counts[6:]
        assert set(steps) == {steps[0]}
        assert set(evaluations) == {evaluations[0]}
        assert 0 < steps[0] < evaluations[0] <= GRAPHS[name]


def test_too_many_shapes_are_an_error(experiment_file: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"training\.compile needs more than 2 graphs"):
        run_ranks(
            1,
            graphs.run_with_limit,
            experiment_file,
            [f"output={tmp_path}", "training.compile=true", *RUNS["bert"]],
            2,
        )


@pytest.mark.long
def test_batches_of_many_widths_have_symbolic_graphs(
    finished_run: Path, dataset_folder: Path, tmp_path: Path
) -> None:
    tasks.tune(
        "classification",
        tmp_path,
        finished_run,
        dataset_folder / "tokenizer",
        "training.steps=1",
        "schedule.warmup_steps=1",
    )
    # With the model that the command has found.
    file = tmp_path / "run-classification" / "config.yaml"
    settings = ["training.compile=true", "data.group_by_length=4", "training.steps=12"]
    (found,) = run_ranks(
        1, graphs.run, str(file), [f"output={tmp_path / 'run'}", "strategy=single", *settings]
    )
    assert found.symbolic > 0
    assert found.graphs <= 16
