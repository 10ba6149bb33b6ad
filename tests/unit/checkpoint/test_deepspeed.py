"""DeepSpeed's files without DeepSpeed: what is written is read, and no file runs code.

The rest: test_conversion.py.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import struct
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.errors import CheckpointError
from trainer.checkpoint.deepspeed import open_checkpoint, step_folder, write_universal

SHAPES = {"a.weight": (5, 3), "a.bias": (3,), "scale": ()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A universal checkpoint of three parameters, whose elements are those of `tensor`."""
    kinds = ("fp32", "exp_avg", "exp_avg_sq")
    write_universal(
        tmp_path, 7, ((name, {kind: tensor(name, kind) for kind in kinds}) for name in SHAPES)
    )
    found = step_folder(tmp_path)
    assert found == tmp_path / "global_step7"
    return found


def tensor(name: str, kind: str) -> torch.Tensor:
    return torch.rand(
        SHAPES[name], generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {kind}".encode()))
    )


def change(path: Path, **entries: Any) -> None:
    torch.save({**torch.load(path, weights_only=False), **entries}, path)


def test_what_is_written_is_read(folder: Path) -> None:
    state = open_checkpoint(folder)
    assert state.step == 7
    for kind, tensors in state.tensors.items():
        assert tensors.keys() == SHAPES.keys()
        for name in SHAPES:
            assert torch.equal(tensors[name], tensor(name, kind))
    assert torch.equal(
        state.tensors["fp32"].elements("a.weight", 4, 9), tensor("a.weight", "fp32").flatten()[4:9]
    )


def test_a_saved_view_is_no_larger_than_it_looks(tmp_path: Path) -> None:
    base = torch.rand(1000, 100)
    write_universal(tmp_path, 1, [("rows", {"fp32": base[:2]})])
    assert (tmp_path / "global_step1" / "zero" / "rows" / "fp32.pt").stat().st_size < 4000


class Touch:
    """What runs a command when it is unpickled the usual way."""

    def __init__(self, path: Path, function: Any) -> None:
        self.path, self.function = path, function

    def __reduce__(self) -> Any:
        if self.function is os.system:
            return os.system, (f"touch {self.path}",)
        return self.function, (f"open({str(self.path)!r}, 'w')",)


@pytest.mark.parametrize("function", [os.system, eval, exec])
@pytest.mark.parametrize(
    "file", ["mp_rank_00_model_states.pt", "zero/optimizer_state.pt", "zero/scale/exp_avg.pt"]
)
def test_no_file_runs_code(folder: Path, tmp_path: Path, function: Any, file: str) -> None:
    entry = {"client": Touch(tmp_path / "touched", function)}
    if file.endswith("exp_avg.pt"):
        torch.save(Touch(tmp_path / "touched", function), folder / file)
    else:
        change(folder / file, **entry)
    with (
        pytest.raises(CheckpointError, match="may run code")
        if function is os.system
        else suppress(CheckpointError)
    ):
        open_checkpoint(folder)
    assert not (tmp_path / "touched").exists()


def test_classes_that_are_not_installed_do_no_harm(folder: Path) -> None:
    """Megatron-DeepSpeed keeps its arguments beside the model."""
    change(
        folder / "mp_rank_00_model_states.pt",
        args=argparse.Namespace(lr=1),
        cache=Path("x"),
        global_samples=70,
    )
    assert open_checkpoint(folder).examples == 70


@pytest.mark.parametrize(
    "file", ["zero/a.weight/exp_avg.pt", "zero/a.weight/fp32.pt", "mp_rank_00_model_states.pt"]
)
def test_a_flipped_bit_is_found(folder: Path, file: str) -> None:
    with zipfile.ZipFile(folder / file) as archive:
        record = max(archive.infolist(), key=lambda each: each.file_size)
    content = bytearray((folder / file).read_bytes())
    name, extra = struct.unpack_from(
        "<HH", content, record.header_offset + 26
    )  # lengths before the record's bytes
    content[record.header_offset + 30 + name + extra + record.file_size // 2] ^= 4
    (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"Copy it again"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("fp32", math.nan), ("exp_avg", math.inf), ("exp_avg_sq", math.nan), ("exp_avg_sq", -1.0)],
)
def test_numbers_that_cannot_be_are_refused(folder: Path, kind: str, value: float) -> None:
    torch.save({"param": torch.tensor([1.0, value, 0])}, folder / "zero" / "a.bias" / f"{kind}.pt")
    with pytest.raises(
        CheckpointError, match=rf"^{kind} of a\.bias in .* use an earlier checkpoint"
    ):
        open_checkpoint(folder).tensors[kind]["a.bias"]


@pytest.mark.parametrize("step", [-3.0, 2.5, math.inf])
def test_steps_that_cannot_be_are_refused(folder: Path, step: float) -> None:
    torch.save(torch.tensor(step), folder / "zero" / "scale" / "step.pt")
    with pytest.raises(CheckpointError, match=rf"has made {step} updates"):
        open_checkpoint(folder)


def test_incomplete_and_mixed_files_are_named(folder: Path) -> None:
    torch.save(torch.tensor(8.0), folder / "zero" / "scale" / "step.pt")
    with pytest.raises(CheckpointError, match=r"of the steps 7, 8\. Copy it again"):
        open_checkpoint(folder)
    shutil.rmtree(folder / "zero" / "scale")
    torch.save({"param": torch.ones(5, 3)[:4]}, folder / "zero" / "a.weight" / "exp_avg.pt")
    with pytest.raises(CheckpointError, match=r"holds 12 of the 15 elements of a\.weight"):
        open_checkpoint(folder)
    (folder / "zero" / "a.bias" / "exp_avg_sq.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"a\.bias is of an optimizer that keeps exp_avg, and only"
    ):
        open_checkpoint(folder)
    change(folder / "mp_rank_00_model_states.pt", frozen_param_shapes={"a.bias": torch.Size([3])})
    with pytest.raises(CheckpointError, match=r"a\.bias was frozen"):
        open_checkpoint(folder)
