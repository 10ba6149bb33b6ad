"""Silent corruption: parameters and optimizer state whose bits have changed although nobody has
written to them.

Replicas hold the same bits as long as all is well: they start from the same values, and make the
same updates with the same all-reduced gradients. So they compare with each other. A partition that
no other process holds can be compared
with itself only: nothing writes to it from one update to the next.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from trainer.errors import SamestepError
from trainer.hashing import mix
from trainer.partition import local_parts
from trainer.strategies import Strategy

_COLUMNS = 128
_FIX = (
    "a bit has flipped in memory or on the way, a computation went wrong, or there is a bug: test "
    "that machine before "
    "you use it again, and run the same command to go on from the newest checkpoint, which was "
    "checked"
)


class StateCheck:
    """Looks for silent corruption every so many steps, and before the state is saved.

    Args:
        strategy: says which processes are replicas of each other.
        tensors: gives the state by name, fp32 or 16 bits; of each, this process holds all or a
            part.
        every: steps between checks; None never checks.
    """

    def __init__(
        self, strategy: Strategy, tensors: Callable[[], Mapping[str, Tensor]], every: int | None
    ) -> None:
        self._strategy, self._tensors, self._every = strategy, tensors, every
        self._replicated = strategy.partitions < strategy.world.size
        self._remembered: Tensor | None = None
        self._compared = -1

    def after_update(self, step: int) -> None:
        """Compares replicas, or remembers the partition, if it is time for that.

        Args:
            step: the updates made.

        Raises:
            SamestepError: replicas differ; on all ranks.
        """
        if self._every is None or step % self._every:
            return
        if self._replicated:
            self._compare(step)
        else:
            self._remembered = fingerprint(self._tensors().values())

    def before_update(self, step: int) -> None:
        """Compares the partition with what was remembered after the last update, if it was.

        Args:
            step: the updates made.

        Raises:
            SamestepError: it has changed; on this rank.
        """
        remembered, self._remembered = self._remembered, None
        if remembered is None:
            return
        tensors = self._tensors()
        if bool((changed := fingerprint(tensors.values()) != remembered).any()):
            raise SamestepError(
                f"silent corruption on rank {self._strategy.world.rank} ({platform.node()}, pid "
                f"{os.getpid()}): since "
                f"the update of step {step} the bits of {_named(tensors, changed)} have changed, "
                "and nothing writes to "
                f"them there; {_FIX}"
            )

    def before_save(self, step: int) -> None:
        """Compares replicas, unless it has been done after this step.

        Raises:
            SamestepError: they differ; on all ranks.
        """
        if self._every is not None and self._replicated and self._compared != step:
            self._compare(step)

    def forget(self) -> None:
        """Forgets what is remembered: the state comes from a checkpoint now."""
        self._remembered, self._compared = None, -1

    def _compare(self, step: int) -> None:
        self._compared = step
        tensors, partitions = self._tensors(), self._strategy.partitions
        mine = fingerprint(tensors.values())
        whole = self._gather((mine * _factors(len(mine), mine.device)).sum())
        odd = odd_ones_out(whole.tolist(), partitions)
        if not odd:
            return
        theirs = self._gather(mine)
        replicas = range(odd[0] % partitions, len(theirs), partitions)
        sound = [rank for rank in replicas if rank not in odd]
        differ = (theirs[list(replicas)] != theirs[odd[0]]).any(0)
        nodes: list[str] = [""] * len(theirs)
        dist.all_gather_object(nodes, platform.node())
        who = " and ".join(f"rank {rank} ({nodes[rank]})" for rank in odd)
        raise SamestepError(
            f"silent corruption on {who}{'' if sound else ', one of them'}: after the update of "
            f"step {step} the bits "
            f"of {_named(tensors, differ)} are not those of "
            f"{'the other replicas' if sound else 'the other'}; {_FIX}"
        )

    def _gather(self, value: Tensor) -> Tensor:
        """Every rank's [...]: int64 [world size, ...]."""
        world = self._strategy.world
        values = torch.zeros((world.size, *value.shape), dtype=value.dtype, device=value.device)
        values[world.rank] = value
        return self._strategy.all_reduce(values)


def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Hashes the bits of the local part of each fp32 or 16-bit tensor, on its device.

    Int64 [number of tensors].

    The bits of an element are an integer. Integers are summed modulo 2**32 in 128 columns, at the
    speed of memory, and the sums, each multiplied by an odd number of its own, modulo 2**64. So a
    change of one element always shows; several go unnoticed with a probability of about 2**-32,
    unless they cancel in one column.
    """
    of_each = [_column_sums(part) for part in local_parts(tensors)]
    sums = torch.stack(
        [each.to(of_each[0].device) for each in of_each]
    )  # ZeRO may offload some of them
    return (sums * _factors(sums.shape[1], sums.device)).sum(1)


def odd_ones_out(values: Sequence[int], partitions: int) -> list[int]:
    """The ranks whose value is not that of most of their replicas.

    Of all of them, where there is no majority.

    Args:
        values: by rank; ranks that are equal modulo `partitions` are replicas.
        partitions: how many parts the state is split into.
    """
    odd = []
    for partition in range(partitions):
        ranks = range(partition, len(values), partitions)
        value, count = Counter(values[rank] for rank in ranks).most_common(1)[0]
        odd += [rank for rank in ranks if values[rank] != value or 2 * count <= len(ranks)]
    return sorted(odd)


def _column_sums(tensor: Tensor) -> Tensor:
    """Sums of the bits in 128 columns, and those of what does not fill a row: int64 [256]."""
    bits = tensor.detach().reshape(-1).view(torch.int32 if tensor.itemsize == 4 else torch.int16)
    rows = bits.numel() // _COLUMNS
    whole, rest = bits[: rows * _COLUMNS].view(rows, _COLUMNS), bits[rows * _COLUMNS :]
    rest = functional.pad(rest, (0, _COLUMNS - rest.numel()))
    return torch.cat((whole.sum(0, dtype=torch.int32), rest.int())).long()


def _factors(count: int, device: torch.device) -> Tensor:
    odd = mix(np.arange(count)) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)


def _named(tensors: Mapping[str, Tensor], chosen: Tensor) -> str:
    names = [name for name, is_chosen in zip(tensors, chosen.tolist(), strict=True) if is_chosen]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"
