"""DeepSpeed's checkpoints, read and written without DeepSpeed and one tensor at a time.

Two layouts are read: what `engine.save_checkpoint` writes under ZeRO stages 1 to 3, flat partitions
in a file for each rank, and the universal one of `deepspeed.checkpoint.ds_to_universal`, a folder
for each parameter. The latter is also written. The layouts are those of DeepSpeed 0.19; files of
others are read as far as they are alike.

All these files are pickles, and a pickle can name any function and have it called. Here they go
through torch's restricted unpickler, and no name in them is ever looked up: `_StandIn` is there in
place of every class that the unpickler does not know. Files are read through once, for their
checksums; after that tensors are mapped.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat, TypeAlias

import torch
from torch import Tensor

from trainer.checkpoint.layout import StoredPiece, StoredTensors
from trainer.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHTS = "fp32"
_LAYOUT = "0.19.8"  # the version whose universal layout is written
_PARTITION = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_STATES = (
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt",
)  # stages 1 and 2; stage 3
_UNIVERSAL = "zero"
_PARAM_GROUPS = 1024  # more than any script has

Range: TypeAlias = tuple[Tensor, int, int]
"""A flat tensor, and where in it how many elements of another one lie."""
Loaded: TypeAlias = Any
"""The content of one of DeepSpeed's files, in the layout of its version."""


@dataclass(frozen=True)
class DeepSpeedState:
    """What is taken over from a checkpoint.

    Attributes:
        step: updates that the optimizer has made.
        examples: rows that the run has seen; None if it has not kept count.
        settings: those of the optimizer's first group.
        tensors: weights ("fp32") and moments ("exp_avg", "exp_avg_sq") by kind, then by DeepSpeed's
            name, fp32.
    """

    step: int
    examples: int | None
    settings: Mapping[str, object]
    tensors: Mapping[str, StoredTensors]


def step_folder(path: Path) -> Path | None:
    """Where the files of a DeepSpeed checkpoint lie, given that folder or the one above.

    None if it is none.
    """
    for pointer in ("latest", "latest_universal"):
        if (path / pointer).is_file():
            return path / (path / pointer).read_text().strip()
    is_one = (
        (path / _UNIVERSAL).is_dir()
        or any(path.glob("*_model_states.pt"))
        or any(path.glob("*_optim_states.pt"))
    )
    return path if is_one else None


def open_checkpoint(folder: Path) -> DeepSpeedState:
    """Opens a checkpoint; its tensors are read when they are asked for.

    Raises:
        CheckpointError: files are missing, damaged, of different saves, or hold what cannot be
            taken over.
    """
    try:
        return (
            _open_universal(folder) if (folder / _UNIVERSAL).is_dir() else _open_partitioned(folder)
        )
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is not laid out as DeepSpeed {_LAYOUT} does it ({type(error).__name__}: "
            f"{error}); go on from it "
            "with a newer DeepSpeed, save it there, and convert that"
        ) from error


def _open_partitioned(folder: Path) -> DeepSpeedState:
    """ZeRO's own layout: rank r has the r-th stretch of what is laid end to end, or of each
    parameter in stage 3.
    """
    found = {
        path: match
        for path in sorted(folder.glob("*.pt"))
        if (match := _PARTITION.fullmatch(path.name))
    }
    if not found:
        raise CheckpointError(
            f"{folder} has no partitions of ZeRO (zero_pp_rank_*_optim_states.pt): it was saved "
            "without ZeRO, or not "
            "copied whole; copy all its files, or save it under ZeRO stage 1 to 3"
        )
    if any(int(match[2]) for match in found.values()) or any(folder.glob("layer_*")):
        raise CheckpointError(
            f"{folder} is of a run with tensor, pipeline or expert parallelism, whose parts only "
            "DeepSpeed can put "
            "together; convert it with python -m deepspeed.checkpoint.ds_to_universal first, and "
            "name what that writes"
        )
    model = _model_states(folder)
    paths = {int(match[1]): path for path, match in found.items()}
    absent = sorted(set(range(model["dp_world_size"])) - paths.keys())
    if absent:
        raise CheckpointError(
            f"{folder} was saved by {model['dp_world_size']} processes, and the optimizer states "
            f"of rank {absent[0]} "
            "are missing; copy the files of all machines into it"
        )
    shapes = {
        name: tuple(shape) for group in model["param_shapes"] for name, shape in group.items()
    }
    ranges: dict[str, dict[str, list[Range]]] = {
        kind: {name: [] for name in shapes} for kind in (WEIGHTS, *MOMENTS)
    }
    steps, settings = set(), {}
    for rank in range(model["dp_world_size"]):
        state = _load(paths[rank])["optimizer_state_dict"]
        partitioned = "fp32_flat_groups" in state  # stage 3
        optimizer = state["optimizer_state_dict" if partitioned else "base_optimizer_state"]
        settings = optimizer["param_groups"][0]
        flats = state["fp32_flat_groups" if partitioned else "single_partition_of_fp32_groups"]
        for number, flat in enumerate(flats):
            moments = optimizer["state"].get(number, {})
            _check_moments(moments, folder)
            steps.add(_step(moments["step"] if "step" in moments else settings["step"], folder))
            if partitioned:
                group = model["param_shapes"][number]
                spans = _spans(group, rank, model["dp_world_size"])
                _check_lengths(
                    group, model["dp_world_size"], {WEIGHTS: flat, **moments}, paths[rank]
                )
            else:
                spans = (
                    (name, at.start, at.numel)
                    for name, at in state["param_slice_mappings"][number].items()
                )
            for name, start, length in spans:
                for kind in ranges:
                    ranges[kind][name].append(
                        ((flat if kind == WEIGHTS else moments[kind]), start, length)
                    )
    tensors = {kind: _stored(kind, each, shapes, folder) for kind, each in ranges.items()}
    return DeepSpeedState(
        _single_step(steps, folder), model.get("global_samples"), settings, tensors
    )


def _spans(
    shapes: Mapping[str, Sequence[int]], rank: int, ranks: int
) -> Iterator[tuple[str, int, int]]:
    """Where a rank has its parts of the parameters of a group, and their lengths without padding,
    in stage 3.
    """
    start = 0
    for name, shape in shapes.items():
        size, part = math.prod(shape), _padded_part(shape, ranks)
        yield name, start, min(max(size - rank * part, 0), part)
        start += part


def _padded_part(shape: Sequence[int], ranks: int) -> int:
    """The elements that each rank has of a parameter in stage 3, padding included."""
    return -(-math.prod(shape) // ranks)


def _check_lengths(
    shapes: Mapping[str, Sequence[int]], ranks: int, flats: Mapping[str, Tensor], path: Path
) -> None:
    """Refuses what is shorter or longer than the parts of a group that a rank has in stage 3,
    padding included.
    """
    due = sum(_padded_part(shape, ranks) for shape in shapes.values())
    for kind in (WEIGHTS, *MOMENTS):
        if flats[kind].numel() != due:
            raise CheckpointError(
                f"{path} holds {flats[kind].numel()} elements of {kind} where {due} belong; it was "
                "not saved or copied "
                "whole, or is of another run: copy it again, or use another one"
            )


def _open_universal(folder: Path) -> DeepSpeedState:
    """The universal layout: what ZeRO stages 1 and 2 had is there with its shape and step, what
    stage 3 had without.
    """
    model, common = _model_states(folder), _load(folder / _UNIVERSAL / "optimizer_state.pt")
    shapes = {
        name: tuple(shape)
        for group in model.get("param_shapes", ())
        for name, shape in group.items()
    }
    names = list(shapes) or sorted(
        path.name for path in (folder / _UNIVERSAL).iterdir() if path.is_dir()
    )
    ranges: dict[str, dict[str, list[Range]]] = {kind: {} for kind in (WEIGHTS, *MOMENTS)}
    steps = set()
    for name in names:  # there may be more: copies of tied tensors
        kept = {file.stem: _load(file) for file in (folder / _UNIVERSAL / name).glob("*.pt")}
        step = (
            kept.pop("step")
            if "step" in kept
            else common["optimizer_state_dict"]["state"][0]["step"]
        )
        steps.add(_step(step, folder))
        weights = kept.pop(WEIGHTS)
        _check_moments(kept, folder / _UNIVERSAL / name)
        for kind, content in ((WEIGHTS, weights), *kept.items()):
            tensor = content["param"] if isinstance(content, dict) else content
            shapes.setdefault(name, tuple(tensor.shape))
            ranges[kind][name] = [(tensor.flatten(), 0, tensor.numel())]
    tensors = {kind: _stored(kind, each, shapes, folder) for kind, each in ranges.items()}
    settings = dict((common.get("param_groups") or [{}])[0])
    return DeepSpeedState(
        _single_step(steps, folder), model.get("global_samples"), settings, tensors
    )


def _model_states(folder: Path) -> Loaded:
    """What rank 0 has saved of the model and the run.

    Raises:
        CheckpointError: it is missing, or the model has parameters that were not trained.
    """
    path = next((folder / name for name in _MODEL_STATES if (folder / name).exists()), None)
    if path is None:
        raise CheckpointError(
            f"{folder} has no {' and no '.join(_MODEL_STATES)}; copy all files of the checkpoint"
        )
    model = _load(path)
    if frozen := model.get("frozen_param_shapes"):
        raise CheckpointError(
            f"{folder} is of a run that trained only some of its parameters: {next(iter(frozen))} "
            "was frozen, and here "
            "all are trained; start a new run from its weights (save_pretrained, and init_from)"
        )
    return model


def _check_moments(state: Mapping[str, object], where: Path) -> None:
    """Refuses what is not Adam's: two running means and a count."""
    keys = sorted(key for key in state if key != "step")
    if keys != sorted(MOMENTS):
        has = f"keeps {', '.join(keys)}" if keys else "has made no update"
        raise CheckpointError(
            f"{where} is of an optimizer that {has}, and only {' and '.join(MOMENTS)} of the Adam "
            "family (Adam, AdamW, "
            "LAMB) can be taken over; start a new run from its weights (save_pretrained, and "
            "init_from)"
        )


def _step(value: SupportsFloat, folder: Path) -> int:
    """A count of updates, which is kept as a number or a tensor of one."""
    count = float(value)
    if not (count.is_integer() and count >= 0):
        raise CheckpointError(
            f"{folder} has made {count} updates, which cannot be; copy it again, or use another one"
        )
    return int(count)


def _single_step(steps: set[int], folder: Path) -> int:
    if len(steps) > 1:
        raise CheckpointError(
            f"{folder} has files of different saves: the optimizer states are of the steps "
            f"{', '.join(map(str, sorted(steps)))}; copy it again, whole, or use another one"
        )
    return steps.pop()


def _stored(
    kind: str,
    ranges: Mapping[str, Sequence[Range]],
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path,
) -> StoredTensors:
    pieces = {}
    for name, parts in ranges.items():
        shape = shapes[name]
        held = sum(length for flat, start, length in parts if start + length <= len(flat))
        if held != math.prod(shape):
            raise CheckpointError(
                f"{folder} holds {held} of the {math.prod(shape)} elements of {name}; it was not "
                "saved or copied "
                "whole: copy it again, or use another one"
            )
        elements = partial(_elements, parts, f"{kind} of {name} in {folder}", kind == MOMENTS[1])
        pieces[name] = [StoredPiece(name, shape, (0,) * len(shape), shape, torch.float32, elements)]
    return StoredTensors(pieces)


def _elements(ranges: Sequence[Range], what: str, is_square: bool, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of what the ranges are when laid end to end, fp32."""
    found, position = [], 0
    for flat, begin, length in ranges:
        first, end = (min(max(place - position, 0), length) for place in (start, stop))
        found.append(flat.detach()[begin + first : begin + end])
        position += length
    elements = torch.cat(found).float()
    if not elements.isfinite().all() or (is_square and (elements < 0).any()):
        wrong = "infinite, not a number, or a negative square"
        raise CheckpointError(f"{what} has elements that are {wrong}; use an earlier checkpoint")
    return elements


class _StandIn:
    """In place of any object that is not torch's.

    What it was made from is dropped, what it holds is kept.
    """

    def __new__(cls, *_args: object) -> _StandIn:
        return super().__new__(cls)

    def __init__(self, *_args: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


def _load(path: Path) -> Loaded:
    """The content of a file; tensors are mapped, objects of classes are stand-ins.

    Raises:
        CheckpointError: it is missing or damaged, or holds what even a stand-in cannot be put in
            place of.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(
                f"{path} is damaged ({damaged} in it); copy it again, or use another checkpoint"
            )
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(_StandIn, name) for name in names]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} is not read, because reading a pickle may run code, and it holds what is "
            "neither tensors nor "
            f"settings ({reason}); if you trust it, load it with DeepSpeed and save it without its "
            "client_state"
        ) from error
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"cannot read {path}: it is cut off, damaged, or of a torch before 1.6; copy it again, "
            "or save it anew"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"cannot read {path}: {reason}; copy it again, or use another checkpoint"
        ) from error


def write_universal(
    folder: Path, step: int, parameters: Iterable[tuple[str, Mapping[str, Tensor]]]
) -> None:
    """Writes a universal checkpoint, which DeepSpeed loads under any ZeRO stage and number of
    processes.

    The settings of the optimizer are left to the script that loads it: those in the file, one set
    for all groups in stage 3, would replace them.

    Args:
        folder: gets the checkpoint of the step and `latest_universal`, which names it, written
            last.
        step: updates that the optimizer has made.
        parameters: DeepSpeed's name, and the tensors by kind, fp32; all kinds of one shape.

    Raises:
        CheckpointError: the checkpoint exists already, or cannot be written.
    """
    target = folder / f"global_step{step}"
    if target.exists():
        raise CheckpointError(f"{target} already exists; remove it, or name another folder")
    temporary = folder / f".{target.name}.{os.getpid()}.tmp"
    count = torch.tensor(float(step))  # of the kind that torch's optimizers keep
    try:
        (temporary / _UNIVERSAL).mkdir(parents=True)
        for name, tensors in parameters:
            (temporary / _UNIVERSAL / name).mkdir()
            torch.save(count, temporary / _UNIVERSAL / name / "step.pt")
            for kind, tensor in tensors.items():
                content = {
                    "param": tensor.detach().clone(memory_format=torch.contiguous_format)
                }  # without its base
                torch.save(content, temporary / _UNIVERSAL / name / f"{kind}.pt")
        # Stages 1 and 2 take groups one by one, and leave out those that have no counterpart; stage
        # 3 takes the other.
        groups: list[dict[str, object]] = [{}] * _PARAM_GROUPS
        optimizer = {"state": {0: {"step": count}}, "param_groups": groups[:1]}
        common = {"ds_version": _LAYOUT, "param_groups": groups, "optimizer_state_dict": optimizer}
        torch.save(common, temporary / _UNIVERSAL / "optimizer_state.pt")
        model = {
            "module": {},
            "dp_world_size": 1,
            "mp_world_size": 1,
            "global_steps": step,
            "skipped_steps": 0,
        }
        for name in _MODEL_STATES:
            torch.save({**model, "ds_version": _LAYOUT}, temporary / name)
        temporary.replace(target)
        (folder / "latest_universal").write_text(target.name)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot write {target}: {error}; free some space, or name a folder that can be "
            "written in"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
