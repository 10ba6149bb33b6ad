"""The header of a tensor file, checked: it may be a stranger's, or damaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from samestep.stored_json import MOST_BYTES, Count, JsonError, checked, parse_json


class Entry(TypedDict):
    """Dtype, shape and place in the body of a piece, as in any safetensors file."""

    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]


class Place(TypedDict):
    """Name and shape of a tensor, and the offset of a piece in it."""

    name: str
    shape: list[Count]
    offset: list[Count]


class _Metadata(TypedDict):
    pieces: str


def read_header(
    content: Callable[[int, int], Tensor], dtypes: Mapping[str, torch.dtype]
) -> tuple[int, dict[str, Entry], dict[str, Place]]:
    """Reads the header of a file.

    Args:
        content: returns the bytes [start, stop) of the file.
        dtypes: that a file may have, by name.

    Returns:
        The place where the tensors' bytes begin; and by key, the entries and places of the pieces.

    Raises:
        JsonError: a piece is not stored, in another number of bytes than it has, or lies outside of
            its tensor.
    """
    # Eight bytes of length, the JSON header, then the tensors' bytes.
    length = int.from_bytes(content(0, 8).numpy().tobytes(), "little")
    if length > MOST_BYTES:
        raise JsonError(f"has {length} bytes, more than {MOST_BYTES}")
    tree = parse_json(content(8, 8 + length).numpy().tobytes(), dict[str, Any])
    metadata = checked(tree.pop("__metadata__", None), _Metadata)
    entries = checked(tree, dict[str, Entry])
    places = parse_json(metadata["pieces"], dict[str, Place])
    for key, place in places.items():
        entry = entries.get(key)
        if entry is None or entry["dtype"] not in dtypes:
            raise JsonError("is not stored, or with a dtype that is never written", (key,))
        start, stop = entry["data_offsets"]
        elements = math.prod(entry["shape"])
        if stop - start != elements * dtypes[entry["dtype"]].itemsize:
            raise JsonError(f"has {elements} elements in {stop - start} bytes", (key,))
        if (8 + length + start) % dtypes[entry["dtype"]].itemsize:
            raise JsonError(f"begins at byte {start}, between two elements", (key,))
        sizes = (entry["shape"], place["offset"], place["shape"])
        is_inside = len(set(map(len, sizes))) == 1 and all(
            offset + size <= whole for size, offset, whole in zip(*sizes, strict=True)
        )
        if not is_inside:
            raise JsonError("is a piece that does not lie in its tensor", (key,))
    return 8 + length, entries, places
