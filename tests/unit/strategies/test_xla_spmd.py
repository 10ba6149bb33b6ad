"""Which rows the devices of a machine hold, for slices of several machines.

What needs XLA is in tests/xla.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from samestep.errors import ConfigError
from trainer.partition import SegmentParameter, StackedParameter, layer_shape
from trainer.strategies import Replica
from trainer.strategies.kinds.xla_spmd import Config, XlaSpmd


def held(rows: int, machines: int, devices: int, replicas: int = 1) -> list[tuple[int, int]]:
    """The rows of a matrix that each machine holds."""
    found = []
    for rank in range(machines):
        strategy = object.__new__(XlaSpmd)
        strategy._parts = machines * devices // replicas
        strategy.replica = Replica(rank, machines, devices)
        found.append(strategy._range(rows) if strategy._rows((rows, 3))[0] else (0, rows))
    return found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((16, 1, 4), [(0, 16)]),
        ((16, 2, 4), [(0, 8), (8, 16)]),
        ((30, 2, 4), [(0, 16), (16, 30)]),  # of 8 devices each has 4, and the last 2
        ((16, 4, 2, 2), [(0, 8), (8, 16), (0, 8), (8, 16)]),  # each copy on two machines
        ((16, 2, 4, 2), [(0, 16), (0, 16)]),  # each copy on a machine
        ((16, 2, 4, 4), [(0, 16), (0, 16)]),  # two copies on each
        ((5, 2, 4), [(0, 5), (0, 5)]),  # some devices would have none: whole on all
    ],
)
def test_machines_hold_ranges_of_rows(
    arguments: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    assert held(*arguments) == expected


class Devices:
    """The part of torch-xla that moves state, for one of two machines with two devices each.

    Tensors are on the CPU.
    """

    def __init__(self, strategy: XlaSpmd) -> None:
        self.strategy = strategy
        self.sent: dict[int, list[Tensor]] = {}

    def _get_xla_sharding_spec(self, tensor: Tensor) -> str:
        return "{devices=[4]}" if self.strategy._rows(layer_shape(tensor))[0] else "{replicated}"

    def _get_local_shard_replica_and_indices(
        self, tensors: list[Tensor]
    ) -> list[list[tuple[int, Any]]]:
        return [
            [
                (0, ... if rows is None else (*[slice(None)] * dim, rows))
                for rows, dim in self._of(tensors[0])
            ]
        ]

    def _get_local_shards(self, tensors: list[Tensor]) -> list[list[tuple[Tensor, str]]]:
        (tensor,), shards = tensors, []
        for rows, dim in self._of(tensor):
            if rows is None:
                shards.append((tensor.detach().clone(), "device"))
                continue
            most = -(-tensor.shape[dim] // 4)
            shard = torch.full(
                (*tensor.shape[:dim], most, *tensor.shape[dim + 1 :]), -1.0
            )  # padded with anything
            shard.narrow(dim, 0, rows.stop - rows.start).copy_(
                tensor.narrow(dim, rows.start, rows.stop - rows.start)
            )
            shards.append((shard, "device"))
        return [shards]

    def _xla_get_runtime_devices(self) -> list[str]:
        return ["TPU:0", "TPU:1"]

    def _load_local_shards(self, tensor: Tensor, shards: list[Tensor], devices: list[str]) -> None:
        assert len(shards) == len(devices)
        self.sent[tensor.data_ptr()] = shards

    def _of(self, tensor: Tensor) -> list[tuple[slice | None, int]]:
        """The rows of each of this machine's devices (None: all of them), and which dimension they
        are.
        """
        dim = int(isinstance(tensor, StackedParameter))
        most, numbers = (
            -(-tensor.shape[dim] // 4),
            (2 * self.strategy.replica.index, 2 * self.strategy.replica.index + 1),
        )
        if self._get_xla_sharding_spec(tensor) == "{replicated}":
            return [(None, dim)] * 2
        return [(slice(n * most, min((n + 1) * most, tensor.shape[dim])), dim) for n in numbers]


def machine(rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[XlaSpmd, Devices]:
    strategy = object.__new__(XlaSpmd)
    strategy._parts, strategy._host, strategy.replica = 4, {}, Replica(rank, 2, 2)
    strategy._group = cast(Any, "both machines")
    strategy.accelerator = cast(Any, SimpleNamespace(graph=lambda name: nullcontext()))
    devices = Devices(strategy)
    model = SimpleNamespace(wait_device_ops=lambda: None)
    for name, module in {
        "torch_xla": SimpleNamespace(_XLAC=devices, core=SimpleNamespace(xla_model=model)),
        "torch_xla.core": SimpleNamespace(xla_model=model),
        "torch_xla.core.xla_model": model,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return strategy, devices


def test_machines_save_and_restore_their_rows_of_each_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 10 rows the four devices have 3, 3, 3 and 1; vectors are whole."""
    layers = ("layers.0", "layers.1", "layers.2")

    def state() -> dict[str, Tensor]:
        return {
            "model/layers.0.w": StackedParameter(
                torch.randn(3, 10, 4), tuple(f"{each}.w" for each in layers), False
            ),
            "optimizer/exp_avg/layers.0.b": StackedParameter(
                torch.randn(3, 10), tuple(f"{each}.b" for each in layers), False
            ),
            "model/table": torch.randn(10, 2),
        }

    tensors = state()
    single = {"model/table": tensors["model/table"]}
    single |= {
        f"model/{each}.w": row
        for each, row in zip(layers, tensors["model/layers.0.w"], strict=True)
    }
    vectors = {
        f"optimizer/exp_avg/{each}.b": row
        for each, row in zip(layers, tensors["optimizer/exp_avg/layers.0.b"], strict=True)
    }
    parts: dict[str, list[Tensor]] = {name: [] for name in single}
    for rank in range(2):
        strategy, devices = machine(rank, monkeypatch)
        host = strategy.to_host(tensors)
        assert host.keys() == single.keys() | vectors.keys()
        for name, whole in vectors.items():
            assert torch.equal(host[name], whole)
        for name, whole in single.items():
            part = host[name]
            assert isinstance(part, SegmentParameter)
            assert (part.segment.shape, part.segment.start) == (
                tuple(whole.shape),
                (0, 6)[rank] * whole.shape[1],
            )
            parts[name].append(part.clone())
        # What is restored comes into the same memory, and from there to the devices.
        expected, target = {name: 2 * part for name, part in host.items()}, state()
        for part in host.values():
            part.data.mul_(2)
        strategy.from_host(target)
        vector = cast(StackedParameter, target["optimizer/exp_avg/layers.0.b"])
        assert torch.equal(
            torch.stack([expected[f"optimizer/exp_avg/{each}.b"] for each in layers]), vector
        )
        for name in ("model/layers.0.w", "model/table"):
            shards, ((first, _), (second, dim)) = (
                devices.sent[target[name].data_ptr()],
                devices._of(target[name]),
            )
            assert first is not None
            assert second is not None
            rows = second.stop - second.start
            sent = torch.cat([shards[0], shards[1].narrow(dim, 0, rows)], dim)
            assert torch.equal(
                sent, 2 * tensors[name].narrow(dim, first.start, second.stop - first.start)
            )
            assert {tuple(shard.shape) for shard in shards} == {tuple(shards[0].shape)}
    for name, whole in single.items():
        assert torch.equal(torch.cat(parts[name]).view(whole.shape), whole)


def test_machines_take_their_rows_of_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have the rows of both machines; each has fed, and is to score, 4 of 8."""
    outputs = [torch.randn(8, 3), torch.randn(8, 3)]
    for rank in range(2):
        strategy, _ = machine(rank, monkeypatch)
        for rows, whole in zip(strategy.rows_on_host(outputs), outputs, strict=True):
            assert torch.equal(rows, whole[4 * rank : 4 * rank + 4])


def test_learning_rates_of_layers_need_layers_apart() -> None:
    experiment = {
        "training": {"compile": False, "activation_checkpointing": False},
        "optimizer": {"layer_decay": 0.8},
    }
    Config(scan_layers=False).check(experiment)
    with pytest.raises(ConfigError, match=r"strategy\.scan_layers=false"):
        Config().check(experiment)
    Config().check({**experiment, "optimizer": {"layer_decay": 1.0}})
    with pytest.raises(ConfigError, match=r"optimizer\.unfreeze_every gives each stage"):
        Config().check({**experiment, "optimizer": {"unfreeze_every": 100}})
    Config().check({**experiment, "optimizer": {}})
