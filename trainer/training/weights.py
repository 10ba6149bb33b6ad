"""Trained weights wherever they lie: a run or one of its checkpoints, here or in a store, or a Hugging Face folder.

Of some only a part lies there: what was trained, or added, while the rest of the model was frozen. The rest is read
from where it came from.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import torch
from torch import Tensor

from trainer.checkpoint import files, huggingface, integrity, manager, retention
from trainer.checkpoint.files import Location
from trainer.checkpoint.layout import StoredTensors, group_by_name, local_pieces, stored_piece
from trainer.checkpoint.together import gather, together
from trainer.config import Kinds, decode, read_tree
from trainer.errors import CheckpointError, ConfigError
from trainer.models import Model, ModelConfig, Outputs
from trainer.models.peft.huggingface import import_adapter
from trainer.storage import is_url
from trainer.storage.hub import is_hub_path, model_folder

logger = logging.getLogger(__name__)

BASE = "base"
"""Beside a run's checkpoints: its frozen weights, or a link to them, where they have moved."""

_MODELS = Kinds("trainer.models")


@dataclass(frozen=True)
class Weights:
    """A model and its parameters.

    Attributes:
        config: the `Config` of a module in trainer/models.
        tensors: parameters under our names, on the CPU, read when they are asked for.
        optimizer: the state of a checkpoint's optimizer, as "exp_avg/<parameter>" and so on, likewise.
        folder: of the checkpoint, or of the Hugging Face model.
        tokenizer: the folder of the tokenizer that goes with them; see `tokenizer_files`.
        step: of the checkpoint; None for a Hugging Face model.
        objective: the settings that a checkpoint's model was trained with, its kind included; of a student, its own.
        base: where the parameters come from that were frozen; None: all are in `folder`.
        hub: the hf://NAME of a model of the Hub.
    """

    config: ModelConfig
    tensors: StoredTensors
    folder: Location
    tokenizer: Location
    step: int | None = None
    objective: Mapping[str, Any] = field(default_factory=dict)
    optimizer: StoredTensors = field(default_factory=lambda: StoredTensors({}))
    base: Weights | None = None
    hub: str | None = None

    @property
    def path(self) -> str:
        """What opens these very weights again: of a run it is the checkpoint, as the run will have others."""
        if isinstance(self.folder, files.Url):
            return self.folder.url
        return self.hub or str(self.folder.absolute())

    def identity(self) -> str:
        """A digest that changes with the weights; of a Hugging Face folder it takes a second for some gigabytes."""
        if self.step is not None:
            return integrity.identity(self.folder)
        assert isinstance(self.folder, Path)
        own = huggingface.identity(self.folder)
        return own if self.base is None else f"{own}+{self.base.identity()}"

    def model(self, outputs: Outputs = frozenset()) -> Model:
        """Builds the trained model on the CPU, in eval mode, to be used without its objective.

        Args:
            outputs: what will be asked of it.

        Raises:
            ConfigError: it does not offer them, or it reads columns that an objective has to make.
            CheckpointError: the weights are not those of the model.
        """
        model = self.config.build()
        if missing := sorted(outputs - model.offers):
            raise ConfigError(
                f"the model of {self.folder} does not offer {missing[0]}; use another model"
            )
        if model.reads:
            raise ConfigError(
                f"the model of {self.folder} reads the column {min(model.reads)}, which only its objective makes; "
                "use samestep evaluate"
            )
        # A shared parameter is stored once, and loaded under each of its names.
        stored = {parameter: name for name, parameter in model.named_parameters()}
        if wrong := sorted(set(stored.values()) ^ set(self.tensors)):
            raise CheckpointError(
                f"{self.folder} does not hold the weights of its model, first {wrong[0]}; export it anew"
            )
        every = model.named_parameters(remove_duplicate=False)
        model.load_state_dict({name: self.tensors[stored[parameter]] for name, parameter in every})
        return model.eval()

    def tokenizer_files(self) -> AbstractContextManager[Path]:
        """The tokenizer's folder on this machine, while the context lasts."""
        return files.on_disk(self.tokenizer)


def load_weights(path: str | Location, rank: int = 0, world_size: int = 1) -> Weights:
    """Opens the newest valid checkpoint of a run, a certain checkpoint, a Hugging Face folder, or hf://NAME.

    A run is named by its output folder, or by the folder or address that its checkpoints are in. RUN/best is its best
    checkpoint, where `training.best` says what that is. A folder of Hugging Face's `peft` library is opened with the
    model that it names, if it holds LoRA, a prompt or a prefix.

    With several ranks this is collective: they share the work of verifying a checkpoint, and all raise if one does.

    Raises:
        CheckpointError: there is none of these, it is damaged, or it cannot be downloaded.
    """
    with together(world_size):
        folder = (
            model_folder(str(path)) if is_hub_path(str(path)) else _best_named(files.location(path))
        )
        if _is_huggingface(folder):
            return replace(
                _from_huggingface(folder), hub=str(path) if is_hub_path(str(path)) else None
            )
        if _is_adapter(folder):
            return _from_adapter(folder, rank, world_size)
        is_step = _is_step(folder)
        root = folder.parent if is_step else checkpoints_of(folder)
    checkpoints = manager.Checkpointer(root, manager.Config(), rank=rank, world_size=world_size)
    if not is_step:
        newest = checkpoints.latest()
        if newest is None:
            raise CheckpointError(
                f"{folder} has no checkpoint yet; wait for one, or set checkpoint.every lower"
            )
        folder = integrity.step_folder(root, newest)
    meta, stored = checkpoints.open(folder)
    if not is_step and (best := meta.get("best", {}).get("step")) not in (None, meta["step"]):
        logger.info(
            "taking step %d of %s, the newest; the best, step %d, is %s/best",
            meta["step"],
            path,
            best,
            path,
        )
    config = decode(Annotated[Any, _MODELS], meta["config"]["model"], f"{folder}: model")
    tensors, optimizer = (_part(stored, prefix) for prefix in ("model/", "optimizer/"))
    base = None
    if "base" in meta:
        base = _load_base(folder, root / BASE, meta["base"], rank, world_size)
        tensors = _together(config, tensors, base)
    with together(world_size):
        beside = root / "tokenizer"
        tokenizer = (
            beside if (beside / "tokenizer_config.json").exists() else root.parent / "tokenizer"
        )
    objective = meta["config"]["objective"]
    return Weights(
        config,
        tensors,
        folder,
        tokenizer,
        meta["step"],
        objective.get("of", objective),
        optimizer,
        base,
    )


def shared_identity(weights: Weights, rank: int, world_size: int) -> str:
    """As `Weights.identity`, which the first of several processes finds out for all. Collective."""
    own = ""
    with together(world_size):
        if rank == 0:
            own = weights.identity()
    return gather(own, world_size)[0]


def base_of(weights: Weights, rank: int = 0, world_size: int = 1) -> dict[str, str]:
    """What a checkpoint says of the weights that its frozen parameters are of. Collective.

    Args:
        weights: these.
        rank, world_size: of the processes, the first of which does the work.
    """
    return {"path": weights.path, "identity": shared_identity(weights, rank, world_size)}


def _load_base(
    folder: Location, beside: Location, noted: Mapping[str, str], rank: int, world_size: int
) -> Weights:
    """The weights that the frozen parameters of a checkpoint are of.

    Args:
        folder: of the checkpoint.
        beside: where they are if it exists, whatever was noted.
        noted: what `base_of` said when the checkpoint was written.
        rank, world_size: of the processes.

    Raises:
        CheckpointError: they are gone, or others now.
    """
    with together(world_size):
        moved = beside != folder and bool(files.names(beside))
    place: str | Location = noted["path"]
    if gather(moved, world_size)[
        0
    ]:  # a link to a checkpoint has its tokenizer, and its own base, beside the target
        place = beside.resolve() if isinstance(beside, Path) else beside
    fix = f"bring back what {noted['path']} held"
    if isinstance(beside, files.Url):
        fix += f", or download {folder.parent} and put the frozen weights there as {BASE}"
    elif beside != folder:
        fix += f", or copy that to {beside}, or put a link there to where it is now"
    try:
        base = load_weights(place, rank, world_size)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder} holds only what was trained, and the rest cannot be read from {place}: {error}; {fix}"
        ) from error
    if shared_identity(base, rank, world_size) != noted["identity"]:
        raise CheckpointError(
            f"{folder} holds only what was trained, and {place} does not hold the frozen weights that go with it; {fix}"
        )
    return replace(base, hub=noted["path"] if is_hub_path(noted["path"]) else None)


def _together(config: ModelConfig, trained: StoredTensors, base: Weights) -> StoredTensors:
    """All parameters of a model: those that were trained, and the frozen ones."""
    with torch.device("meta"):
        names = [name for name, _ in config.build().named_parameters()]
    if absent := [name for name in names if name not in trained and name not in base.tensors]:
        raise CheckpointError(
            f"{base.folder} has no {absent[0]}, and so is not what the parameters were added to; bring back what was"
        )
    return StoredTensors(
        {name: (trained if name in trained else base.tensors).pieces[name] for name in names}
    )


def load_config(path: str | Location) -> ModelConfig:
    """The `Config` of the model that `load_weights` would open; the newest checkpoint of a run is taken as it is.

    Raises:
        CheckpointError: there is none, or what describes it is damaged.
    """
    folder = (
        model_folder(str(path)) if is_hub_path(str(path)) else _best_named(files.location(path))
    )
    if _is_huggingface(folder):
        return _config_and_tensors(folder)[0]
    if _is_adapter(folder):
        return _from_adapter(folder, 0, 1).config
    if not _is_step(folder):
        check_weights(folder)
        root = checkpoints_of(folder)
        folder = integrity.step_folder(root, max(integrity.committed_steps(root)))
    config: ModelConfig = decode(
        Annotated[Any, _MODELS], integrity.read_meta(folder)["config"]["model"], f"{folder}: model"
    )
    return config


def check_weights(start: Location) -> None:
    """Looks whether `load_weights` would find any in a folder or store, without reading them.

    Raises:
        CheckpointError: it would not.
    """
    start = _best_named(start)
    if _is_huggingface(start):
        huggingface.load_folder(start)
    elif _is_adapter(start):
        huggingface.load_adapter(start)
    elif _is_step(start):
        integrity.check_sizes(start)
    elif not integrity.committed_steps(checkpoints_of(start)):
        raise CheckpointError(
            f"init_from={start} has no checkpoint yet; wait for one, or name another run"
        )


def _best_named(path: Location) -> Location:
    """The checkpoint that RUN/best stands for; any other path as it is.

    Raises:
        CheckpointError: the run has found none to be best.
    """
    if path.name != "best" or files.names(path):
        return path
    root = checkpoints_of(path.parent)
    if (step := retention.best_step(root)) is None:
        raise CheckpointError(
            f"{path.parent} has no best checkpoint: it was trained without training.best; name the run, or a step"
        )
    return integrity.step_folder(root, step)


def _is_huggingface(folder: Location) -> TypeGuard[Path]:
    return (
        isinstance(folder, Path)
        and (folder / "config.json").is_file()
        and not huggingface.is_adapter(folder)
    )


def _is_adapter(folder: Location) -> TypeGuard[Path]:
    return isinstance(folder, Path) and huggingface.is_adapter(folder)


def _is_step(folder: Location) -> bool:
    return (folder / integrity.META).exists()


def _part(stored: StoredTensors, prefix: str) -> StoredTensors:
    """The tensors whose names begin so, under the rest of their names."""
    pieces = {
        name.removeprefix(prefix): found
        for name, found in stored.pieces.items()
        if name.startswith(prefix)
    }
    return StoredTensors(pieces)


def _config_and_tensors(folder: Path) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    content, tensors = huggingface.load_folder(folder)
    schema = _MODELS.schema(content.get("model_type"), f"{folder / 'config.json'}: model_type")
    config: ModelConfig = schema.from_huggingface(content, tensors)
    return config, tensors


def _from_huggingface(folder: Path) -> Weights:
    config, tensors = _config_and_tensors(folder)
    return Weights(config, _in_memory(config.import_tensors(tensors)), folder, tokenizer=folder)


def _from_adapter(folder: Path, rank: int, world_size: int) -> Weights:
    content, tensors = huggingface.load_adapter(folder)
    path = content.get("base_model_name_or_path")
    if not path:
        raise CheckpointError(
            f"{folder} does not say what it was added to; set base_model_name_or_path in its config"
        )
    if not is_url(path) and not Path(path).exists():
        path = f"hf://{path}" + (f"@{content['revision']}" if content.get("revision") else "")
    base = load_weights(path, rank, world_size)
    config, own = import_adapter(content, tensors, base.config)
    parameters = _together(config, _in_memory(own), base)
    has_tokenizer = (folder / "tokenizer_config.json").exists()
    return Weights(
        config, parameters, folder, folder if has_tokenizer else base.tokenizer, base=base
    )


def _in_memory(parameters: Mapping[str, Tensor]) -> StoredTensors:
    pieces = [stored_piece(piece) for each in parameters.items() for piece in local_pieces(*each)]
    return StoredTensors(group_by_name(pieces))


def checkpoints_of(folder: Location) -> Location:
    """Where the checkpoints of a run are, given its output folder or just that place.

    Raises:
        CheckpointError: the folder is neither.
    """
    if isinstance(folder, Path):
        settings = read_tree(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}
        if chosen := settings.get("checkpoint", {}).get("folder"):
            return files.location(chosen)
        if (folder / "checkpoints").is_dir():
            return folder / "checkpoints"
    if any(name.startswith("step-") for name in files.names(folder)):
        return folder
    step = folder.name.removeprefix("step-")
    if step.isdecimal() and (steps := integrity.committed_steps(folder.parent)):
        known = ", ".join(map(str, steps))
        raise CheckpointError(
            f"{folder.parent} has no checkpoint of step {int(step)}; there are those of {known}"
        )
    raise CheckpointError(
        f"{folder} is no run (no checkpoints in it), no checkpoint (no meta.json) and no Hugging Face folder (no "
        "config.json); name the output folder of a run, or one of the others"
    )
