"""What the bits of a result depend on besides the experiment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from samestep.errors import ConfigError
from tests.processes import run_ranks
from trainer.accelerators.detect import detect
from trainer.strategies.world import World
from trainer.training.compute.arithmetic import arithmetic


def described(threads: list[int]) -> dict[str, str]:
    """In a rank with this number of threads."""
    world = World.start(60)
    accelerator = detect()
    world.connect(accelerator.collective_backend, accelerator.collective_device)
    torch.set_num_threads(threads[world.rank])
    strategy = cast(Any, SimpleNamespace(accelerator=accelerator, world=world))
    try:
        return arithmetic(strategy, cast(Any, SimpleNamespace(fuses_attention=False)))
    except ConfigError as error:
        return {"error": str(error)}
    finally:
        world.close()


def test_equal_ranks_have_one_description() -> None:
    first, second = run_ranks(2, described, [1, 1])
    assert first == second
    assert first["device"] == "CPU, 1 thread"
    assert first["attention"] == "unfused"
    assert first["processor"]


@pytest.mark.parametrize("threads", [[1, 2], [2, 1]])
def test_ranks_that_differ_are_named(threads: list[int]) -> None:
    for found in run_ranks(2, described, threads):
        assert "the device of rank 1 is CPU, " in found["error"]
        assert "training.exact=tolerance" in found["error"]
