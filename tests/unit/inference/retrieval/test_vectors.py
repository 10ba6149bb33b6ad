"""Folders of vectors: what they refuse to store, and damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.lib import format as npy

from samestep.errors import ConfigError, DataError
from trainer.inference.retrieval import vectors
from trainer.inference.retrieval.vectors import Number, Vectors

VALUES = torch.tensor([[1.0, 2], [3, 4], [-5, 6]])


def begun(folder: Path, number: Number = "float32") -> Vectors:
    return Vectors.begin(
        folder, ["a", "b", "c"], part=3, width=2, number=number, similarity="cosine", made_of={}
    )


@pytest.mark.parametrize("number", ["float32", "float16", "int8"])
def test_parts_are_read_in_blocks(
    number: Number, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "_ROWS", 2)
    begun(tmp_path, number).write(0, VALUES)
    first, second = Vectors.open(tmp_path).blocks()
    assert (first[0], second[0]) == (0, 2)
    torch.testing.assert_close(torch.cat((first[1], second[1])), VALUES, rtol=0, atol=6 / 127 / 2)


@pytest.mark.parametrize(
    ("number", "value"), [("float16", 1e5), ("float32", np.nan), ("int8", np.inf)]
)
def test_numbers_that_the_type_does_not_hold_are_refused(
    number: Number, value: float, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"too large for {number}"):
        begun(tmp_path, number).write(0, torch.full((3, 2), value))
    assert not begun(tmp_path, number).has(0)


def huge(file: Path) -> None:
    with file.open("wb") as opened:
        shape = {"descr": "<f4", "fortran_order": False, "shape": (2**40, 2)}
        npy.write_array_header_1_0(opened, shape)


@pytest.mark.parametrize(
    "damage",
    [
        huge,
        lambda file: np.savez(file.open("wb"), a=1),
        lambda file: np.save(file, np.array([{}, 1], object)),
        lambda file: np.save(file, np.zeros((2, 2), np.float32)),
        lambda file: np.save(file, np.zeros((3, 2), np.float64)),
        lambda file: file.write_bytes(b""),
    ],
)
def test_damaged_parts_are_named(damage: Callable[[Path], object], tmp_path: Path) -> None:
    begun(tmp_path).write(0, VALUES)
    damage(tmp_path / "00000.npy")
    with pytest.raises(DataError, match=r"00000.npy.* Remove this part's files, and run"):
        list(Vectors.open(tmp_path).blocks())


def test_descriptions_may_have_further_keys_and_no_other_values(tmp_path: Path) -> None:
    begun(tmp_path).write(0, VALUES)
    file = tmp_path / "vectors.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "folder": "x", "further": 1}))
    assert Vectors.open(tmp_path).folder == tmp_path
    for name, value in (("similarity", "manhattan"), ("part", 0), ("texts", -1)):
        file.write_text(json.dumps({**settings, name: value}))
        with pytest.raises(DataError, match=f"holds no embeddings that can be read: {name} is"):
            Vectors.open(tmp_path)


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "names.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds names.jsonl, which is no part of embeddings"):
        begun(tmp_path)
    assert (tmp_path / "names.jsonl").read_text() == "mine"


def test_ids_are_written_after_an_interruption(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "names.jsonl").unlink()
    assert begun(tmp_path).names == ["a", "b", "c"]
