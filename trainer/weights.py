"""Trained weights wherever they lie: a run's folder, one of its checkpoints, or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from trainer.checkpoint import huggingface, integrity, manager
from trainer.config import Kinds, decode
from trainer.errors import CheckpointError

_MODELS = Kinds("trainer.models")


@dataclass(frozen=True)
class Weights:
    """A model and its parameters.

    Attributes:
        config: the `Config` of a module in trainer/models.
        tensors: whole parameters under our names, on the CPU.
        tokenizer: the folder of the tokenizer that goes with them.
    """

    config: Any
    tensors: Mapping[str, Tensor]
    tokenizer: Path


def load_weights(path: str | Path) -> Weights:
    """Reads the newest valid checkpoint of a run, a certain checkpoint, or a Hugging Face folder.

    Raises:
        CheckpointError: there is none of these, or it is damaged.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        content, tensors = huggingface.load_folder(folder)
        config = _MODELS.schema(content.get("model_type"), f"{folder / 'config.json'}: model_type")
        config = config.from_huggingface(content)
        return Weights(config, config.import_tensors(tensors), folder)
    step = folder
    if (folder / "checkpoints").is_dir():
        checkpoints = manager.Checkpointer(folder / "checkpoints", manager.Config(), rank=0, world_size=1)
        newest = checkpoints.latest()
        if newest is None:
            raise CheckpointError(f"{folder} has no checkpoint yet; wait for one, or set checkpoint.every lower")
        step = integrity.step_folder(checkpoints.folder, newest)
    elif not (folder / "meta.json").is_file():
        raise CheckpointError(
            f"{folder} is no run (no checkpoints in it), no checkpoint (no meta.json) and no Hugging "
            "Face folder (no config.json); name the output folder of a run, or one of the others"
        )
    config = decode(Annotated[Any, _MODELS], integrity.read_meta(step)["config"]["model"], f"{step}: model")
    return Weights(config, manager.load_full(step, "model/"), step.parent.parent / "tokenizer")
