"""Imports DeepSpeed runs and ELMo's weights, exports to DeepSpeed: `samestep checkpoint convert`.

Moments are mapped to parameter names as the weights of Hugging Face models are: concatenating,
splitting and transposing move elements and change none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from samestep.config import Tree, kind_name, to_tree
from samestep.errors import CheckpointError, ConfigError
from samestep.storage import is_url, shown
from trainer.checkpoint import deepspeed, elmo, files, integrity, layout, writer
from trainer.checkpoint.deepspeed import KINDS, MOMENTS, WEIGHTS, ImportedState
from trainer.checkpoint.deferred import Deferred, defer, stored
from trainer.checkpoint.files import Location
from trainer.checkpoint.layout import StoredPiece, StoredTensors
from trainer.checkpoint.lock import only_writer
from trainer.models import Model
from trainer.models.codecs import codec_of
from trainer.models.families import bilm
from trainer.optim.kinds import adamw
from trainer.strategies import Replica
from trainer.training.compatibility import check_compatibility
from trainer.training.compose import checkpoint_folder, open_loader, write_description
from trainer.training.experiment import Experiment
from trainer.training.ledger import Ledger
from trainer.training.model import build_objectives
from trainer.training.phases import phase_of
from trainer.training.start_record import start_of
from trainer.training.weights.loading import load_weights

logger = logging.getLogger(__name__)

_FILE_BYTES = 2**28  # of tensors that are in memory at a time
_PEER_TIMEOUT = 60.0  # seconds until a file system shows what was written
_PREFIXES = {kind: "model/" if kind == WEIGHTS else f"optimizer/{kind}/" for kind in KINDS}


def import_deepspeed(source: Path, experiment: Experiment) -> None:
    """Writes the first checkpoint of a run, which resumes from a DeepSpeed checkpoint.

    Weights, moments and the number of updates are DeepSpeed's. It is unknown which examples the
    other run has consumed, so the data order is the experiment's, from its beginning.

    Args:
        source: folder of the checkpoint, or the one above it with the file `latest`. The parameters
            have the names of transformers, or samestep's own.
        experiment: the run.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model or optimizer, or the run has
            begun already.
        ConfigError: the experiment's optimizer or number of steps does not allow it.
    """
    folder = deepspeed.step_folder(source)
    if folder is None:
        raise CheckpointError(
            f"{source} is not a checkpoint of DeepSpeed (it has no latest, no *_model_states.pt "
            "and no folder zero in it). Name the folder that engine.save_checkpoint was given, or "
            "the one of a step in it"
        )
    _import(folder, deepspeed.open_checkpoint(folder), experiment, "DeepSpeed")


def import_elmo(source: Path, experiment: Experiment) -> None:
    """Writes the checkpoint of step 0 of a run, with ELMo's published layers.

    The file has no output matrix, so that is initialized as at the start of any run.

    Args:
        source: the weights, see `trainer.checkpoint.elmo`.
        experiment: the run, with `model` as its `kind: bilm`.

    Raises:
        CheckpointError: the file is damaged or of another model, or the run has begun already.
        ConfigError: the experiment's optimizer does not allow it.
    """
    config = experiment.model
    if isinstance(config, bilm.Config) and (config.clip != 3.0 or not config.residual):
        logger.warning(
            "published weights need model.clip=3.0 and model.residual=true; with other settings "
            "the states differ from ELMo's"
        )
    weights = elmo.read_weights(source)
    with torch.device("meta"):
        model = config.build()
    for name, parameter in model.named_parameters():
        if name.startswith("head."):
            weights[name] = Deferred(parameter, partial(_initial, model, name, experiment.seed))
    # Views of one zero: no memory for moments that are all 0.
    moments = {name: torch.zeros(()).expand(tensor.shape) for name, tensor in weights.items()}
    tensors = {WEIGHTS: stored(weights), **dict.fromkeys(MOMENTS, stored(moments))}
    _import(source, ImportedState(0, 0, {}, tensors), experiment, "ELMo's published weights")


def _initial(model: Model, name: str, seed: int) -> Tensor:
    shape = model.get_parameter(name).shape
    return model.initial_values(name, 0, shape.numel(), seed).view(shape)


def _import(source: Path, state: ImportedState, experiment: Experiment, origin: str) -> None:
    """Writes the first checkpoint of a run.

    Args:
        origin: who has taken the steps before it, for the ledger.
    """
    # Everything that may be rejected comes before the lock makes a folder.
    _check_run(experiment, state)
    tensors = _own_tensors(experiment, state, source)
    root = checkpoint_folder(experiment)
    # The lock keeps a training run from starting in the folder meanwhile.
    with only_writer(root):
        if steps := integrity.committed_steps(root):
            raise CheckpointError(
                f"{root} has a checkpoint of step {steps[-1]} already. Set output to another "
                "folder, or remove it"
            )
        # An interrupted conversion leaves an uncommitted step.
        for leftover in integrity.uncommitted_folders(root):
            integrity.remove_step(leftover)
        meta = _begin_run(experiment, state, origin)
        target = integrity.step_folder(root, state.step)
        files.make_folder(target)
        _write(target, tensors, state.step, meta)
    message = "wrote %s, which resumes after step %d of %s: samestep train"
    logger.info(message, target, state.step, source)


def export_deepspeed(source: str, target: str) -> None:
    """Writes a checkpoint as a universal one of DeepSpeed, with the names of transformers.

    Args:
        source: a run or a checkpoint, as for `load_weights`.
        target: the folder that DeepSpeed will load from.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged or of an optimizer without
            Adam's moments, or the target cannot be written.
        ConfigError: transformers has no such model, or source and target are not a valid pair.
    """
    if deepspeed.step_folder(Path(source)) is not None:
        raise ConfigError(
            f"{source} is a checkpoint of DeepSpeed. To import it, name the experiment that "
            f"resumes it, a YAML file, instead of {target}"
        )
    if is_url(target):
        raise ConfigError(
            f"DeepSpeed loads from a file system; name a folder instead of {shown(target)}"
        )
    weights = load_weights(source)
    if weights.step is None:
        raise CheckpointError(
            f"{source} is a Hugging Face model, without the state of an optimizer. Start the "
            "DeepSpeed script with from_pretrained instead"
        )
    if weights.base is not None:
        raise ConfigError(
            f"{weights.folder} trains only some of its parameters, and has no optimizer state of "
            f"the others. Start from its weights, which samestep export {source} writes"
        )
    codec = codec_of(weights.config)
    codec.to_huggingface()  # rejects a model that transformers does not have
    pieces: dict[str, dict[str, Sequence[StoredPiece]]] = {WEIGHTS: dict(weights.tensors.pieces)}
    for name, found in weights.optimizer.pieces.items():
        kind, _, parameter = name.partition("/")
        pieces.setdefault(kind, {})[parameter] = found
    # DeepSpeed needs both moments of every parameter.
    complete = all(each.keys() == pieces[WEIGHTS].keys() for each in pieces.values())
    if pieces.keys() != set(KINDS) or not complete:
        kept = ", ".join(sorted(pieces.keys() - {WEIGHTS}))
        raise CheckpointError(
            f"{weights.folder} is of an optimizer that keeps {kept}, and only "
            f"{' and '.join(MOMENTS)} of the Adam family can be exported. samestep export {source} "
            "writes its weights"
        )
    exported = {}
    for kind, each in pieces.items():
        exported[kind] = stored(codec.export_tensors(defer(StoredTensors(each))))
    # A generator, so that only one parameter with its moments is in memory.
    parameters = (
        (name, {kind: each[name] for kind, each in exported.items()}) for name in exported[WEIGHTS]
    )
    deepspeed.write_universal(Path(target), weights.step, parameters)
    logger.info("wrote %s: step %d of %s", target, weights.step, weights.folder)


def _check_run(experiment: Experiment, state: ImportedState) -> None:
    """Rejects a run that cannot resume from the state; warns of settings that differ."""
    optimizer = experiment.optimizer
    if experiment.freezes:
        raise ConfigError(
            "a run is imported with all of its parameters, and model.peft or frozen trains only "
            "some. Import without them, and start a new run with init_from"
        )
    if not isinstance(optimizer, adamw.Config):
        kind = kind_name(optimizer)
        raise ConfigError(
            f"the checkpoint has {' and '.join(MOMENTS)}, and optimizer {kind} has other state. "
            "Set optimizer to {kind: adamw}, {kind: lamb} or {kind: adamw_scale}; a run with "
            "init_from may have any"
        )
    if state.step >= experiment.training.steps:
        raise ConfigError(
            f"training.steps is {experiment.training.steps}, and the checkpoint is of step "
            f"{state.step}. To train on, set training.steps above {state.step}"
        )
    if state.settings.get("decoupled_weight_decay") is False and state.settings.get("weight_decay"):
        logger.warning("weight decay is decoupled here, and was part of the gradient (L2) before")
    # The moments were made with these, and adapt to others within some steps.
    for name in ("betas", "eps", "bias_correction"):
        before, now = state.settings.get(name), getattr(optimizer, name)
        before = tuple(before) if isinstance(before, list) else before
        if before is not None and before != now:
            message = "optimizer.%s is %s in the experiment, and was %s before"
            logger.warning(message, name, now, before)


def _own_tensors(experiment: Experiment, state: ImportedState, folder: Path) -> StoredTensors:
    """Returns all tensors of a samestep checkpoint; each is converted when it is read.

    Raises:
        CheckpointError: they are of another model than the experiment's.
    """
    with torch.device("meta"):
        parameters = dict(experiment.model.build().named_parameters())
    tensors: dict[str, Tensor] = {}
    try:
        for kind, found in state.tensors.items():
            deferred = defer(found)
            # The script may have wrapped a model of ours, or one of transformers.
            if not deferred.keys() & parameters.keys():  # transformers' names
                deferred = codec_of(experiment.model).import_tensors(deferred)
            tensors |= {f"{_PREFIXES[kind]}{name}": each for name, each in deferred.items()}
        wanted = {f"{prefix}{n}": p for prefix in _PREFIXES.values() for n, p in parameters.items()}
        own = stored(tensors)
        layout.check_same_tensors(wanted, own.pieces, folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"the experiment's model section does not describe the model in {folder}: {error}"
        ) from error
    return own


def _begin_run(experiment: Experiment, state: ImportedState, origin: str) -> Tree:
    """Creates the run's folder with a ledger that says where it begins. Returns the run's meta."""
    dataset = experiment.data.open()
    objectives = build_objectives(experiment, dataset)
    with torch.device("meta"):
        check_compatibility(experiment, dataset, objectives, experiment.build_model())
    phase = phase_of(experiment.resolved_phases(), state.step)
    with open_loader(experiment, dataset, Replica(0, 1), phase) as loader:
        # The run begins a data order of its own: nobody knows what was consumed before.
        data = loader.state_dict()
    examples = state.step * phase.global_batch_size if state.examples is None else state.examples
    tokens = examples * objectives[phase.index].pack_spec(phase.sequence_length).positions
    write_description(experiment, dataset)
    ledger = Ledger()
    ledger.open(Path(experiment.output) / "ledger.jsonl", state.step)
    ledger.take_over(state.step, origin)
    meta = {
        "config": to_tree(experiment),
        "start": {**start_of(experiment, dataset, None, None), "taken_by": origin},
        "state": {"step": state.step, "examples": examples, "tokens": tokens},
        "order": phase.order,
        "data": data,
        "window": {},
        # No row of the ledger is open.
        "digest": f"{0:016x}",
        "ledger": ledger.state_dict(),
    }
    ledger.close()
    return meta


def _write(folder: Location, tensors: StoredTensors, step: int, meta: Mapping[str, object]) -> None:
    """Writes a checkpoint as if several ranks did, one after the other, to bound the memory."""
    shares = _shares(tensors)
    text = writer.describe(step, len(shares), meta)
    staging = layout.Staging()
    # Rank 0 last: it waits for the files of the others, then commits.
    for rank in reversed(range(len(shares))):
        pieces = [
            piece for name in shares[rank] for piece in layout.local_pieces(name, tensors[name])
        ]
        writer.write_step(
            folder,
            staging.copy(pieces).result(),
            text,
            rank=rank,
            world_size=len(shares),
            peer_timeout=_PEER_TIMEOUT,
        )


def _shares(tensors: StoredTensors) -> list[list[str]]:
    """Splits the names, in their order, into groups of at most `_FILE_BYTES` or one tensor."""
    shares: list[list[str]] = []
    left = 0
    for name in tensors:
        size = 4 * math.prod(tensors.shape(name))  # fp32
        if not shares or size > left:
            shares.append([])
            # A tensor that is larger than that gets a file alone.
            left = _FILE_BYTES
        shares[-1].append(name)
        left -= size
    return shares
