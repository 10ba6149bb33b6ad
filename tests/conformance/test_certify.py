"""`samestep certify`: names a planted fault by rank, kernel and collective."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.cli import main
from samestep.terminal import Console
from tests.integration.commands import Samestep, Start
from tests.processes import run_ranks
from trainer.accelerators import detect
from trainer.accelerators.kinds import cpu
from trainer.elastic import agent
from trainer.inspect.certify import collectives, layouts, problem
from trainer.inspect.certify import run as certifying
from trainer.inspect.certify.ranks import Ranks, first_odd
from trainer.inspect.certify.run import certify
from trainer.strategies.kinds import single
from trainer.strategies.world import World


class _Wrong(TorchDispatchMode):
    """Changes an element of every result of one operator."""

    def __init__(self, operator: str, change: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._operator, self._change = operator, change

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket._qualified_op_name == f"aten::{self._operator}":
            first = result[0] if isinstance(result, tuple) else result
            if first.numel() > 5:
                self._change(first)
        return result


class _Largest(TorchDispatchMode):
    """Measures the largest result of all operators."""

    elements = 0

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def larger(result: torch.Tensor) -> None:
    """On the device that is tested; the host computes in fp64."""
    if result.dtype != torch.float64:
        result.view(-1)[5] += 10


def last_bit(result: torch.Tensor) -> None:
    """Too small for a tolerance."""
    if result.dtype == torch.float32:
        result.view(-1).view(torch.int32)[5] ^= 1


@contextmanager
def dropped_element() -> Iterator[None]:
    reduce = dist.all_reduce

    def faulty(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        own = tensor.clone()
        work = reduce(tensor, *args, **kwargs)
        if tensor.numel() > 5:
            tensor.view(-1)[5] = own.view(-1)[5]  # the sum misses the others
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", faulty)
        yield


FAULTS: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "matmul": lambda: _Wrong("mm", larger),
    "last bit": lambda: _Wrong("native_layer_norm", last_bit),
    "all-reduce": dropped_element,
}


def _certify(output: Path, fault: str, on: int) -> None:
    import os

    context = FAULTS[fault if int(os.environ["RANK"]) == on else "none"]
    with context():
        certify(output, None, Console(quiet=True))


def run(tmp_path: Path, fault: str, on: int) -> dict[str, Any]:
    output = tmp_path / "certificate.json"
    run_ranks(3, _certify, output, fault, on)
    content: dict[str, Any] = json.loads(output.read_text())
    return content


def failed(content: dict[str, Any]) -> dict[str, str]:
    findings = content["findings"]
    return {each["subject"]: each["found"] for each in findings if each["state"] == "failed"}


@pytest.mark.long
def test_processes_of_this_machine(start: Start, tmp_path: Path, samestep: Samestep) -> None:
    """Two processes, then one, which has the same bits."""
    two, one = tmp_path / "two.json", tmp_path / "one.json"
    assert start("certify", "--processes", 2, "--output", two).wait(300).code == 0
    content = json.loads(two.read_text())
    assert content["passed"]
    assert not failed(content)
    assert len(content["ranks"]) == 2
    assert {"fp32 layouts", "bf16 layouts", "reduce-scatter"} <= {
        each["subject"] for each in content["findings"]
    }
    content["digests"]["fp32"]["state"]["model/embeddings.tokens.weight"] = "0" * 16
    two.write_text(json.dumps(content))
    arguments = ("certify", "--processes", 1, "--output", one, "--against", two)
    assert start(*arguments).wait(300).code == 1
    again = json.loads(one.read_text())
    assert list(failed(again)) == ["fp32 bits"]
    assert "1 of 102 tensors differ" in failed(again)["fp32 bits"]
    (other,) = (each for each in again["findings"] if each["subject"] == "bf16 bits")
    assert other["state"] == "ok"
    assert "is not a certificate" in samestep("certify", "--against", __file__).message
    assert "--processes is 0" in samestep("certify", "--processes", 0).message


@pytest.mark.chaos
def test_wrong_matrix_product(tmp_path: Path) -> None:
    content = run(tmp_path, "matmul", on=1)
    assert not content["passed"]
    found = failed(content)
    assert found["fp32 product"].startswith("rank 1 (")
    assert "1 of 512 rows are wrong, the first is row 0" in found["fp32 product"]
    assert "matrix product has an error of" in found["bf16 kernels"]


@pytest.mark.chaos
def test_wrong_bit_of_one_rank(tmp_path: Path) -> None:
    found = failed(run(tmp_path, "last bit", on=2))
    assert found["fp32 passes"].startswith("rank 2 (")
    assert "output of layer.0 differs from the others" in found["fp32 passes"]
    assert "fp32 kernels" not in found


@pytest.mark.chaos
def test_collective_that_drops_an_element(tmp_path: Path) -> None:
    found = failed(run(tmp_path, "all-reduce", on=0))
    assert found["all-reduce"].startswith("rank 0 (")
    assert "1 of 3,000 elements of float32 are wrong; element 5 is " in found["all-reduce"]
    assert "ddp and fsdp part in step 1" in found["fp32 layouts"]
    assert "fp32 passes" not in found


@pytest.mark.long
def test_collectives_take_the_memory_of_one_rank() -> None:
    """Not of all ranks on each, whose size would grow with the square of their number."""
    assert run_ranks(2, _check_collectives, (1, 1000)) == [2 * 1000] * 2


def _check_collectives(sizes: tuple[int, ...]) -> int:
    """The size of the largest tensor."""
    collectives._SIZES = sizes  # in this process only
    world = World.start(60)
    world.connect("gloo")
    largest = _Largest()
    with largest:
        found = list(
            collectives.check(torch.device("cpu"), Ranks.meet(world.rank, 2, world.host_group()))
        )
    assert [(each.subject, each.state) for each in found] == [
        (name, "ok") for name in ("all-reduce", "reduce-scatter", "all-gather", "broadcast")
    ]
    return largest.elements


@pytest.mark.long
def test_reference_losses_are_those_of_a_cpu() -> None:
    found = run_ranks(1, _train)[0]
    assert found == pytest.approx(layouts.reference(), rel=1e-5)
    assert found[-1] < found[0] - 2  # it learns


@pytest.mark.parametrize("good", range(problem.STEPS))
def test_losses_that_become_nan(good: int) -> None:
    expected = layouts.reference()
    assert layouts.compare_losses("fp32", expected).state == "ok"
    losses = expected[:good] + [math.nan] * (problem.STEPS - good)
    assert layouts.compare_losses("fp32", losses).state == "failed"


def _train() -> list[float]:
    accelerator, world = cpu.Config(threads=1).build(), World.start(60)
    world.connect("gloo")
    rows = layouts.train(single.Config(), accelerator, world, "fp32")
    return [row["loss"] for row in rows.values()]


def test_whom_to_blame() -> None:
    ranks = Ranks(0, ("a", "a", "b"), None)  # type: ignore[arg-type]
    equal = {"x": "1", "y": "2"}
    assert first_odd([equal, equal, equal]) is None
    assert first_odd([equal, equal, {"x": "1", "y": "3"}]) == ("y", [2])
    assert first_odd([equal, {"x": "5", "y": "3"}]) == ("x", [0, 1])
    assert ranks.named([1, 2]) == "rank 1 (a) and rank 2 (b)"


@pytest.mark.parametrize(("gpus", "processes"), [(0, 2), (1, 1), (8, 8)])
def test_one_process_for_each_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, processes: int
) -> None:
    """A rank of its own needs a GPU of its own; without GPUs, two on the CPU."""
    started = [1]  # this process
    monkeypatch.setattr(detect, "gpu_count", lambda: gpus)
    monkeypatch.setattr(agent, "run_workers", lambda *given: started.append(given[-1]) or 0)
    monkeypatch.setattr(certifying, "certify", lambda *_: True)
    assert main(["certify", "--output", str(tmp_path / "certificate.json")]) == 0
    assert started[-1] == processes
