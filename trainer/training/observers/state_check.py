"""Silent corruption: bits of parameters or optimizer state that change without an update.

Replicas have the same bits: they start from the same values, and make the same updates with the
same all-reduced gradients. So replicas are compared with each other. A partition that no other rank
holds is compared with itself: nothing writes to it between one update and the next.

With 4 ranks and 2 partitions (HSDP), ranks 0 and 2 hold partition 0, and ranks 1 and 3 partition 1:

    rank      0   1   2   3
    hash      5   6   5   7    -> ranks 1 and 3 differ; of two, nobody knows which is right
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from samestep.errors import SamestepError
from samestep.hashing import odd_factors
from trainer.partition import local_parts
from trainer.strategies import Strategy
from trainer.training.observers import Observer
from trainer.training.passes import Gradients, MicroBatches
from trainer.training.state import Meta

_COLUMNS = 128
_FIX = (
    "a bit has flipped in memory or in transit, a computation went wrong, or there is a bug. Test "
    "that machine before you use it again. Run the same command to continue from the newest "
    "checkpoint, which was checked."
)


class StateCheck(Observer):
    """Checks for silent corruption every `every` steps, and before the state is saved.

    Args:
        strategy: tells which ranks are replicas of each other.
        tensors: returns the state by name, fp32 or 16 bits; this process's partition of each.
        every: steps between checks; None: never.
    """

    def __init__(
        self, strategy: Strategy, tensors: Callable[[], Mapping[str, Tensor]], every: int | None
    ) -> None:
        self._strategy, self._tensors, self._every = strategy, tensors, every
        self._replicated = strategy.partitions < strategy.world.size
        self._expected: Tensor | None = None  # hashes after the update, for `before_update`
        self._compared = -1  # the step of the last comparison of replicas

    def after_update(self, step: int, micro_batches: MicroBatches, gradients: Gradients) -> None:
        """Compares replicas, or hashes the partition for `before_update`, if a check is due.

        Args:
            step: number of updates so far.

        Raises:
            SamestepError: replicas differ; on all ranks.
        """
        if self._every is None or step % self._every:
            return
        if self._replicated:
            self._compare(step)
        else:
            self._expected = fingerprint(self._tensors().values())

    def before_update(self, step: int) -> None:
        """Compares the partition with its hashes after the last update, if there are any.

        Raises:
            SamestepError: it has changed; on this rank.
        """
        expected, self._expected = self._expected, None
        if expected is None:
            return
        tensors = self._tensors()
        changed = fingerprint(tensors.values()) != expected
        if bool(changed.any()):
            raise SamestepError(
                f"silent corruption on rank {self._strategy.world.rank} ({platform.node()}, pid "
                f"{os.getpid()}): since the update of step {step - 1} the bits of "
                f"{_named(tensors, changed)} have changed, although nothing writes to them; {_FIX}"
            )

    def before_save(self, step: int, failed: int | None) -> None:
        """Compares replicas, unless they were compared after this step.

        Raises:
            SamestepError: they differ; on all ranks.
        """
        if self._every is not None and self._replicated and self._compared != step:
            self._compare(step)

    def load_state_dict(self, meta: Meta) -> None:
        """Forgets all hashes: the state was restored."""
        self._expected, self._compared = None, -1

    def _compare(self, step: int) -> None:
        self._compared = step
        tensors, partitions = self._tensors(), self._strategy.partitions
        hashes = fingerprint(tensors.values())
        # First a single number per rank is exchanged. Only if these differ, the hash of each tensor
        # is, to name the tensors.
        total = self._gather((hashes * _factors(len(hashes), hashes.device)).sum())
        odd = odd_ones_out(total.tolist(), partitions)
        if not odd:
            return
        gathered = self._gather(hashes)  # [world size, number of tensors]
        replicas = range(odd[0] % partitions, len(gathered), partitions)
        majority = any(rank not in odd for rank in replicas)
        differ = (gathered[list(replicas)] != gathered[odd[0]]).any(0)
        nodes: list[str] = [""] * len(gathered)
        dist.all_gather_object(nodes, platform.node())
        who = " and ".join(f"rank {rank} ({nodes[rank]})" for rank in odd)
        raise SamestepError(
            f"silent corruption on {who}{'' if majority else ', one of them'}: after the update of "
            f"step {step} the bits of {_named(tensors, differ)} differ from "
            f"{'the other replicas' if majority else 'the other'}; {_FIX}"
        )

    def _gather(self, value: Tensor) -> Tensor:
        """Gathers int64 [...] of every rank: [world size, ...]."""
        # A sum, because every strategy has one on its own device: the other ranks add zeros.
        world = self._strategy.world
        values = torch.zeros((world.size, *value.shape), dtype=value.dtype, device=value.device)
        values[world.rank] = value
        return self._strategy.all_reduce(values)


def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Hashes the bits of the local partition of each fp32 or 16-bit tensor, on its device.

    The bits of an element are an integer. Integers are summed modulo 2**32 in 128 columns, at
    memory bandwidth. The sums are weighted by random odd numbers and summed modulo 2**64. So a
    change of one element always changes the hash. A change of several goes unnoticed with a
    probability of about 2**-32, or if the changes cancel in one column.

    Returns:
        Hashes, int64 [number of tensors].
    """
    parts = [_column_sums(part) for part in local_parts(tensors)]
    sums = torch.stack([part.to(parts[0].device) for part in parts])  # ZeRO may offload some
    return (sums * _factors(sums.shape[1], sums.device)).sum(1)


def odd_ones_out(values: Sequence[Hashable], partitions: int = 1) -> list[int]:
    """The ranks whose value differs from most of their replicas; all, if there is no majority.

    Args:
        values: by rank; ranks that are equal modulo `partitions` are replicas.
        partitions: number of partitions of the state.
    """
    odd = []
    for partition in range(partitions):
        ranks = range(partition, len(values), partitions)
        value, count = Counter(values[rank] for rank in ranks).most_common(1)[0]
        odd += [rank for rank in ranks if values[rank] != value or 2 * count <= len(ranks)]
    return sorted(odd)


def _column_sums(tensor: Tensor) -> Tensor:
    """Sums of the bits in 128 columns, then the bits of the incomplete last row: int64 [256]."""
    bits = tensor.detach().reshape(-1).view(torch.int32 if tensor.itemsize == 4 else torch.int16)
    rows = bits.numel() // _COLUMNS
    whole, rest = bits[: rows * _COLUMNS].view(rows, _COLUMNS), bits[rows * _COLUMNS :]
    rest = functional.pad(rest, (0, _COLUMNS - rest.numel()))
    return torch.cat((whole.sum(0, dtype=torch.int32), rest.int())).long()


def _factors(count: int, device: torch.device) -> Tensor:
    """The `odd_factors` of sums modulo 2**64, on the device: int64 [count]."""
    return torch.from_numpy(odd_factors(count).view(np.int64)).to(device)


def _named(tensors: Mapping[str, Tensor], chosen: Tensor) -> str:
    names = [name for name, is_chosen in zip(tensors, chosen.tolist(), strict=True) if is_chosen]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"
