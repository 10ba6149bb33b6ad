"""The average of a run's last checkpoints, which often predicts better than the last one alone.

Izmailov et al. 2018 (arXiv 1803.05407) average with equal weights, Polyak & Juditsky 1992 and most
vision models with exponential ones. Only weights are averaged: no optimizer state is written.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import yaml
from torch import Tensor

from samestep.errors import CheckpointError, ConfigError, fix_of
from samestep.progress import Progress
from samestep.storage.new_folder import new_folder
from samestep.untrusted import read_stored
from trainer.checkpoint import files, integrity
from trainer.checkpoint.manager import Checkpointer, Config
from trainer.checkpoint.meta import read_meta
from trainer.training.weights.loading import Weights, load_weights, warn_of_not_finite
from trainer.training.weights.places import checkpoints_of
from trainer.training.weights.terms import terms_of

logger = logging.getLogger(__name__)

_WRITTEN = ("format", "step", "saved", "world_size", "versions")
"""Entries of a checkpoint's meta.json that every save writes anew."""


def average(run: str, folder: str, last: int = 5, decay: float | None = None) -> None:
    """Averages the weights of a run's last checkpoints.

    Writes a folder that `samestep evaluate`, `export`, `features` and `init_from` take as a run.

    Args:
        run: the run's output folder, or the folder or address of its checkpoints.
        folder: must not exist; it appears when it is complete.
        last: number of checkpoints.
        decay: each checkpoint has this fraction of the next one's weight; None: equal weights.

    Raises:
        ConfigError: an argument is out of range, or the folder exists.
        CheckpointError: there are too few checkpoints, or one is damaged or of another shape.
    """
    if last < 2:
        raise ConfigError(f"--last is {last}. Use 2 or more checkpoints.")
    if decay is not None and not 0 < decay < 1:
        raise ConfigError(f"--decay is {decay}. Use a number between 0 and 1, such as 0.9.")
    target = Path(folder)
    if target.exists():
        raise ConfigError(f"{folder} exists. Remove it, or name another folder.")
    root = checkpoints_of(files.location(run))
    steps = integrity.committed_steps(root)[-last:]
    if len(steps) < last:
        raise CheckpointError(
            f"{run} has {len(steps)} checkpoints, and --last is {last}. Use a smaller number, or "
            "train with a larger checkpoint.keep_last."
        )
    loaded = [load_weights(integrity.step_folder(root, step)) for step in steps]
    fractions = _fractions(len(steps), decay)
    try:
        with new_folder(target) as temporary:
            _write(temporary, run, loaded, steps, fractions)
    except OSError as error:
        raise ConfigError(
            f"cannot write {folder}: {error.strerror}; {fix_of(error, 'remove it')}, "
            "or name another folder"
        ) from error
    logger.info("wrote %s: the average of the steps %s", folder, ", ".join(map(str, steps)))


def _fractions(count: int, decay: float | None) -> list[float]:
    """The fraction of each checkpoint, oldest first: with decay 0.5, 1/7, 2/7 and 4/7 of three."""
    weights = [1.0 if decay is None else decay ** (count - 1 - index) for index in range(count)]
    return [weight / sum(weights) for weight in weights]


def _write(
    target: Path,
    run: str,
    loaded: Sequence[Weights],
    steps: Sequence[int],
    fractions: Sequence[float],
) -> None:
    """Writes a run's folder with one checkpoint, which has the number of the newest step."""
    newest = loaded[-1]
    # One tensor at a time, so that memory holds one model, however many checkpoints there are.
    with Progress("averaging", len(newest.tensors)) as progress:
        tensors = {
            f"model/{name}": _mean([weights.tensors[name] for weights in loaded], fractions)
            for name in progress.track(newest.tensors)
        }
    warn_of_not_finite({name: tensors[f"model/{name}"] for name in newest.tensors}, run)
    meta = {
        name: value
        for name, value in read_meta(newest.folder).items()
        # Without a base, since all parameters are written, frozen ones included. Without a start,
        # so that it is not published as a checkpoint of the run.
        if name not in (*_WRITTEN, "base", "best", "start")
    }
    meta["average"] = {
        "of": run,
        "steps": list(steps),
        "fractions": list(fractions),
        "terms": terms_of(newest),
    }
    checkpoints = Checkpointer(
        target / "checkpoints", Config(asynchronous=False), rank=0, world_size=1
    )
    checkpoints.save(steps[-1], tensors, meta)
    checkpoints.wait()
    newest.load_tokenizer().save(target / "tokenizer")
    settings = meta["config"]
    if isinstance(newest.folder, Path) and (Path(run) / "config.yaml").is_file():
        settings = read_stored(Path(run) / "config.yaml")
    # The checkpoint of the average is in its own folder, wherever the run's are.
    settings = {**settings, "checkpoint": {**settings.get("checkpoint", {}), "folder": None}}
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=120)
    (target / "config.yaml").write_text(text, encoding="utf-8")


def _mean(tensors: Sequence[Tensor], fractions: Sequence[float]) -> Tensor:
    """Averages in fp64, so that the order of checkpoints does not matter."""
    if len({tensor.shape for tensor in tensors}) > 1:
        raise CheckpointError(
            "the checkpoints have weights of different shapes. Use a smaller --last, so that all "
            "are of one model."
        )
    total = tensors[0].double() * fractions[0]
    for tensor, fraction in zip(tensors[1:], fractions[1:], strict=True):
        total.add_(tensor.double(), alpha=fraction)
    return total.to(tensors[0].dtype)
