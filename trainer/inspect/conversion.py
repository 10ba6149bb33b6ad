"""Taking over runs of DeepSpeed, and handing runs over to it: `samestep checkpoint convert`.

Moments are mapped to the names of parameters as the weights of Hugging Face models are: joining,
cutting and transposing move elements and change none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint import deepspeed, files, integrity, layout, writer
from trainer.checkpoint.deepspeed import MOMENTS, WEIGHTS, DeepSpeedState
from trainer.checkpoint.deferred import defer, stored
from trainer.checkpoint.files import Location
from trainer.checkpoint.layout import Piece, StoredPiece, StoredTensors
from trainer.checkpoint.lock import only_writer
from trainer.config import Tree, to_tree
from trainer.errors import CheckpointError, ConfigError
from trainer.optim import adamw
from trainer.storage import is_url, shown
from trainer.strategies import Replica
from trainer.training.compatibility import check_compatibility
from trainer.training.experiment import Experiment
from trainer.training.ledger import Ledger
from trainer.training.phases import phase_of
from trainer.training.run import checkpoint_folder, open_loader, write_description
from trainer.training.weights import load_weights

logger = logging.getLogger(__name__)

_FILE_BYTES = 2**28  # written from memory at a time
_PATIENCE = 60.0  # seconds until a file system shows what has been written
_PREFIXES = {WEIGHTS: "model/", **{kind: f"optimizer/{kind}/" for kind in MOMENTS}}


def take_over(source: Path, experiment: Experiment) -> None:
    """Writes the first checkpoint of a run, which goes on from a checkpoint of DeepSpeed.

    Weights, moments and the number of updates are those of DeepSpeed. Which examples the other run
    has seen cannot be known: the data order is that of the experiment, from its beginning.

    Args:
        source: the folder of the checkpoint, or the one above it, with `latest` in it.
        experiment: the run. The checkpoint has the names of its parameters in transformers, or our
            own.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model or optimizer, or the run has
            begun already.
        ConfigError: the experiment's optimizer or steps do not fit it.
    """
    folder = deepspeed.step_folder(source)
    if folder is None:
        raise CheckpointError(
            f"{source} is no checkpoint of DeepSpeed (no latest, no *_model_states.pt and no "
            "folder zero in it); name "
            "the folder that engine.save_checkpoint was given, or the one of a step in it"
        )
    state = deepspeed.open_checkpoint(folder)
    _check_run(experiment, state)
    tensors = _own_tensors(experiment, state, folder)
    root = checkpoint_folder(experiment)
    with only_writer(root):
        if steps := integrity.committed_steps(root):
            raise CheckpointError(
                f"{root} has a checkpoint of step {steps[-1]} already; set output to another "
                "folder, or remove it"
            )
        for leftover in integrity.uncommitted_folders(root):
            integrity.remove_step(leftover)
        meta = _begin_run(experiment, state)
        target = integrity.step_folder(root, state.step)
        files.make_folder(target)
        _write(target, tensors, state.step, meta)
    logger.info(
        "wrote %s, which goes on after step %d of %s: samestep train", target, state.step, folder
    )


def hand_over(source: str, target: str) -> None:
    """Writes the newest checkpoint of a run, or a certain one, as a universal checkpoint of
    DeepSpeed.

    The parameters get the names that they have in transformers.

    Args:
        source: a run or a checkpoint, as `load_weights` takes it.
        target: the folder that DeepSpeed is to load from.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, of another optimizer than
            Adam's family, or cannot be written.
        ConfigError: transformers has no such model, or source and target do not go together.
    """
    if deepspeed.step_folder(Path(source)) is not None:
        raise ConfigError(
            f"{source} is a checkpoint of DeepSpeed; name the experiment that is to go on from it, "
            "a YAML file, and "
            f"not {target}"
        )
    if is_url(target):
        raise ConfigError(
            f"DeepSpeed loads from a file system; name a folder instead of {shown(target)}"
        )
    weights = load_weights(source)
    if weights.step is None:
        raise CheckpointError(
            f"{source} is a Hugging Face model, without the state of an optimizer; let the script "
            "of DeepSpeed begin "
            "with from_pretrained"
        )
    if weights.base is not None:
        raise ConfigError(
            f"{weights.folder} trains only some of its parameters, and the state of the others' "
            "optimizer is missing; "
            f"samestep export {source} writes weights to start from"
        )
    weights.config.to_huggingface()  # refuses a model that transformers does not have
    pieces: dict[str, dict[str, Sequence[StoredPiece]]] = {WEIGHTS: dict(weights.tensors.pieces)}
    for name, found in weights.optimizer.pieces.items():
        kind, _, parameter = name.partition("/")
        pieces.setdefault(kind, {})[parameter] = found
    if (
        any(each.keys() != pieces[WEIGHTS].keys() for each in pieces.values())
        or pieces.keys() != _PREFIXES.keys()
    ):
        kept = ", ".join(sorted(pieces.keys() - {WEIGHTS}))
        raise CheckpointError(
            f"{weights.folder} is of an optimizer that keeps {kept}, and {' and '.join(MOMENTS)} "
            "of the Adam family "
            f"are what can be handed over; samestep export {source} writes its weights"
        )
    exported = {
        kind: stored(weights.config.export_tensors(defer(StoredTensors(each))))
        for kind, each in pieces.items()
    }
    parameters = (
        (name, {kind: each[name] for kind, each in exported.items()}) for name in exported[WEIGHTS]
    )
    deepspeed.write_universal(Path(target), weights.step, parameters)
    logger.info("wrote %s: step %d of %s", target, weights.step, weights.folder)


def _check_run(experiment: Experiment, state: DeepSpeedState) -> None:
    """Refuses a run that cannot go on from the state; says what it does with other settings."""
    optimizer = experiment.optimizer
    if experiment.freezes:
        raise ConfigError(
            "the checkpoint holds the state of an optimizer that trained all parameters, and "
            "model.peft or frozen "
            "leaves some out; start a new run from the weights (save_pretrained, and init_from)"
        )
    if not isinstance(optimizer, adamw.Config):
        kind = type(optimizer).__module__.rpartition(".")[2]
        raise ConfigError(
            f"the checkpoint holds {' and '.join(MOMENTS)}, and optimizer {kind} goes on from "
            "others; set optimizer to "
            "{kind: adamw}, {kind: lamb} or {kind: adamw_scale}, or start a new run from the "
            "weights (save_pretrained, "
            "and init_from)"
        )
    if state.step >= experiment.training.steps:
        raise ConfigError(
            f"training.steps is {experiment.training.steps} and the checkpoint of step "
            f"{state.step}, which leaves "
            f"nothing to do; set training.steps above {state.step}"
        )
    if state.settings.get("decoupled_weight_decay") is False and state.settings.get("weight_decay"):
        logger.warning("weight decay is decoupled here, and was part of the gradient (L2) before")
    for name in ("betas", "eps", "bias_correction"):
        before, now = state.settings.get(name), getattr(optimizer, name)
        before = tuple(before) if isinstance(before, list) else before
        if before is not None and before != now:
            logger.warning(
                "optimizer.%s is %s in the experiment, and was %s before", name, now, before
            )


def _own_tensors(experiment: Experiment, state: DeepSpeedState, folder: Path) -> StoredTensors:
    """All tensors of a checkpoint of ours; each is put together when it is asked for.

    Raises:
        CheckpointError: they are of another model than the experiment's.
    """
    with torch.device("meta"):
        shapes = dict(experiment.model.build().named_parameters())
    wanted = {
        f"{prefix}{name}": each for prefix in _PREFIXES.values() for name, each in shapes.items()
    }
    tensors: dict[str, Tensor] = {}
    try:
        for kind, found in state.tensors.items():
            promised = defer(found)
            if not promised.keys() & shapes.keys():
                promised = experiment.model.import_tensors(promised)
            tensors |= {f"{_PREFIXES[kind]}{name}": each for name, each in promised.items()}
        own = stored(tensors)
        layout.check_same_tensors(wanted, own.pieces, folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"make the experiment's model section that of the model in {folder}: {error}"
        ) from error
    return own


def _begin_run(experiment: Experiment, state: DeepSpeedState) -> Tree:
    """Makes the run's folder, with a ledger that says where it begins.

    Returns what its first checkpoint says.
    """
    dataset = experiment.data.open()
    objective = experiment.objective.build(dataset.tokenizer.vocabulary)
    with torch.device("meta"):
        check_compatibility(experiment, dataset, objective, experiment.build_model())
    phase = phase_of(experiment.resolved_phases(), state.step)
    with open_loader(experiment, dataset, objective, Replica(0, 1), phase) as loader:
        data = loader.state_dict()
    examples = state.step * phase.global_batch_size if state.examples is None else state.examples
    tokens = examples * objective.pack_spec(phase.sequence_length).positions
    write_description(experiment, dataset)
    ledger = Ledger()
    ledger.open(Path(experiment.output) / "ledger.jsonl", state.step)
    ledger.take_over(state.step, "DeepSpeed")
    meta = {
        "config": to_tree(experiment),
        "state": {"step": state.step, "examples": examples, "tokens": tokens},
        "order": phase.order,
        "data": data,
        "window": {},
        "digest": f"{0:016x}",
        "ledger": ledger.state_dict(),
    }
    ledger.close()
    return meta


def _write(folder: Location, tensors: StoredTensors, step: int, meta: Mapping[str, object]) -> None:
    """Writes a checkpoint as ranks do that each hold some of its tensors, one rank after the other."""
    shares = _shares(tensors)
    text = writer.describe(step, len(shares), meta)
    staging = layout.Staging()
    for rank in reversed(range(len(shares))):  # the first commits what the others have written
        shapes = {name: tensors.shape(name) for name in shares[rank]}
        pieces = [
            Piece(name, shape, (0,) * len(shape), tensors[name]) for name, shape in shapes.items()
        ]
        content = staging.copy(pieces)
        writer.write_step(
            folder, content, text, rank=rank, world_size=len(shares), peer_timeout=_PATIENCE
        )


def _shares(tensors: StoredTensors) -> list[list[str]]:
    """The names of the tensors, cut into runs of about `_FILE_BYTES`."""
    shares: list[list[str]] = []
    left = 0
    for name in tensors:
        size = 4 * math.prod(tensors.shape(name))
        if not shares or size > left:
            shares.append([])
            left = _FILE_BYTES
        shares[-1].append(name)
        left -= size
    return shares
