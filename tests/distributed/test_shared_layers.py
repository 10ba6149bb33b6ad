"""Layers that several places share have the gradients of one process.

Those that serve as encoder and decoder (T5) are gathered and reduced twice in a step, those that a
stack repeats (ALBERT) once.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.outputs import predict
from tests.processes import run_ranks
from trainer.models.base import TransformerModel
from trainer.models.families import albert, t5


def build(family: str) -> TransformerModel:
    shape = {"vocab_size": 97, "width": 32, "heads": 4, "ffn_width": 48, "dropout": 0.1}
    if family == "t5":
        config = t5.Config(**shape, layers=2, head_width=12, architecture="shared_encoder_decoder")
    else:
        config = albert.Config(**shape, layers=6, groups=2, embedding_width=20, max_positions=32)
    model = config.build()
    assert isinstance(model, TransformerModel)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                model.initial_values(name, 0, parameter.numel(), seed=0).view_as(parameter)
            )
    return model


def gradients(family: str, strategy: str) -> dict[str, float]:
    """The largest relative difference of each gradient from that of one process with the whole
    batch.
    """
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 97, (4, 20), generator=generator)
    targets = torch.randint(0, 97, (4, 10), generator=generator)
    keys = torch.arange(4, dtype=torch.int32)
    columns = {"tokens": tokens, "dropout_key": keys}
    if family == "t5":
        columns["target_tokens"] = targets
    else:
        columns["positions"] = torch.arange(20).expand(4, -1)
    reference, model = build(family), build(family)
    predict(reference, **columns).square().mean().backward()
    wrapped: torch.nn.Module = model
    if strategy == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        model.activation_checkpointing = strategy == "fsdp with checkpointing"
        for unit in (*model.sharding_units(), model):
            fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
    own = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    predict(
        wrapped, **{name: values[own] for name, values in columns.items()}
    ).square().mean().backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient, expected = parameter.grad, reference.get_parameter(name).grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name] = ((whole - expected).abs().max() / expected.abs().max()).item()
    return found


def collectives() -> dict[str, int]:
    """The collectives of a forward and backward pass under FSDP2."""
    dist.init_process_group("gloo")
    model = build("albert")
    for unit in (*model.sharding_units(), model):
        fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
    tokens, positions = torch.zeros(2, 20, dtype=torch.int64), torch.arange(20).expand(2, -1)
    counts: dict[str, int] = {}
    for name in ("foreach_all_gather", "foreach_reduce"):
        setattr(_fsdp_param_group, name, counted(getattr(_fsdp_param_group, name), name, counts))
    predict(model, tokens=tokens, positions=positions).square().mean().backward()
    return counts


def counted(
    call: Callable[..., object], name: str, counts: dict[str, int]
) -> Callable[..., object]:
    def count(*arguments: object, **settings: object) -> object:
        counts[name] = counts.get(name, 0) + 1
        return call(*arguments, **settings)

    return count


def test_repeated_layers_are_gathered_and_reduced_once():
    for found in run_ranks(2, collectives):
        assert found == {"foreach_all_gather": 1, "foreach_reduce": 1}


@pytest.mark.parametrize("family", ["t5", "albert"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp with checkpointing"])
def test_gradients_are_those_of_one_process(family: str, strategy: str):
    for found in run_ranks(2, gradients, family, strategy):
        assert max(found.values()) < 1e-5, found
