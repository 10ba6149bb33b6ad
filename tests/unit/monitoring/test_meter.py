"""Weighted means over micro-batches and replicas."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from trainer.monitoring.meter import Meter


def pair(total: float, weight: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(total), torch.tensor(weight)


def alone(value: Tensor) -> Tensor:
    return value


def test_a_mean_is_the_sum_of_sums_over_the_sum_of_weights():
    meter = Meter()
    meter.add({"loss": pair(10, 2), "accuracy": pair(1, 2)})
    meter.add({"loss": pair(2, 6), "accuracy": pair(3, 6)})
    assert meter.compute(alone) == {"loss": 1.5, "accuracy": 0.5}


def test_replicas_are_reduced_together_in_one_call():
    meters = Meter(), Meter()
    meters[0].add({"loss": pair(10, 2), "norm": pair(3, 1)})
    meters[1].add({"loss": pair(20, 8), "norm": pair(3, 1)})
    calls = []

    def all_reduce(value: Tensor) -> Tensor:
        calls.append(value)
        return value + torch.tensor([[20.0, 8.0], [3.0, 1.0]])

    assert meters[0].compute(all_reduce) == {"loss": 3.0, "norm": 3.0}
    assert len(calls) == 1


def test_computing_starts_anew_and_an_empty_meter_calls_nobody():
    meter = Meter()
    meter.add({"loss": pair(10, 2)})
    meter.compute(alone)
    assert meter.compute(lambda _: pytest.fail("there is nothing to reduce")) == {}
    meter.add({"loss": pair(3, 1)})
    assert meter.compute(alone) == {"loss": 3.0}


def test_a_metric_of_weight_zero_is_left_out():
    meter = Meter()
    meter.add({"loss": pair(0, 0), "other": pair(1, 1)})
    assert meter.compute(alone) == {"other": 1.0}


def test_totals_can_be_stored_and_put_back():
    meter = Meter()
    meter.add({"loss": pair(0.1, 3), "early": pair(1, 1)})
    restored = Meter(before=json.loads(json.dumps(meter.totals(alone))))
    assert restored.totals(lambda _: pytest.fail("there is nothing to reduce")) == meter.totals(
        alone
    )
    for each in (meter, restored):
        each.add({"loss": pair(0.7, 2)})
    assert meter.compute(alone) == pytest.approx(restored.compute(alone))
    assert restored.compute(alone) == {}


def test_stored_totals_are_of_all_replicas_already():
    meter = Meter(before={"loss": (4.0, 2.0)})
    meter.add({"loss": pair(1, 1)})
    assert meter.totals(lambda value: 3 * value) == {"loss": (7.0, 5.0)}


def test_adding_keeps_no_graph_and_low_precision_is_summed_in_float32():
    meter = Meter()
    weight = torch.ones((), requires_grad=True)
    for _ in range(1000):
        meter.add({"loss": ((weight * 1.5).bfloat16(), torch.ones((), dtype=torch.bfloat16))})
    assert meter.totals(alone) == {"loss": (1500.0, 1000.0)}
