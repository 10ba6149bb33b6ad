"""Counter-based random numbers on the host: every random choice is a hash of its subject.

Nothing here keeps state, so a choice never depends on rank, worker, process or call order (Salmon
et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The mixer is the finalizer of
splitmix64 (Steele et al. 2014). All arithmetic is modulo 2**64, on numpy arrays.

    keys = combine(seed, name_key("masks"), example_numbers)  # one key for each example
    is_masked = uniform(combine(keys[:, None], positions)) < 0.15
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

U64: TypeAlias = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(values: npt.ArrayLike) -> U64:
    """Scrambles each 64-bit value; a bijection, so distinct inputs stay distinct."""
    return _scramble(np.array(values, dtype=np.uint64, ndmin=1))


def _scramble(x: U64) -> U64:
    """`mix` in place: batches are built at memory speed, so every copy costs time."""
    shifted = np.empty_like(x)
    x += _GOLDEN
    x ^= np.right_shift(x, np.uint64(30), out=shifted)
    x *= _MIX_1
    x ^= np.right_shift(x, np.uint64(27), out=shifted)
    x *= _MIX_2
    x ^= np.right_shift(x, np.uint64(31), out=shifted)
    return x


def combine(*parts: npt.ArrayLike) -> U64:
    """Hashes a tuple of integers (arrays broadcast) into a 64-bit key each; order matters.

    combine(a, b, c) is mix(mix(mix(a) ^ b) ^ c).
    """
    # Leading plain integers, such as a seed and a purpose, are the same in every batch, and hashing
    # an array of one number takes as long as one of hundreds. So their key is cached.
    constants = tuple(itertools.takewhile(lambda part: isinstance(part, int), parts))
    if len(constants) > 1:
        key, rest = _combine_constants(constants), parts[len(constants) :]
    else:
        key, rest = mix(parts[0]), parts[1:]
    return functools.reduce(_mix_in, rest, key)


@functools.lru_cache
def _combine_constants(parts: tuple[int, ...]) -> U64:
    key = functools.reduce(_mix_in, parts[1:], mix(parts[0]))
    key.flags.writeable = False  # shared by all later calls
    return key


def _mix_in(key: U64, part: npt.ArrayLike) -> U64:
    return _scramble(key ^ np.asarray(part).astype(np.uint64, copy=False))


def odd_factors(count: int) -> U64:
    """Returns random odd numbers, by which products modulo 2**64 can be undone: uint64 [count]."""
    return mix(np.arange(count)) | np.uint64(1)


def hash_rows(rows: U64) -> U64:
    """Hashes each row of [B, S] into a 64-bit key: uint64 [B].

    Each column has its own factor, so the order counts, and any change of a single entry changes
    the row's key.
    """
    keys: U64 = rows @ odd_factors(rows.shape[1])
    return keys


def name_key(name: str) -> int:
    """The 64-bit key of a name (a purpose, a parameter), equal in every process and version."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def uniform(keys: U64) -> npt.NDArray[np.float64]:
    """Maps keys to [0, 1) with 53 random bits, the precision of a float64."""
    return (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53


def json_hash(content: object) -> str:
    """The SHA-256 of JSON, in hexadecimal digits; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def hexadecimal(number: int) -> str:
    """16 digits of a number modulo 2^64."""
    return f"{number % 2**64:016x}"


def signed(number: int) -> int:
    """A number modulo 2^64 in the range of int64."""
    return (number + 2**63) % 2**64 - 2**63
