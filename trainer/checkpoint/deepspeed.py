"""Reads and writes DeepSpeed checkpoints without DeepSpeed, one tensor at a time.

Two layouts are read: the one of `engine.save_checkpoint` under ZeRO stages 1 to 3, with a file of
flat partitions per rank, and the universal one of `deepspeed.checkpoint.ds_to_universal`, with a
folder per parameter. The universal one is also written. Both are the layouts of DeepSpeed 0.19;
other versions are read as far as they agree.

All these files are pickles, and a pickle can name any function to be called. They are read with
torch's restricted unpickler, which never looks up a name in them: every class that it does not know
is replaced by `_StandIn`. Each file is read once for its checksums; then its tensors are
memory-mapped.
"""

from __future__ import annotations

import math
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat, TypeAlias

import torch
from torch import Tensor

from samestep.errors import CheckpointError
from samestep.storage.new_folder import new_folder
from samestep.untrusted import inside, regular
from trainer.checkpoint.layout import StoredPiece, StoredTensors

MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHTS = "fp32"
KINDS = (WEIGHTS, *MOMENTS)
_VERSION = "0.19.8"  # of the universal layout that is written
_PARTITION = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# Of stages 1 and 2, and of stage 3.
_MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_UNIVERSAL = "zero"
_PARAM_GROUPS = 1024  # more than any script has
_COPY = "Copy it again, or use another checkpoint"  # the end of several messages
_START_ANEW = "Start a new run from its weights instead (save_pretrained, and init_from)"

Range: TypeAlias = tuple[Tensor, int, int]
"""A flat tensor, and the start and number of elements in it that belong to a parameter."""
Ranges: TypeAlias = dict[tuple[str, str], list[Range]]
"""The ranges of each kind and parameter name, in the order of the flattened parameter."""
Loaded: TypeAlias = Any
"""The content of one of DeepSpeed's files, in the layout of its version."""


@dataclass(frozen=True)
class ImportedState:
    """What is imported from a checkpoint.

    Attributes:
        step: optimizer updates.
        examples: examples that the run has consumed; None if it did not count them.
        settings: of the optimizer's first parameter group.
        tensors: weights ("fp32") and moments ("exp_avg", "exp_avg_sq") by kind, then by DeepSpeed's
            parameter name, in fp32.
    """

    step: int
    examples: int | None
    settings: Mapping[str, object]
    tensors: Mapping[str, StoredTensors]


def step_folder(path: Path) -> Path | None:
    """Returns the folder with a checkpoint's files, which is `path` or in it; None if neither."""
    for pointer in ("latest", "latest_universal"):
        if (path / pointer).is_file():
            name = (path / pointer).read_text(errors="replace").strip()
            return inside(path, name)
    patterns = (_UNIVERSAL, "*_model_states.pt", "*_optim_states.pt")
    return path if any(any(path.glob(pattern)) for pattern in patterns) else None


def open_checkpoint(folder: Path) -> ImportedState:
    """Opens a checkpoint; its tensors are read on access.

    Raises:
        CheckpointError: files are missing, damaged, of different saves, or of an unsupported run.
    """
    try:
        universal = (folder / _UNIVERSAL).is_dir()
        return _open_universal(folder) if universal else _open_partitioned(folder)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} does not have the layout of DeepSpeed {_VERSION} ({type(error).__name__}: "
            f"{error}). Resume it with a newer DeepSpeed, save it there, and convert that"
        ) from error


def _open_partitioned(folder: Path) -> ImportedState:
    """Opens the layout of ZeRO: each rank has the flat partitions of its rank.

    Stages 1 and 2 concatenate all parameters of a group and cut the result into one partition per
    rank, so a parameter may begin and end anywhere; `param_slice_mappings` says where. Stage 3 cuts
    each parameter for itself. With two ranks and parameters of 5 and 4 elements:

        stages 1, 2   rank 0: a0 a1 a2 a3 a4    rank 1: b0 b1 b2 b3 -
        stage 3       rank 0: a0 a1 a2 b0 b1    rank 1: a3 a4 - b2 b3
    """
    paths = _partition_files(folder)
    model = _model_states(folder)
    ranks = model["dp_world_size"]
    if absent := sorted(set(range(ranks)) - paths.keys()):
        raise CheckpointError(
            f"{folder} was saved by {ranks} processes, and the optimizer states of rank "
            f"{absent[0]} are missing. Copy the files of all machines into it"
        )
    shapes = _shapes(model)
    ranges: Ranges = defaultdict(list)
    steps, settings = set(), {}
    for rank in range(ranks):
        state = _load(paths[rank])["optimizer_state_dict"]
        is_stage_3 = "fp32_flat_groups" in state
        optimizer = state["optimizer_state_dict" if is_stage_3 else "base_optimizer_state"]
        settings = optimizer["param_groups"][0]
        flats = state["fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"]
        for number, flat in enumerate(flats):
            moments = optimizer["state"].get(number, {})
            _check_moments(moments, folder)
            steps.add(_step(moments["step"] if "step" in moments else settings["step"], folder))
            tensors = {WEIGHTS: flat, **moments}
            # Stage 3 stores no mapping: the spans follow from the shapes, in the group's order.
            if is_stage_3:
                group = model["param_shapes"][number]
                spans = _spans(group, rank, ranks, tensors, paths[rank])
            else:
                mapping = state["param_slice_mappings"][number]
                spans = [(name, at.start, at.numel) for name, at in mapping.items()]
            for name, start, length in spans:
                for kind in KINDS:
                    ranges[kind, name].append((tensors[kind], start, length))
    return _state(folder, model, steps, settings, ranges, shapes)


def _partition_files(folder: Path) -> dict[int, Path]:
    """Returns the file of each rank's optimizer state.

    Raises:
        CheckpointError: there is none, or the model is not only data-parallel.
    """
    matches = {path: _PARTITION.fullmatch(path.name) for path in sorted(folder.glob("*.pt"))}
    found = [(path, match) for path, match in matches.items() if match is not None]
    if not found:
        raise CheckpointError(
            f"{folder} has no partitions of ZeRO (zero_pp_rank_*_optim_states.pt): it was saved "
            "without ZeRO, or not copied completely. Copy all its files, or save it under ZeRO "
            "stage 1 to 3"
        )
    # match[2] is the tensor-parallel rank, and layer_* files are written by pipeline stages.
    if any(int(match[2]) for _, match in found) or any(folder.glob("layer_*")):
        raise CheckpointError(
            f"{folder} is of a run with tensor, pipeline or expert parallelism, which only "
            "DeepSpeed can read. Convert it with python -m deepspeed.checkpoint.ds_to_universal, "
            "and give the result to this command"
        )
    return {int(match[1]): path for path, match in found}


def _shapes(model: Loaded) -> dict[str, tuple[int, ...]]:
    groups = model.get("param_shapes", ())
    return {name: tuple(shape) for group in groups for name, shape in group.items()}


def _spans(
    shapes: Mapping[str, Sequence[int]],
    rank: int,
    ranks: int,
    flats: Mapping[str, Tensor],
    path: Path,
) -> list[tuple[str, int, int]]:
    """Returns where a rank holds each parameter of a group under stage 3, without padding.

    Each rank has ceil(size / ranks) elements of a parameter, the last ones padded: see the example
    in `_open_partitioned`, where rank 1 has 2 elements of `a` and one of padding.

    Raises:
        CheckpointError: the flat tensors are shorter or longer than all of this.
    """
    spans = []
    start = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        padded = -(-size // ranks)
        spans.append((name, start, min(max(size - rank * padded, 0), padded)))
        start += padded
    for kind in KINDS:
        if flats[kind].numel() != start:
            raise CheckpointError(
                f"{path} holds {flats[kind].numel()} elements of {kind} instead of {start}. It is "
                f"incomplete, or of another run. {_COPY}"
            )
    return spans


def _open_universal(folder: Path) -> ImportedState:
    """Opens the universal layout: a folder per parameter, with a file per kind of tensor.

    If it was converted from stages 1 or 2, a file holds the tensor with its shape, and there is one
    for the step; if from stage 3, the tensor is flat, and the step is in the common file.
    """
    model, common = _model_states(folder), _load(folder / _UNIVERSAL / "optimizer_state.pt")
    shapes = _shapes(model)
    folders = {path.name for path in (folder / _UNIVERSAL).iterdir() if path.is_dir()}
    ranges: Ranges = {}
    steps = set()
    # There may be more folders than names in `shapes`: copies of tied tensors, which are skipped.
    for name in list(shapes) or sorted(folders):
        place = inside(folder / _UNIVERSAL, name)
        content = {file.stem: _load(file) for file in place.glob("*.pt")}
        # The step is beside each tensor (from stages 1 and 2), or once for all (from stage 3).
        if "step" in content:
            steps.add(_step(content.pop("step"), folder))
        else:
            steps.add(_step(common["optimizer_state_dict"]["state"][0]["step"], folder))
        _check_moments({kind: content[kind] for kind in content if kind != WEIGHTS}, place)
        for kind in KINDS:
            saved = content[kind]
            tensor = saved["param"] if isinstance(saved, dict) else saved
            shapes.setdefault(name, tuple(tensor.shape))
            ranges[kind, name] = [(tensor.flatten(), 0, tensor.numel())]
    settings = dict((common.get("param_groups") or [{}])[0])
    return _state(folder, model, steps, settings, ranges, shapes)


def _state(
    folder: Path,
    model: Loaded,
    steps: set[int],
    settings: Mapping[str, object],
    ranges: Ranges,
    shapes: Mapping[str, tuple[int, ...]],
) -> ImportedState:
    """Checks that the ranges are complete and of one save, and wraps them as stored tensors."""
    tensors: dict[str, StoredTensors] = {}
    for kind in KINDS:
        pieces = {}
        for name, shape in shapes.items():
            # Ranks may hold ranges of any length, but together they must hold every element. A
            # truncated file has a range that ends behind its flat tensor, which is not counted.
            parts = ranges[kind, name]
            held = sum(length for flat, start, length in parts if start + length <= len(flat))
            if held != math.prod(shape):
                raise CheckpointError(
                    f"{folder} holds {held} of the {math.prod(shape)} elements of {name}. It is "
                    f"incomplete. {_COPY}"
                )
            what, offset = f"{kind} of {name} in {folder}", (0,) * len(shape)
            elements = partial(_elements, parts, what, kind == MOMENTS[1])
            pieces[name] = [StoredPiece(name, shape, offset, shape, torch.float32, elements)]
        tensors[kind] = StoredTensors(pieces)
    if len(steps) > 1:
        raise CheckpointError(
            f"{folder} has files of different saves: the optimizer states are of the steps "
            f"{', '.join(map(str, sorted(steps)))}. {_COPY}"
        )
    return ImportedState(steps.pop(), model.get("global_samples"), settings, tensors)


def _model_states(folder: Path) -> Loaded:
    """Returns what rank 0 has saved of the model and the run.

    Raises:
        CheckpointError: it is missing, or some parameters were frozen.
    """
    path = next((folder / name for name in _MODEL_STATES if (folder / name).exists()), None)
    if path is None:
        raise CheckpointError(
            f"{folder} has no {' and no '.join(_MODEL_STATES)}. Copy all files of the checkpoint"
        )
    model = _load(path)
    if frozen := model.get("frozen_param_shapes"):
        raise CheckpointError(
            f"{folder} is of a run that trained only some of its parameters: {next(iter(frozen))} "
            f"was frozen, and this run trains all. {_START_ANEW}"
        )
    return model


def _check_moments(state: Mapping[str, object], where: Path) -> None:
    """Rejects a state other than Adam's, which has two moments and a step."""
    keys = sorted(key for key in state if key != "step")
    if keys != sorted(MOMENTS):
        has = f"keeps {', '.join(keys)}" if keys else "has made no update"
        raise CheckpointError(
            f"{where} is of an optimizer that {has}, and only {' and '.join(MOMENTS)} of the Adam "
            f"family (Adam, AdamW, LAMB) can be converted. {_START_ANEW}"
        )


def _step(value: SupportsFloat, folder: Path) -> int:
    """Converts the number of updates, which is saved as a number or a tensor of one."""
    count = float(value)
    if not (count.is_integer() and count >= 0):
        raise CheckpointError(f"{folder} has made {count} updates, which is impossible. {_COPY}")
    return int(count)


def _elements(ranges: Sequence[Range], what: str, is_square: bool, start: int, stop: int) -> Tensor:
    """Returns elements [start, stop) of the concatenated ranges, fp32."""
    found, position = [], 0
    for flat, begin, length in ranges:
        # Of a range at positions [position, position + length), the elements [first, end).
        first, end = (min(max(bound - position, 0), length) for bound in (start, stop))
        found.append(flat.detach()[begin + first : begin + end])
        position += length
    elements = torch.cat(found).float()
    # Damage that a file's own checksum does not reveal, such as a step that diverged. Adam's second
    # moment is a mean of squares.
    if not elements.isfinite().all() or (is_square and (elements < 0).any()):
        raise CheckpointError(
            f"{what} has elements that are infinite, not a number, or a negative square; "
            "use an earlier checkpoint"
        )
    return elements


class _StandIn:
    """Replaces an object of an unknown class: drops its arguments, and keeps its attributes."""

    def __new__(cls, *_args: object) -> _StandIn:
        return super().__new__(cls)

    def __init__(self, *_args: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


def _load(path: Path) -> Loaded:
    """Reads a file; tensors are memory-mapped, and objects of unknown classes are stand-ins.

    Raises:
        CheckpointError: it is missing or damaged, or has an object that cannot be replaced.
    """
    try:
        # A torch file is a zip archive, whose CRCs torch itself does not check.
        with zipfile.ZipFile(regular(path)) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged ({damaged} in it). {_COPY}")
        # Pickles name classes of DeepSpeed and of the user. None of them is imported: stand-ins
        # replace them all, so reading runs no code of the file.
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(_StandIn, name) for name in names]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} is not read, because reading a pickle may run code, and it holds more than "
            f"tensors and settings ({reason}). If you trust it, load it with DeepSpeed and save it "
            "without its client_state"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"cannot read {path}: {reason}. It may be cut off, damaged, or of a torch before 1.6. "
            f"{_COPY}"
        ) from error


def write_universal(
    folder: Path, step: int, parameters: Iterable[tuple[str, Mapping[str, Tensor]]]
) -> None:
    """Writes a universal checkpoint, which DeepSpeed loads under any ZeRO stage and world size.

    It holds no settings of the optimizer, because DeepSpeed would use them in place of the
    script's: one set for all groups in stage 3.

    Args:
        folder: gets the folder of the step, and then `latest_universal` with its name.
        step: optimizer updates.
        parameters: DeepSpeed's name, and the fp32 tensors by kind, all of one shape.

    Raises:
        CheckpointError: the checkpoint exists already, or cannot be written.
    """
    target = folder / f"global_step{step}"
    if target.exists():
        raise CheckpointError(f"{target} already exists. Remove it, or name another folder")
    try:
        # Only a complete checkpoint gets its name; then it becomes the latest.
        with new_folder(target) as temporary:
            _write_universal(temporary, step, parameters)
        (folder / "latest_universal").write_text(target.name)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot write {target}: {error}. Free some space, or name a writable folder"
        ) from error


def _write_universal(
    folder: Path, step: int, parameters: Iterable[tuple[str, Mapping[str, Tensor]]]
) -> None:
    count = torch.tensor(float(step))  # a tensor, as in torch's optimizers
    for name, tensors in parameters:
        place = folder / _UNIVERSAL / name
        place.mkdir(parents=True)
        torch.save(count, place / "step.pt")
        for kind, tensor in tensors.items():
            # torch.save would write the whole storage of a view.
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            torch.save({"param": copy}, place / f"{kind}.pt")
    # Stages 1 and 2 take these groups one by one and ignore the surplus. Stage 3 takes the
    # groups of the optimizer's state dict.
    groups: list[dict[str, object]] = [{}] * _PARAM_GROUPS
    optimizer = {"state": {0: {"step": count}}, "param_groups": groups[:1]}
    common = {
        "ds_version": _VERSION,
        "param_groups": groups,
        "optimizer_state_dict": optimizer,
    }
    torch.save(common, folder / _UNIVERSAL / "optimizer_state.pt")
    model = {
        "module": {},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "global_steps": step,
        "skipped_steps": 0,
        "ds_version": _VERSION,
    }
    for name in _MODEL_STATES:
        torch.save(model, folder / name)
