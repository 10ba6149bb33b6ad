"""Where weights lie: runs, their checkpoints, Hugging Face folders, names on the Hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeGuard

from samestep.errors import CheckpointError
from samestep.storage.urls import is_hub_path
from samestep.untrusted import read_stored
from trainer.checkpoint import files, huggingface, integrity
from trainer.checkpoint.collective import gather, raise_on_all_ranks
from trainer.checkpoint.files import Location
from trainer.checkpoint.meta import best_step

_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # of a model on the Hub, which a folder may have too


def resolve_together(path: str | Location, world_size: int) -> Location:
    """Returns the folder that `resolve` returns, of the same step on all ranks. Collective.

    Raises:
        CheckpointError: as `resolve` raises it, on any rank.
    """
    with raise_on_all_ranks(world_size):
        folder = resolve(path)
    # Of a run that still trains, RUN/best may be another step a moment later: rank 0 decides.
    # Models of the Hub are in a folder of each machine.
    step = gather(folder.name, world_size)[0]
    return folder if is_hub_path(str(path)) or folder.name == step else folder.parent / step


def resolve(path: str | Location) -> Location:
    """Returns a folder; downloads a model of the Hub, and finds the checkpoint of RUN/best."""
    if is_hub_path(str(path)):
        from samestep.storage.hub import model_folder

        return model_folder(str(path))
    return resolve_best(files.location(path))


def resolve_best(path: Location) -> Location:
    """Returns the checkpoint of RUN/best; any other path as it is.

    Raises:
        CheckpointError: the run has no best checkpoint.
    """
    # RUN/best is no folder: the best step is stored with the checkpoints.
    if path.name != "best" or files.names(path):
        return path
    root = checkpoints_of(path.parent)
    if (step := best_step(root)) is None:
        raise CheckpointError(
            f"{path.parent} has no best checkpoint: it was trained without training.best; name "
            "the run, or a step"
        )
    return integrity.step_folder(root, step)


def is_huggingface(folder: Location) -> TypeGuard[Path]:
    """Whether a folder holds a model of Hugging Face."""
    has_config = isinstance(folder, Path) and (folder / "config.json").is_file()
    return has_config and not is_adapter(folder)


def is_adapter(folder: Location) -> TypeGuard[Path]:
    """Whether a folder holds an adapter of Hugging Face's peft."""
    return isinstance(folder, Path) and huggingface.is_adapter(folder)


def is_step(folder: Location) -> bool:
    """Whether a folder is one checkpoint of a run."""
    return (folder / integrity.META).exists()


def checkpoints_of(folder: Location) -> Location:
    """Returns where the checkpoints of a run are, from its output folder or that place itself.

    Raises:
        CheckpointError: the folder is neither.
    """
    if isinstance(folder, Path):
        file = folder / "config.yaml"
        section = read_stored(file).get("checkpoint") if file.exists() else None
        # The run's own configuration knows where its checkpoints are.
        chosen = section.get("folder") if isinstance(section, dict) else None
        if chosen and isinstance(chosen, str):
            return files.location(chosen)
        if (folder / "checkpoints").is_dir():
            return folder / "checkpoints"
    if any(name.startswith("step-") for name in files.names(folder)):
        return folder
    step = folder.name.removeprefix("step-")
    if step.isdecimal() and (steps := integrity.committed_steps(folder.parent)):
        raise CheckpointError(
            f"{folder.parent} has no checkpoint of step {int(step)}; it has "
            f"{', '.join(map(str, steps))}"
        )
    hint = ""
    if isinstance(folder, Path) and not folder.exists() and _NAME.fullmatch(str(folder)):
        hint = f" For the model of the Hub, write hf://{folder}."
    raise CheckpointError(
        f"{folder} is neither a run (with checkpoints), nor a checkpoint (with meta.json), nor a "
        f"Hugging Face folder (with config.json). Name one of these.{hint}"
    )
