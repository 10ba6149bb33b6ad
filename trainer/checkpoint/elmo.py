"""Reads the published weights of ELMo: HDF5 files of bilm-tf, which AllenNLP reads, too.

They have the layers of a biLM, of any size, and its embeddings from characters, no output matrix.
TensorFlow multiplies from the right, so matrices are transposed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.errors import CheckpointError, MissingExtra

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# Rows of their table of characters: 256 bytes, begin and end of a sentence, of a word, and padding.
# Ours has padding, 256 bytes, begin and end of a word; a text begins with STX and ends with ETX.
_BEGIN_TEXT, _END_TEXT, _BEGIN, _END, _PADDING = range(256, 261)
_STX, _ETX = 2, 3

_Array: TypeAlias = npt.NDArray[np.float32]
_File: TypeAlias = Mapping[str, Any]  # groups and datasets of h5py, which has no types


def is_weights(path: Path) -> bool:
    """Whether a file is in the format HDF5."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_SIGNATURE)) == _SIGNATURE


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads the tensors under the names of the parameters of a `bilm` with `characters`.

    Raises:
        CheckpointError: the file is damaged, or its content is something else.
        MissingExtra: h5py is not installed.
    """
    try:
        import h5py
    except ImportError:
        raise MissingExtra("h5py", "elmo", "ELMo's weights") from None
    try:
        with h5py.File(path, "r") as file:
            return {name: _tensor(array) for name, array in (*_characters(file), *_layers(file))}
    # h5py has no error of its own for a file with damaged or other content.
    except (
        *(KeyError, OSError, ValueError, TypeError, IndexError),
        *(AttributeError, RuntimeError, MemoryError),
    ) as error:
        raise CheckpointError(
            f"{path} does not hold ELMo's weights: {error}. Download it again, or name a file of "
            "weights, as elmo_2x4096_512_2048cnn_2xhighway_weights.hdf5"
        ) from error


def _tensor(array: _Array) -> Tensor:
    return torch.from_numpy(np.array(array, np.float32, order="C"))


def _characters(file: _File) -> Iterator[tuple[str, _Array]]:
    base = "embeddings.characters"
    table = file["char_embed"][:]
    rows = [_PADDING, *range(256), _BEGIN, _END]
    rows[1 + _STX], rows[1 + _ETX] = _BEGIN_TEXT, _END_TEXT
    yield f"{base}.bytes.weight", table[rows]
    for number in range(len(file["CNN"]) // 2):
        filters = file["CNN"][f"W_cnn_{number}"][0]  # [width, D, filters]
        yield f"{base}.filters.{number}.weight", filters.reshape(-1, filters.shape[-1]).T
        yield f"{base}.filters.{number}.bias", file["CNN"][f"b_cnn_{number}"][:]
    for number in range(sum(name.startswith("CNN_high_") for name in file)):
        # Their gate opens to the transformed values, ours to the input: sigmoid(-x) = 1 - ...
        highway, own = file[f"CNN_high_{number}"], f"{base}.highways.{number}"
        for part, theirs, sign in (("transform", "transform", 1), ("gate", "carry", -1)):
            yield f"{own}.{part}.weight", sign * highway[f"W_{theirs}"][:].T
            yield f"{own}.{part}.bias", sign * highway[f"b_{theirs}"][:]
    yield f"{base}.projection.weight", file["CNN_proj"]["W_proj"][:].T
    yield f"{base}.projection.bias", file["CNN_proj"]["b_proj"][:]


def _layers(file: _File) -> Iterator[tuple[str, _Array]]:
    for number, direction in enumerate(("forward", "backward")):
        layers = file[f"RNN_{number}"]["RNN"]["MultiRNNCell"]
        for layer in range(len(layers)):
            found, own = layers[f"Cell{layer}"]["LSTMCell"], f"{direction}_layers.{layer}"
            projection = found["W_P_0"][:].T  # [P, H]
            weight, bias = _in_our_order(found["W_0"][:].T), _in_our_order(found["B"][:])
            hidden = len(bias) // 4
            bias[hidden : 2 * hidden] += 1  # their code adds 1 to the forget gate
            inputs = weight.shape[1] - len(projection)
            yield f"{own}.weight_ih", weight[:, :inputs]
            yield f"{own}.weight_hh", weight[:, inputs:]
            yield f"{own}.weight_hr", projection
            yield f"{own}.bias", bias


def _in_our_order(gates: _Array) -> _Array:
    """TensorFlow stacks the gates as i, g, f, o, and PyTorch as i, f, g, o."""
    i, g, f, o = np.split(gates, 4)
    return np.concatenate([i, f, g, o])
