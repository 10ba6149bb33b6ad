"""The terms of distillation's loss equal the papers', however a step's batch is split."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from samestep.config import decode
from samestep.errors import ConfigError
from samestep.examples import HOST_COLUMNS, Examples, Vocabulary
from tests.outputs import outputs
from tests.unit.objectives.texts import pack
from trainer.models.families import bert
from trainer.objectives import Objective
from trainer.objectives.kinds import causal_lm, classification, distillation, mlm, regression

PAD, CLS, SEP, MASK = range(4)
VOCABULARY = Vocabulary(1000, PAD, CLS, SEP, MASK, (PAD, CLS, SEP, MASK))
LENGTH = 24


def student(layers: int = 1, seed: int = 1, **settings: Any) -> nn.Module:
    config = bert.Config(
        1000,
        layers=layers,
        width=16,
        heads=2,
        ffn_width=32,
        max_positions=LENGTH,
        dropout=0.0,
        attention_dropout=0.0,
        initializer_range=0.3,
        **settings,
    )
    model = config.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                model.initial_values(name, 0, parameter.numel(), seed).view_as(parameter)
            )
    return model


def build(of: Any, teacher: nn.Module, **settings: Any) -> Objective:
    objective = distillation.Config("teacher", of, **settings).build(VOCABULARY)
    objective.attach(teacher.requires_grad_(False).eval())
    return objective


def texts() -> Examples:
    """Five rows, the last of which only pads the batch."""
    examples, _ = pack(
        [9, 17, 4, 22, 12], mlm.Config().build(VOCABULARY).pack_spec(LENGTH), "padded"
    )
    return dataclasses.replace(examples, weight=np.array([1, 1, 1, 1, 0], dtype=np.float32))


def batch_of(objective: Objective, examples: Examples) -> dict[str, Tensor]:
    arrays = objective.collate(examples, LENGTH)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def totals_of(objective: Objective, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.tensor(weight) for name, weight in objective.weights(batch).items()}


def softmax(logits: Tensor, temperature: float) -> Tensor:
    """Equation 1 of Hinton et al. 2015."""
    exponentials = (logits.double() / temperature).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


@pytest.mark.parametrize("positions", ["predicted", "all"])
def test_the_loss_equals_the_papers(positions: str) -> None:
    """With the weights of DistilBERT, computed position by position."""
    model, teacher, temperature = student(), student(2, seed=2), 2.0
    objective = build(
        mlm.Config(),
        teacher,
        temperature=temperature,
        soft=5.0,
        hard=2.0,
        mse=0.01,
        cosine=1.0,
        positions=positions,
    )
    batch = batch_of(objective, texts())
    assert batch.keys().isdisjoint(HOST_COLUMNS)  # which the loader keeps from the device
    loss = objective.loss(model, batch, totals_of(objective, batch))
    given = {name: batch[name] for name in ("tokens", "segments", "positions")}
    with torch.no_grad():
        (own, own_states), (taught, taught_states) = (
            outputs(each, "tokens", "hidden", **given) for each in (model, teacher)
        )
    terms: dict[str, list[float]] = {"soft": [], "hard": [], "mse": [], "cosine": []}
    for row in range(4):  # without the one that only pads
        predicted = batch["predicted"][row][batch["weights"][row] > 0].tolist()
        filled = torch.nonzero(batch["segments"][row])[:, 0].tolist()
        assert len(predicted) < len(filled) <= LENGTH
        for position in predicted if positions == "predicted" else filled:
            p, q = (softmax(each[row, position], temperature) for each in (taught, own))
            terms["soft"].append(float(temperature**2 * (p * (p / q).log()).sum()))
            terms["mse"].append(
                float((taught[row, position] - own[row, position]).double().square().sum())
            )
        for position in filled:
            a, b = own_states[row, position].double(), taught_states[row, position].double()
            terms["cosine"].append(float(1 - a @ b / (a.norm() * b.norm())))
        for number, position in enumerate(predicted):
            terms["hard"].append(
                -math.log(float(softmax(own[row, position], 1.0)[batch["labels"][row, number]]))
            )
    means = {name: sum(values) / len(values) for name, values in terms.items()}
    expected = 5 * means["soft"] + 2 * means["hard"] + 0.01 * means["mse"] + means["cosine"]
    assert loss.total.item() == pytest.approx(expected, rel=1e-5)
    found = {name: float(total / weight) for name, (total, weight) in loss.metrics.items()}
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    names = {"soft": "soft_loss", "hard": "hard_loss", "mse": "mse", "cosine": "cosine_loss"}
    assert {key: found[name] for key, name in names.items()} == pytest.approx(means, rel=1e-5)
    assert 0 <= found["agreement"] <= 1
    assert "accuracy" in found
    loss.total.backward()
    assert all(
        parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad
    )
    assert all(parameter.grad is None for parameter in teacher.parameters())


SETTINGS: list[dict[str, Any]] = [
    {"soft": 1.0},
    {"soft": 1.0, "hard": 0.5, "temperature": 1.0},
    {"soft": 5.0, "hard": 2.0, "cosine": 1.0, "positions": "all"},
    {"soft": 0.0, "mse": 1.0, "cosine": 0.5},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_losses_of_micro_batches_add_up(settings: dict[str, Any]) -> None:
    """With their gradients; rows that only pad the batch change nothing."""
    model, teacher = student(), student(2, seed=2)
    objective = build(mlm.Config(), teacher, **settings)
    batch = batch_of(objective, texts())
    totals = totals_of(objective, batch)

    def run(rows: list[slice]) -> tuple[float, list[Tensor], dict[str, Tensor]]:
        model.zero_grad()
        parts = [{name: array[each] for name, array in batch.items()} for each in rows]
        losses = [objective.loss(model, part, totals) for part in parts]
        for loss in losses:
            loss.total.backward()
        names = losses[0].metrics
        metrics = {
            name: torch.stack([torch.stack(each.metrics[name]) for each in losses]).sum(0)
            for name in names
        }
        return (
            sum(float(loss.total) for loss in losses),
            [parameter.grad.clone() for parameter in model.parameters()],
            metrics,
        )

    (whole, gradients, metrics), (cut, cut_gradients, cut_metrics) = (
        run([slice(0, 4)]),
        run([slice(0, 1), slice(1, 5)]),
    )
    assert whole == pytest.approx(cut, rel=1e-6)
    largest = max(
        float(each.abs().max()) for each in gradients
    )  # a sum of large terms is no better than they are
    torch.testing.assert_close(cut_gradients, gradients, rtol=1e-4, atol=1e-6 * max(1.0, largest))
    torch.testing.assert_close(cut_metrics, metrics, rtol=1e-5, atol=1e-5)
    total, weight = metrics["loss"]
    assert float(total / weight) == pytest.approx(whole, rel=1e-6)


def test_a_student_that_equals_its_teacher_has_nothing_to_learn() -> None:
    """Whatever the dropout of the teacher's own training."""
    model = student(2, seed=2)
    teacher = bert.Config(
        **{**vars(model.config), "dropout": 0.5, "attention_dropout": 0.5}
    ).build()
    teacher.load_state_dict(model.state_dict())
    objective = build(mlm.Config(), teacher, soft=1.0, mse=1.0, cosine=1.0)
    batch = batch_of(objective, texts()) | {"dropout_key": torch.arange(5, dtype=torch.int32)}
    loss = objective.loss(model, batch, totals_of(objective, batch))
    assert float(loss.total) == pytest.approx(0.0, abs=1e-5)
    assert float(loss.metrics["agreement"][0] / loss.metrics["agreement"][1]) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"of": "mlm_nsp"},
            "of is mlm_nsp, whose predictions cannot be compared. Use one of causal_lm",
        ),
        ({"of": {"kind": "distillation", "teacher": "b", "of": "mlm"}}, "of is distillation"),
        ({"of": "regression"}, "Set soft to 0, and mse to 1"),
        ({"of": "mlm", "soft": 0}, "nothing is learned from the teacher. Set soft to 1"),
        ({"of": "mlm", "hard": -1}, "hard is -1"),
        ({"of": "mlm", "temperature": 0}, "temperature is 0"),
        ({"of": "classification", "positions": "all"}, "positions is all, which is for mlm"),
        ({"of": {"kind": "classification", "lm_weight": 0.5}}, r"of.lm_weight is 0.5"),
        ({"of": {"kind": "tagging", "crf": True}}, r"of.crf is true"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decode(distillation.Config, {"teacher": "a", **settings})


def test_scores_and_layout_are_the_inner_objectives_and_need_no_teacher() -> None:
    for of in (classification.Config(), regression.Config()):
        soft = 0.0 if isinstance(of, regression.Config) else 1.0
        objective, own = (
            distillation.Config("a", of, soft=soft, mse=1.0).build(VOCABULARY),
            of.build(VOCABULARY),
        )
        assert objective.pack_spec(LENGTH) == own.pack_spec(LENGTH)
        assert (objective.needs, objective.predicts) == (own.needs, own.predicts)
        assert hasattr(objective, "scores")
    assert not hasattr(distillation.Config("a", mlm.Config()).build(VOCABULARY), "scores")


def layer_distances(model: nn.Module, teacher: nn.Module, batch: dict[str, Tensor]) -> list[float]:
    """Equations 7 to 9 of Jiao et al. 2020, token by token; for layers 0, 1 and 0, 2."""
    given = {name: batch[name] for name in ("tokens", "segments", "positions")}
    with torch.no_grad():
        own = outputs(model, "layer.0", "layer.1", "attention.1", **given)
        their = outputs(teacher, "layer.0", "layer.2", "attention.2", **given)
        wide = getattr(model, "fit_head", None)
        hidden, attention, tokens, pairs = 0.0, 0.0, 0, 0
        for row in range(4):  # without the one that only pads
            filled = torch.nonzero(batch["segments"][row])[:, 0].tolist()
            tokens += len(filled)
            for at in filled:
                for mine, theirs in zip(own[:2], their[:2], strict=True):
                    state = mine[row, at] if wide is None else wide(mine[row, at])
                    hidden += float((state - theirs[row, at]).square().mean())
                for to in filled:
                    change = own[2][row, :, at, to] - their[2][row, :, at, to]
                    attention += float(change.square().mean())
                    pairs += 1
    return [hidden / tokens, attention / pairs]


@pytest.mark.parametrize("wide", [0, 16])
@pytest.mark.parametrize("soft", [0.0, 1.0])
def test_layers_are_compared_as_in_tinybert(soft: float, wide: int) -> None:
    model, teacher = student(teacher_width=wide), student(2, seed=2)
    objective = build(mlm.Config(), teacher, soft=soft, hidden=2.0, attention=0.5, layer_map=(0, 2))
    batch = batch_of(objective, texts())
    loss = objective.loss(model, batch, totals_of(objective, batch))
    means = {name: float(total / weight) for name, (total, weight) in loss.metrics.items()}
    expected = layer_distances(model, teacher, batch)
    assert [means["hidden_loss"], means["attention_loss"]] == pytest.approx(expected, rel=1e-5)
    whole = 2.0 * expected[0] + 0.5 * expected[1] + soft * means.get("soft_loss", 0.0)
    assert means["loss"] == pytest.approx(whole, rel=1e-5)
    loss.total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    head = model.get_parameter("head.dense.weight").grad
    assert head is not None
    assert bool(head.any()) == (soft > 0)
    assert all(bool(each.grad.isfinite().all()) for each in model.parameters())  # type: ignore[union-attr]


def test_pairs_are_counted_without_an_array_of_them() -> None:
    """Of rows with several sequences; a row of weight 0 has none."""
    length = 256
    objective = build(mlm.Config(), student(), attention=1.0, layer_map=(0, 1))
    packed, _ = pack([9, 17, 90, 120, 200, 3] * 4, objective.pack_spec(length), "best_fit")
    weight = np.ones_like(packed.weight)
    weight[-1] = 0
    examples = dataclasses.replace(packed, weight=weight)
    tracemalloc.start()
    batch = objective.collate(examples, length)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < batch["segments"].size * length  # a byte for each pair of positions
    segments = batch["segments"]
    assert segments.max() > 2
    pairs = (segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, :, None]
    expected = pairs.sum((1, 2)) * weight
    assert batch["pair_count"].dtype == np.float32
    assert batch["pair_count"].tolist() == expected.tolist()
    assert expected[-1] == 0


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"soft": 0.0}, "so nothing is learned from the teacher. Set soft to 1"),
        ({"hidden": 1.0}, r"For 4 layers and a teacher of 12 use \[0, 3, 6, 9, 12\]"),
        ({"hidden": 1.0, "layer_map": (1, 2)}, "need the teacher's layer for the embeddings, 0"),
        ({"layer_map": (0, 2)}, "Set them to 1, or leave layer_map out"),
        ({"attention": 1.0, "layer_map": (0, 4, 2)}, "layers of the teacher in ascending order"),
        ({"attention": -1.0}, "attention is -1.0. Use a weight above 0"),
    ],
)
def test_layer_maps_that_do_not_fit_are_refused(settings: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        distillation.Config("teacher", mlm.Config(), **settings)
    with pytest.raises(ConfigError, match="hidden and attention compare encoders"):
        distillation.Config("t", causal_lm.Config(), hidden=1.0, layer_map=(0, 2))
