"""Trained weights wherever they lie: a run's folder, one of its checkpoints, or a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from trainer.checkpoint import huggingface, integrity, manager
from trainer.checkpoint.layout import StoredTensors, local_piece
from trainer.config import Kinds, decode
from trainer.errors import CheckpointError

_MODELS = Kinds("trainer.models")
_PREFIX = "model/"


@dataclass(frozen=True)
class Weights:
    """A model and its parameters.

    Attributes:
        config: the `Config` of a module in trainer/models.
        tensors: parameters under our names, on the CPU, read when they are asked for.
        folder: of the checkpoint, or of the Hugging Face model.
        tokenizer: the folder of the tokenizer that goes with them.
        step: of the checkpoint; None for a Hugging Face model.
    """

    config: Any
    tensors: StoredTensors
    folder: Path
    tokenizer: Path
    step: int | None = None


def load_weights(path: str | Path, rank: int = 0, world_size: int = 1) -> Weights:
    """Opens the newest valid checkpoint of a run, a certain checkpoint, or a Hugging Face folder.

    With several ranks this is collective: they share the work of verifying a checkpoint.

    Raises:
        CheckpointError: there is none of these, or it is damaged.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        content, tensors = huggingface.load_folder(folder)
        config = _MODELS.schema(content.get("model_type"), f"{folder / 'config.json'}: model_type")
        config = config.from_huggingface(content)
        parameters = config.import_tensors(tensors)
        stored = StoredTensors({name: [local_piece(name, tensor)] for name, tensor in parameters.items()})
        return Weights(config, stored, folder, tokenizer=folder)
    is_run = (folder / "checkpoints").is_dir()
    if not is_run and not (folder / "meta.json").is_file():
        raise CheckpointError(
            f"{folder} is no run (no checkpoints in it), no checkpoint (no meta.json) and no Hugging "
            "Face folder (no config.json); name the output folder of a run, or one of the others"
        )
    root = folder / "checkpoints" if is_run else folder.parent
    checkpoints = manager.Checkpointer(root, manager.Config(), rank=rank, world_size=world_size)
    if is_run:
        newest = checkpoints.latest()
        if newest is None:
            raise CheckpointError(f"{folder} has no checkpoint yet; wait for one, or set checkpoint.every lower")
        folder = integrity.step_folder(root, newest)
    meta, stored = checkpoints.open(folder)
    config = decode(Annotated[Any, _MODELS], meta["config"]["model"], f"{folder}: model")
    pieces = {name.removeprefix(_PREFIX): found for name, found in stored.pieces.items() if name.startswith(_PREFIX)}
    return Weights(config, StoredTensors(pieces), folder, folder.parent.parent / "tokenizer", meta["step"])
