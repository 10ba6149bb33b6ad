"""Layers that serve as encoder and decoder are gathered, and their gradients reduced, twice in a
step.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.outputs import predict
from tests.processes import run_ranks
from trainer.models import t5
from trainer.models.encoder_decoder import EncoderDecoder


def build() -> EncoderDecoder:
    config = t5.Config(
        vocab_size=97,
        layers=2,
        width=32,
        heads=4,
        head_width=12,
        ffn_width=48,
        architecture="shared_encoder_decoder",
    )
    model = config.build()
    assert isinstance(model, EncoderDecoder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                model.initial_values(name, 0, parameter.numel(), seed=0).view_as(parameter)
            )
    return model


def gradients(strategy: str) -> dict[str, float]:
    """The largest relative difference of each gradient from that of one process with the whole
    batch.
    """
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 97, (4, 20), generator=generator)
    targets = torch.randint(0, 97, (4, 10), generator=generator)
    keys = torch.arange(4, dtype=torch.int32)
    reference, model = build(), build()
    predict(
        reference, tokens=tokens, target_tokens=targets, dropout_key=keys
    ).square().mean().backward()
    wrapped: torch.nn.Module = model
    if strategy == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        model.activation_checkpointing = strategy == "fsdp with checkpointing"
        for unit in (*model.sharding_units(), model):
            fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
    own = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    columns = {"tokens": tokens, "target_tokens": targets, "dropout_key": keys}
    predict(
        wrapped, **{name: values[own] for name, values in columns.items()}
    ).square().mean().backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient, expected = parameter.grad, reference.get_parameter(name).grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[name] = ((whole - expected).abs().max() / expected.abs().max()).item()
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp with checkpointing"])
def test_gradients_are_those_of_one_process(strategy: str):
    for found in run_ranks(2, gradients, strategy):
        assert max(found.values()) < 1e-5, found
