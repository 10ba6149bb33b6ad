"""A step traced without memory makes the tensors that a real one makes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from samestep.config import load
from trainer.inspect.plan.batch import example, stand_in
from trainer.inspect.plan.strategies import interpolate
from trainer.inspect.plan.trace import Activations, LiveBytes, Step
from trainer.optim import Structure, groups
from trainer.training.experiment import Experiment

_ROWS = 3

_TASKS = {
    "classification": ["model.head=classification", "model.labels=[a,b,c]"],
    "classification, soft": [
        "objective.soft=true",
        "model.head=classification",
        "model.labels=[a,b,c]",
    ],
    "regression": ["model.head=classification", "model.labels=[score]"],
    "multiple_choice": ["model.head=multiple_choice", "objective.choices=3"],
    "ranking": [
        "model.head=classification",
        "model.labels=[score]",
        "objective.negatives=2",
    ],
    "question_answering": [
        "model.head=question_answering",
        "objective.question_length=8",
        "objective.stride=8",
    ],
    "tagging": ["model.head=tagging", "model.labels=[O,B-PER,I-PER]"],
}


def _saved_by_autograd(experiment: Experiment, rows: int) -> tuple[int, Any]:
    """Bytes of the tensors that autograd keeps at the end of a real forward pass, and the loss."""
    objective = experiment.objective.build(stand_in(experiment.model.vocab_size))
    columns = example(experiment, objective, experiment.resolved_phases()[0])
    batch = {
        name: torch.from_numpy(column).repeat_interleave(rows, 0)
        for name, column in columns.items()
    }
    model = experiment.model.build().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    model.activation_checkpointing = experiment.training.activation_checkpointing
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = objective.loss(
            model, batch, {name: torch.ones(()) for name in objective.weights(columns)}
        )
    return sum(kept.values()), loss


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("recipe", ["experiment_file", "t5_experiment"])
def test_what_autograd_saves_is_what_a_real_forward_pass_saves(
    recipe: str, checkpointing: bool, request: pytest.FixtureRequest
) -> None:
    overrides = [f"training.activation_checkpointing={str(checkpointing).lower()}"]
    experiment = load(Experiment, request.getfixturevalue(recipe), overrides)
    measured, _ = _saved_by_autograd(experiment, _ROWS)
    step = Step(experiment, on_cpu=True)
    objective = experiment.objective.build(stand_in(experiment.model.vocab_size))
    columns = example(experiment, objective, experiment.resolved_phases()[0])
    assert step.activations(objective, columns, _ROWS).saved == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("task", _TASKS)
def test_tasks_are_traced_as_they_run(task: str, experiment_file: str) -> None:
    kind = task.partition(",")[0]
    experiment = load(
        Experiment, experiment_file, [f"objective={kind}", "data.packing=padded", *_TASKS[task]]
    )
    measured, _ = _saved_by_autograd(experiment, _ROWS)
    objective = experiment.objective.build(stand_in(experiment.model.vocab_size))
    columns = example(experiment, objective, experiment.resolved_phases()[0])
    choices = 3 if kind in ("multiple_choice", "ranking") else 1
    assert columns["tokens"].shape == columns["segments"].shape == (1, choices * 32)
    assert columns["segments"].all()
    assert columns["dropout_key"].size == choices
    assert Step(experiment, on_cpu=True).activations(
        objective, columns, _ROWS
    ).saved == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("recipe", "masks"), [("t5_base", False), ("ul2_base", True)])
def test_attention_needs_a_mask_where_joined_rows_have_padding(recipe: str, masks: bool) -> None:
    experiment = load(Experiment, f"recipes/pretrain/{recipe}")
    assert experiment.data.packing == "concat"
    objective = experiment.objective.build(stand_in(experiment.model.vocab_size))
    columns = example(experiment, objective, experiment.resolved_phases()[0])
    assert ("segments" in columns, "target_segments" in columns) == (masks, masks)


def test_checkpointing_trades_activations_for_work(experiment_file: str) -> None:
    objective = load(Experiment, experiment_file).objective.build(stand_in(400))
    peaks = []
    for checkpointing in ("false", "true"):
        experiment = load(
            Experiment, experiment_file, [f"training.activation_checkpointing={checkpointing}"]
        )
        columns = example(experiment, objective, experiment.resolved_phases()[0])
        peaks.append(Step(experiment, on_cpu=True).activations(objective, columns, 64))
    assert peaks[1].saved < 0.5 * peaks[0].saved
    assert peaks[1].bare < peaks[0].bare


@pytest.mark.long
def test_interpolation_is_never_too_little(experiment_file: str) -> None:
    experiment = load(Experiment, experiment_file)
    objective = experiment.objective.build(stand_in(experiment.model.vocab_size))
    columns = example(experiment, objective, experiment.resolved_phases()[0])
    step = Step(experiment, on_cpu=True)
    bounds = [(rows, step.activations(objective, columns, rows)) for rows in (1, 32)]
    for rows in (2, 8, 31):
        exact, estimate = step.activations(objective, columns, rows), interpolate(rows, bounds)
        assert exact.bare <= estimate.bare <= 1.1 * exact.bare


@pytest.mark.parametrize("kind", ["adamw", "lamb", "adafactor", "adamw_scale"])
def test_the_optimizer_keeps_what_a_real_one_keeps(kind: str, experiment_file: str) -> None:
    experiment = load(Experiment, experiment_file, [f"optimizer.kind={kind}"])
    model: Any = experiment.model.build()
    optimizer = experiment.optimizer.build(model.named_parameters(), Structure.of(model))
    groups.prime(optimizer)
    real = {name: list(optimizer.state[each].items()) for name, each in model.named_parameters()}
    planned = Step(experiment, on_cpu=True).parameters
    assert {name: each.shape for name, each in planned.items()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    assert {name: list(each.state) for name, each in planned.items()} == {
        name: [tuple(value.shape) for key, value in state if key != "step"]
        for name, state in real.items()
    }


def test_bytes_are_counted_while_they_live_and_views_once() -> None:
    with LiveBytes() as live:
        first = torch.ones(100)
        view = first[10:].view(9, 10)
        second = view * 2
        assert live.live == [100 * 4 + 90 * 4, 0, 0]
        del first, view
        assert live.live == [90 * 4, 0, 0]
        second.add_(1)
    assert live.peaks == [190 * 4] * 3


def test_copies_of_weights_are_counted_apart() -> None:
    root, other = torch.ones(8), torch.ones(16)
    with LiveBytes([root, other], {root: 1, other: 2}) as live:
        copies = root.bfloat16(), other.bfloat16(), torch.ones(4)
    assert live.live == [4 * 4, 8 * 2, 16 * 2]
    assert live.peaks == [16, 32, 64]
    assert len(copies) == 3


LONG = [
    "data.sequence_length=512",
    "accelerator=cuda",
    "model={kind: bert, vocab_size: 600, layers: 2, width: 64, heads: 2, ffn_width: 128, "
    "max_positions: 512, attention_dropout: 0.1}",
]


def activations(file: str, *overrides: str, rows: int = 8) -> tuple[Step, Activations, Activations]:
    """A step on a GPU, and its activations without and with fused attention, if it has it."""
    experiment = load(Experiment, file, [*LONG, *overrides])
    objective = experiment.objective.build(stand_in(experiment.model.vocab_size))
    columns = example(experiment, objective, experiment.resolved_phases()[0])
    step = Step(experiment, on_cpu=False)
    unfused, fused = (step.activations(objective, columns, rows, each) for each in (False, True))
    return step, unfused, fused


@pytest.mark.long
def test_fused_attention_saves_no_scores(experiment_file: str) -> None:
    step, unfused, fused = activations(experiment_file)
    assert step.fuses_attention
    # Probabilities, and what dropout multiplies them with and makes of them, in fp32.
    scores = 2 * 8 * 2 * 512 * 512 * 4
    assert 2.5 * scores < unfused.saved - fused.saved < 3.6 * scores
    assert unfused.bare - fused.bare > 2.5 * scores


@pytest.mark.parametrize(
    "overrides",
    [
        ["accelerator={kind: cuda, fused_attention: false}"],
        ["model.heads=1", "model.width=48"],  # no block sizes for heads of 48
        [LONG[2].replace("bert", "deberta_v2").replace("}", ", position_buckets: 32}")],
        ["accelerator=xla"],
    ],
    ids=["off", "width", "family", "device"],
)
def test_runs_that_cannot_fuse_are_planned_unfused(
    experiment_file: str, overrides: list[str]
) -> None:
    step, unfused, fused = activations(experiment_file, *overrides, rows=2)
    assert not step.fuses_attention
    assert fused == unfused


def test_fused_attention_is_planned_without_triton(
    experiment_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # cannot be imported
    step, unfused, fused = activations(experiment_file)
    assert step.fuses_attention
    assert fused.bare < unfused.bare


def _on_tpus(file: str, *overrides: str, rows: int = 2) -> Activations:
    settings = [*LONG, "accelerator=xla", "training.precision=bf16", *overrides]
    experiment = load(Experiment, file, settings)
    objective = experiment.objective.build(stand_in(experiment.model.vocab_size))
    columns = example(experiment, objective, experiment.resolved_phases()[0])
    return Step(experiment, on_cpu=False).activations(objective, columns, rows)


def test_layer_norms_keep_their_output_under_xla(experiment_file: str) -> None:
    """For the gradient of their weight."""
    on_gpu, on_tpus = (
        _on_tpus(experiment_file, f"strategy={each}") for each in ("fsdp", "xla_spmd")
    )
    experiment = load(Experiment, experiment_file, LONG)
    hidden = 2 * 512 * experiment.model.width * 4
    norms = 2 * experiment.model.layers
    # The last layer has few positions, but the embeddings and the head have norms, too.
    assert (norms - 2) * hidden < on_tpus.saved - on_gpu.saved < (norms + 2) * hidden


def test_the_kernel_of_tpus_is_planned_from_its_length_on(experiment_file: str) -> None:
    model = LONG[2].replace("attention_dropout: 0.1", "attention_dropout: 0.0")
    without, with_kernel = (
        _on_tpus(experiment_file, model, f"strategy={{kind: xla_spmd, flash_attention_from: {n}}}")
        for n in ("null", "512")
    )
    experiment = load(Experiment, experiment_file, [*LONG, model])
    heads, kernels = experiment.model.heads, experiment.model.layers - 1
    # A layer with the kernel keeps no probabilities, but pads queries, keys, values and outputs.
    scores = 2 * heads * 512 * 512 * 2
    padded = 4 * 2 * heads * 512 * 128 * 2
    saved = without.saved - with_kernel.saved
    assert kernels * (scores - padded) < saved < kernels * scores


def test_logits_are_whole_and_in_16_bits_under_xla(experiment_file: str) -> None:
    """The peak grows by them, and by nothing in fp32."""
    peaks = [
        _on_tpus(experiment_file, "strategy=xla_spmd", f"model.vocab_size={size}", rows=64).bare
        for size in (200_000, 400_000)
    ]
    predictions = 64 * round(0.15 * 512)
    logits = 2 * predictions * 200_000
    assert 0.9 * logits < peaks[1] - peaks[0] < 1.3 * logits
