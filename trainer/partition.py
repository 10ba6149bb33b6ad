"""Which part of a split tensor a process holds."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The part of a tensor that this process holds, and where it starts in the whole one, per dimension.

    All of a plain tensor; of a DTensor the local part. Its place is computed here, by the rule of `torch.chunk` that
    DTensor follows; torch's own function for it is private and has moved between releases.
    """
    offset = [0] * tensor.ndim
    if not isinstance(tensor, DTensor):
        return tensor, tuple(offset)
    shape = list(tensor.shape)
    for dimension, placement in enumerate(tensor.placements):
        assert type(placement) in (Shard, Replicate), f"{placement} is not a plain split"
        if isinstance(placement, Shard):
            length, parts = shape[placement.dim], tensor.device_mesh.size(dimension)
            chunk = -(-length // parts)
            start = min(length, chunk * tensor.device_mesh.get_local_rank(dimension))
            offset[placement.dim] += start
            shape[placement.dim] = min(chunk, length - start)
    local = tensor.to_local()
    assert local.shape == tuple(shape), f"{list(local.shape)} here, {shape} by its placements {tensor.placements}"
    return local, tuple(offset)
