"""Opens trained weights: a run or one of its checkpoints, or a Hugging Face folder, also remote.

If parameters were frozen, a checkpoint or an adapter holds only the trained part of a model. The
rest is read from the weights that the training started from, the base.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from samestep.config import Kinds, Tree, decode
from samestep.errors import CheckpointError, ConfigError
from samestep.storage.urls import is_hub_path
from trainer.checkpoint import files, huggingface, integrity, manager
from trainer.checkpoint.collective import gather, on_first_rank, raise_on_all_ranks
from trainer.checkpoint.files import Location
from trainer.checkpoint.holding import Hold
from trainer.checkpoint.layout import StoredTensors
from trainer.checkpoint.meta import read_meta
from trainer.models import Model, ModelConfig, Outputs, Stored, give_spellings
from trainer.models.codecs import codec_of, read_config
from trainer.models.peft.huggingface import import_adapter
from trainer.training.weights.claimed_size import check_elements, check_layers, check_size
from trainer.training.weights.label_order import is_reordered, with_label_order
from trainer.training.weights.places import (
    checkpoints_of,
    is_adapter,
    is_huggingface,
    is_step,
    resolve,
    resolve_best,
    resolve_together,
)
from trainer.training.weights.spare import check_unused, lent, not_finite

if TYPE_CHECKING:
    from data_pipeline.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

BASE = "base"
"""Beside a run's checkpoints: its frozen weights, or a link to them, if they were moved there."""

_MODELS = Kinds("trainer.models.families")
_SAME_FAMILY = {
    **dict.fromkeys(("camembert", "xlm-roberta"), "roberta"),
    **dict.fromkeys(("eurobert", "mistral", "olmo2", "qwen2", "qwen3", "smollm3"), "llama"),
    "mt5": "t5",
}
"""`model_type` of models with the architecture and tensor names of another family -> that family,
whose codec reads them."""


@dataclass(frozen=True)
class Weights:
    """A model and its parameters.

    Attributes:
        config: the model.
        tensors: parameters under samestep's names, on the CPU, read on access.
        folder: of the checkpoint, or of the Hugging Face model.
        tokenizer: folder of the tokenizer that goes with them; see `tokenizer_files`.
        step: of the checkpoint; None for a Hugging Face model.
        objective: settings that the checkpoint's model was trained with, `kind` included; of a
            distilled student, its own objective.
        optimizer: a checkpoint's optimizer state, as "exp_avg/<parameter>" and so on.
        base: weights that the frozen parameters are from; None: all are in `folder`.
        hub: hf://NAME of a model on the Hub.
        spare: trained parts that the model lacks and other heads have: head -> its parameters.
        hold: keeps a training from removing the checkpoint; see `trainer.checkpoint.holding`.
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
    spare: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    hold: Hold | None = field(default=None, repr=False, compare=False)

    @property
    def path(self) -> str:
        """Opens these very weights again; of a run, its checkpoint, as it will have newer ones."""
        if not isinstance(self.folder, Path):
            return self.folder.url
        return self.hub or str(self.folder.absolute())

    @property
    def generates_targets(self) -> bool:
        """Whether it reads sources, each with the end token, and generates their targets."""
        # A decoder that was trained on pairs has a setting `layout` and no token before a source.
        return self.config.encoder_decoder or "layout" in self.objective

    def identity(self) -> str:
        """A digest of the weights. Takes a second for some gigabytes of a Hugging Face folder."""
        # Hugging Face folders have no checksums, so their files are hashed.
        if self.step is not None:  # a checkpoint stores the checksums of its files
            return integrity.identity(self.folder)
        assert isinstance(self.folder, Path)
        own = huggingface.identity(self.folder)
        return own if self.base is None else f"{own}+{self.base.identity()}"

    def model(self, outputs: Outputs = frozenset()) -> Model:
        """Builds the trained model on the CPU, in eval mode, for use without its objective.

        Args:
            outputs: that the caller needs.

        Raises:
            ConfigError: the model does not offer them, or needs columns from its objective.
            CheckpointError: the weights do not match the model.
        """
        shapes = {name: tuple(self.tensors.shape(name)) for name in self.tensors}
        model = self.config.build()
        if missing := sorted(outputs - model.offers):
            raise ConfigError(
                f"the model of {self.folder} does not offer {missing[0]}; use another model"
            )
        if model.reads:
            raise ConfigError(
                f"the model of {self.folder} reads the column {min(model.reads)}, which only its "
                "objective makes; use samestep evaluate"
            )
        # A shared parameter is stored once, and loaded under each of its names.
        stored = {parameter: name for name, parameter in model.named_parameters()}
        expected = {name: tuple(parameter.shape) for parameter, name in stored.items()}
        different = {*expected.items()} ^ {*shapes.items()}
        if wrong := sorted(name for name, _ in different):
            raise CheckpointError(
                f"{self.folder} does not hold the weights of its model, first {wrong[0]}. "
                "Export it again."
            )
        every = model.named_parameters(remove_duplicate=False)
        values = {name: self.finite(name, self.tensors[name]) for name in self.tensors}
        model.load_state_dict({name: values[stored[parameter]] for name, parameter in every})
        give_spellings(model, lambda: self.load_tokenizer().spellings())
        return model.eval()

    def finite(self, name: str, values: Tensor) -> Tensor:
        """Returns values of a parameter.

        Raises:
            CheckpointError: one of them is NaN or infinite; with the stored tensor and its file.
        """
        if values.float().isfinite().all():
            return values
        place = f"{name} of {self.folder}"
        for origin in filter(None, (self, self.base)):
            if isinstance(origin.folder, Path):
                place = huggingface.first_not_finite(origin.folder) or place
        raise not_finite(place)

    def in_label_order(self, labels: tuple[str, ...]) -> Weights:
        """Returns the weights with the head's outputs in the order of `labels`.

        If these are not the labels of the head in another order, nothing changes.
        """
        if not is_reordered(self.config.labels, labels):
            return self
        config, tensors = with_label_order(self.config, self.tensors, labels)
        return replace(self, config=config, tensors=tensors)

    def tokenizer_files(self) -> AbstractContextManager[Path]:
        """The tokenizer's folder on this machine, inside the context."""
        return files.on_disk(self.tokenizer)

    def load_tokenizer(self) -> Tokenizer:
        """Loads the tokenizer that goes with the weights."""
        from data_pipeline.tokenizers.tokenizer import Tokenizer

        with self.tokenizer_files() as folder:
            tokenizer = Tokenizer.load(folder, saved=self.step is not None)
        size, rows = tokenizer.vocabulary.size, self.config.vocab_size
        if size > rows:
            raise ConfigError(
                f"the tokenizer in {self.tokenizer} has {size} tokens, and the model of "
                f"{self.folder} has embeddings of {rows}. Use the tokenizer that belongs to it, or "
                "resize_token_embeddings of transformers"
            )
        return tokenizer


def warn_of_not_finite(tensors: Mapping[str, Tensor], origin: str) -> None:
    """Logs a warning that names the first of some tensors with NaN or infinity, if there is one."""
    wrong = [name for name, each in tensors.items() if not each.float().isfinite().all()]
    if wrong:
        others = f", and so have {len(wrong) - 1} other tensors" if wrong[1:] else ""
        text = "%s, of %s, has NaN or infinity in it%s; take an earlier checkpoint"
        logger.warning(text, wrong[0], origin, others)


def load_weights(path: str | Location, rank: int = 0, world_size: int = 1) -> Weights:
    """Opens trained weights. Several ranks verify a checkpoint together: then it is collective.

    Args:
        path: one of
            a run: its output folder, or the folder or address of its checkpoints. Takes the newest
                valid checkpoint.
            RUN/best: the run's best checkpoint, by `training.best`.
            a folder of a certain checkpoint.
            a Hugging Face folder, or hf://NAME.
            a folder of Hugging Face's `peft` library with LoRA, a prompt or a prefix. The model
                that it names is opened as well.

    Raises:
        CheckpointError: none of these is there, it is damaged, or it cannot be downloaded. If one
            rank raises, all do.
    """
    folder = resolve_together(path, world_size)
    # Inside this block, an error of one rank is raised on all of them.
    with raise_on_all_ranks(world_size):
        # The path may be a run, one of its steps, a Hugging Face folder or an adapter; the files in
        # it decide.
        if is_huggingface(folder):
            return _from_huggingface(folder, str(path) if is_hub_path(str(path)) else None)
        if is_adapter(folder):
            return _from_adapter(folder)
        is_checkpoint = is_step(folder)
        root = folder.parent if is_checkpoint else checkpoints_of(folder)
    checkpoints = manager.Checkpointer(
        root, manager.Config(), rank=rank, world_size=world_size, holds=True
    )
    if not is_checkpoint:
        newest = checkpoints.latest()
        if newest is None:
            raise CheckpointError(
                f"{folder} has no checkpoint yet; wait for one, or set checkpoint.every lower"
            )
        folder = integrity.step_folder(root, newest)
    meta, stored = checkpoints.open(folder)
    # A user who names a run may expect its best checkpoint.
    step, best = meta["step"], meta.get("best", {}).get("step")
    if not is_checkpoint and best not in (None, step):
        message = "taking step %d of %s, the newest; the best, step %d, is %s/best"
        logger.info(message, step, path, best, path)
    # The description in the checkpoint counts, not the run's current configuration.
    config = decode(Annotated[Any, _MODELS], meta["config"]["model"], f"{folder}: model")
    tensors = _with_prefix(stored, "model/")
    base = None
    with raise_on_all_ranks(world_size):
        if "base" not in meta:
            check_size(config, tensors, folder)
    if "base" in meta:
        base = _load_base(folder, root / BASE, meta["base"], rank, world_size)
        tensors = _add_base(config, tensors, base)
    # Beside the checkpoints if they are not in the run's folder, else in the run's folder.
    with raise_on_all_ranks(world_size):
        tokenizer = root / "tokenizer"
        if not (tokenizer / "tokenizer_config.json").exists():
            tokenizer = root.parent / "tokenizer"
    objective = objective_of(meta["config"], step)
    return Weights(
        config,
        tensors,
        folder,
        tokenizer,
        step,
        objective.get("of", objective),
        _with_prefix(stored, "optimizer/"),
        base,
        hold=checkpoints.hold,
    )


def objective_of(config: Tree, step: int) -> Tree:
    """Returns the settings of the objective of the phase that ended at `step`, or later."""
    end = 0
    for phase in config.get("phases", ()):
        end += phase["steps"]
        if step <= end:
            config = {"objective": phase.get("objective") or config["objective"]}
            break
    objective: Tree = config["objective"]
    return objective


def shared_identity(weights: Weights, rank: int, world_size: int) -> str:
    """Returns `Weights.identity` on all ranks; the first computes it. Collective."""
    return on_first_rank(weights.identity, rank, world_size)


def base_of(weights: Weights, rank: int = 0, world_size: int = 1) -> dict[str, str]:
    """Returns what checkpoints store about the weights that a run begins with. Collective."""
    return {"path": weights.path, "identity": shared_identity(weights, rank, world_size)}


def _load_base(
    folder: Location, beside: Location, stored: Mapping[str, str], rank: int, world_size: int
) -> Weights:
    """Loads the weights of a checkpoint's frozen parameters. Collective.

    Args:
        folder: of the checkpoint.
        beside: where these weights are looked for first, instead of at `stored`.
        stored: the result of `base_of` when the checkpoint was written.

    Raises:
        CheckpointError: the weights are gone, or have changed.
    """
    with raise_on_all_ranks(world_size):
        moved = beside != folder and bool(files.names(beside))
    place: str | Location = stored["path"]
    if gather(moved, world_size)[0]:
        # A link leads to a checkpoint that has its tokenizer, and its own base, beside the target.
        place = beside.resolve() if isinstance(beside, Path) else beside
    fix = f"restore the original content of {stored['path']}"
    if not isinstance(beside, Path):
        fix += f", or download {folder.parent} and put the frozen weights there as {BASE}"
    elif beside != folder:
        fix += f", or copy that to {beside}, or put a link there to where it is now"
    try:
        base = load_weights(place, rank, world_size)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder} holds only the trained parameters, and the rest cannot be read from "
            f"{place}: {error}; {fix}"
        ) from error
    # A folder may have other content now than when the run began, such as a newer checkpoint.
    if shared_identity(base, rank, world_size) != stored["identity"]:
        raise CheckpointError(
            f"{folder} holds only the trained parameters, and {place} does not hold the frozen "
            f"weights that go with it; {fix}"
        )
    return replace(base, hub=stored["path"] if is_hub_path(stored["path"]) else None)


def _add_base(config: ModelConfig, trained: StoredTensors, base: Weights) -> StoredTensors:
    """Returns all parameters of a model: the trained ones, and the frozen ones of the base."""
    base = base.in_label_order(config.labels)
    check_layers(config, len(trained) + len(base.tensors), base.folder)
    with torch.device("meta"):
        model = config.build()
    names = [name for name, _ in model.named_parameters()]
    # As at the start of the run: a parameter may come from a tensor of another name.
    shapes = {name: base.tensors.shape(name) for name in base.tensors}
    start = model.start_from(Stored(base.config, shapes))
    below = base.tensors.with_added(start.added).pieces
    pieces = {
        name: below[source]
        for name, source in start.sources.items()
        if source is not None and source in below
    }
    # Trained tensors replace the base's: a fine-tuned head, for example.
    pieces |= trained.pieces
    pieces |= StoredTensors.of(lent(base.spare, model, pieces)).pieces
    if absent := [name for name in names if name not in pieces]:
        raise CheckpointError(
            f"{base.folder} has no {absent[0]}, so it does not hold the frozen weights of this "
            "checkpoint. Restore the original ones."
        )
    whole = StoredTensors({name: pieces[name] for name in names})
    check_elements(model, whole, base.folder)
    return whole


def load_config(path: str | Location) -> ModelConfig:
    """Returns the configuration of a model that `load_weights` would open.

    A run's newest checkpoint is taken as it is, without verifying its tensors.

    Raises:
        CheckpointError: there is none, or its description is damaged.
    """
    folder = resolve(path)
    if is_huggingface(folder):
        return _config_and_tensors(folder)[0]
    if is_adapter(folder):
        return _from_adapter(folder).config
    # Reading only the description: preflight checks should not verify gigabytes.
    if not is_step(folder):
        check_weights(folder)
        root = checkpoints_of(folder)
        folder = integrity.step_folder(root, max(integrity.committed_steps(root)))
    model = read_meta(folder)["config"]["model"]
    config: ModelConfig = decode(Annotated[Any, _MODELS], model, f"{folder}: model")
    return config


def check_weights(start: Location) -> None:
    """Checks that `load_weights` would find weights in a folder or store, without reading them.

    Raises:
        CheckpointError: it would not.
    """
    start = resolve_best(start)
    if is_huggingface(start):
        huggingface.load_folder(start)
    elif is_adapter(start):
        huggingface.load_adapter(start)
    elif is_step(start):
        integrity.check_sizes(start)
    elif not integrity.committed_steps(checkpoints_of(start)):
        raise CheckpointError(
            f"init_from={start} has no checkpoint yet; wait for one, or name another run"
        )


def _with_prefix(stored: StoredTensors, prefix: str) -> StoredTensors:
    """Returns the tensors with a prefix, under the rest of their names."""
    pieces = {
        name.removeprefix(prefix): found
        for name, found in stored.pieces.items()
        if name.startswith(prefix)
    }
    return StoredTensors(pieces)


def _config_and_tensors(folder: Path) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    content, tensors = huggingface.load_folder(folder)
    family = content.get("model_type")
    # The folder may be a stranger's, and a dotted kind would run the code of a module.
    if isinstance(family, str) and "." in family:
        raise CheckpointError(
            f"{folder / 'config.json'} has model_type {family!r}, a Python module, which is not "
            "imported. Name a folder with a model of transformers, such as bert"
        )
    if isinstance(family, str):
        # The codec reads `model_type` again, and keeps it if exports do.
        family = _SAME_FAMILY.get(family, family)
    known = [kind.replace("_", "-") for kind in _MODELS.available()]
    if not isinstance(family, str) or family.replace("_", "-") not in known:
        raise CheckpointError(
            f"{folder / 'config.json'} has model_type {family!r}, which samestep does not have. "
            f"It has {', '.join(sorted({*known, *_SAME_FAMILY}))}"
        )
    schema = _MODELS.schema(family, f"{folder / 'config.json'}: model_type")
    with huggingface.wrong_settings_explained(folder):
        config: ModelConfig = read_config(schema, content, tensors)
    check_layers(config, len(tensors), folder)
    return config, tensors


def _from_huggingface(folder: Path, hub: str | None = None) -> Weights:
    config, tensors = _config_and_tensors(folder)
    with huggingface.wrong_settings_explained(folder):
        codec = codec_of(config)
        parameters = codec.import_tensors(tensors)
        spare = codec.import_spare(tensors)
    check_unused(tensors, parameters, folder)
    stored = StoredTensors.of(parameters)
    return Weights(config, stored, folder, tokenizer=folder, hub=hub, spare=spare)


def _from_adapter(folder: Path) -> Weights:
    content, tensors = huggingface.load_adapter(folder)
    base = _base_of_adapter(folder, content)
    with huggingface.wrong_settings_explained(folder):
        config, own = import_adapter(content, tensors, base.config)
    parameters = _add_base(config, StoredTensors.of(own), base)
    tokenizer = folder if (folder / "tokenizer_config.json").exists() else base.tokenizer
    return Weights(config, parameters, folder, tokenizer, base=base)


def _base_of_adapter(folder: Path, content: Tree) -> Weights:
    """Opens the model that an adapter was added to: of Hugging Face, and nothing else.

    A stranger's adapter could name an address, or a checkpoint of samestep with a module to import.
    """
    path, revision = content.get("base_model_name_or_path"), content.get("revision")
    if not isinstance(path, str) or not path or "\0" in path:
        raise CheckpointError(
            f"{folder} does not say what it was added to; set base_model_name_or_path in its config"
        )
    # peft stores a local folder or a name on the Hub, and does not say which.
    if not os.path.exists(path):
        from samestep.storage.hub import model_folder

        hub = path if is_hub_path(path) else f"hf://{path}" + (f"@{revision}" if revision else "")
        return _from_huggingface(model_folder(hub), hub)
    if not is_huggingface(Path(path)):
        raise CheckpointError(
            f"{folder} was added to {path}, which is no model of Hugging Face. Make one of it with "
            f"samestep export {path} DIR, and set base_model_name_or_path to DIR"
        )
    return _from_huggingface(Path(path))
