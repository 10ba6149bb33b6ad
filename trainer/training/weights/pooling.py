"""How the weights that a run starts from embed texts, and the settings that follow them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from data_pipeline.reading.concat_dataset import named_sources
from samestep.config import Tree
from samestep.errors import ConfigError, DataError
from trainer.checkpoint import integrity
from trainer.checkpoint.meta import read_meta
from trainer.models.codecs.sentence_transformers import Pooling, described
from trainer.models.pooling import TextPool
from trainer.objectives import ObjectiveConfig
from trainer.objectives.kinds import contrastive
from trainer.objectives.sentence_pairs import EmbeddingConfig
from trainer.training.experiment import Experiment
from trainer.training.weights.loading import (
    Weights,
    check_weights,
    load_config,
    objective_of,
)
from trainer.training.weights.places import (
    checkpoints_of,
    is_adapter,
    is_huggingface,
    is_step,
    resolve,
)

logger = logging.getLogger(__name__)

_SETTINGS = ("pool", "normalize", "max_length", "similarity", "prompts")


def pooling_of(weights: Weights, pool: TextPool | None = None) -> Pooling | None:
    """How trained weights embed texts; None if neither their run nor their folder says so.

    Args:
        pool: replaces a folder's, which may be one that samestep does not compute.
    """
    if weights.objective:  # of a run; its step 0, computed again, has no step
        return of_run(weights.objective)
    return Pooling.of(weights.folder, pool) if isinstance(weights.folder, Path) else None


def with_pooling(experiment: Experiment, begun: Tree) -> Experiment:
    """Replaces null in settings of pooling by values of `init_from`, of prompts by the dataset's.

    A guide is pooled as its own weights are. A run that has begun keeps its own.

    Args:
        begun: the settings of the run so far; {} if it is new.

    Raises:
        ConfigError: the prompts are not the dataset's, or are unknown; or SPLADE starts from
            weights without a head that predicts tokens.
    """
    if not begun:
        _check_head(experiment)
    values = begun.get("objective", {}) if begun else _values(experiment)
    phases = tuple(
        phase
        if phase.objective is None
        else replace(phase, objective=_filled(phase.objective, values))
        for phase in experiment.phases
    )
    objective = _filled(experiment.objective, values)
    return _with_guide(replace(experiment, objective=objective, phases=phases), begun)


def _with_guide(experiment: Experiment, begun: Tree) -> Experiment:
    """Replaces null in a guide's `pool` by the value of its weights."""
    objective = experiment.objective
    if not isinstance(objective, contrastive.Config) or objective.guide is None:
        return experiment
    guide = objective.guide
    if guide.pool is not None:
        return experiment
    before = (begun.get("objective", {}).get("guide") or {}).get("pool")
    found = None if before else _stored(guide.path)
    # SPLADE pools no hidden states; such a guide is refused when it is loaded.
    pool = before or ("mean" if found is None or found.pool == "splade" else found.pool)
    logger.info("the guide %s pools texts by %r", guide.path, pool)
    prompts = found.settings()["prompts"] if found else {}
    if prompts != (objective.prompts or {}):
        logger.warning(
            "the guide %s was trained with the prompts %s, and reads the dataset's: %s",
            *(guide.path, prompts, objective.prompts or {}),
        )
    if found and (found.lower or found.longest):
        logger.warning(
            "the guide %s reads texts of any length as they are written, not of at most %s tokens"
            "%s",
            *(guide.path, found.longest or "all", " in lower case" if found.lower else ""),
        )
    guided = replace(objective, guide=replace(guide, pool=pool))
    return replace(experiment, objective=guided)


def _check_head(experiment: Experiment) -> None:
    """Rejects SPLADE from weights without a head: the logits of a new one would be noise."""
    objectives = (experiment.objective, *(phase.objective for phase in experiment.phases))
    if experiment.init_from is None or not any(map(_is_sparse, objectives)):
        return
    head = load_config(experiment.init_from).head
    if head != "language_model":
        raise ConfigError(
            f"objective.kind is splade, and {experiment.init_from} has no head that predicts "
            f"tokens (its head: {head}). Name a run of mlm, or a published model with such a head."
        )


def _is_sparse(objective: ObjectiveConfig | None) -> bool:
    return isinstance(objective, EmbeddingConfig) and objective.is_sparse


def _values(experiment: Experiment) -> Mapping[str, Any]:
    """The settings of pooling in `init_from`; logs them, and where the experiment has others."""
    start, objective = experiment.init_from, experiment.objective
    found = None if start is None else _stored(start)
    values = {} if found is None else found.settings()
    with suppress(DataError):  # the settings can be shown where the dataset is not
        values["prompts"] = _prompts(experiment, values.get("prompts"))
    if found is None:
        return values
    logger.info("texts are embedded as %s does: %s", start, described(_fitting(objective, values)))
    for name in _SETTINGS[:-1]:
        own = getattr(objective, name, None)
        if name in _fitting(objective, values) and own not in (None, values[name]):
            logger.warning(
                "objective.%s is %r, and %s has %r. Leave it out to continue as that does",
                *(name, own, start, values[name]),
            )
    if found.lower:
        logger.warning(
            "%s lower-cases texts, and training takes the dataset's as they are. Build it with "
            "tokenizer.lowercase=true",
            start,
        )
    return values


def _prompts(experiment: Experiment, stored: dict[str, str] | None) -> dict[str, str] | None:
    """The prompts that the dataset's texts begin with; None if neither settings nor data say so.

    Args:
        stored: prompts of `init_from`.
    """
    objective = experiment.objective
    given = objective.prompts if isinstance(objective, EmbeddingConfig) else None
    sources = [each.manifest.source for each in named_sources(experiment.data.open()).values()]
    # Builds of retrieval put prompts before texts; other rows have them in their files, or not.
    known = [
        {"query": source.get("query_prompt", ""), "document": source.get("passage_prompt", "")}
        for source in sources
        if source.get("kind") == "retrieval"
    ]
    if len(known) < len(sources) or any(each != known[0] for each in known):
        if stored and given is None:
            raise ConfigError(
                f"{experiment.init_from} puts the prompts {stored} before texts, and the dataset "
                "does not say whether its texts begin with them. Set objective.prompts to what "
                "they begin with, or to {}."
            )
        return given
    found = {role: prompt for role, prompt in known[0].items() if prompt}
    if given not in (None, found):
        raise ConfigError(
            f"objective.prompts is {given}, and the dataset was built with {found}. Leave it out, "
            "or build the dataset with those."
        )
    if stored is not None and stored != found:
        logger.warning(
            "%s has the prompts %s, and the dataset was built with %s",
            *(experiment.init_from, stored, found),
        )
    return found


def _stored(path: str) -> Pooling | None:
    folder = resolve(path)
    if is_huggingface(folder):
        return Pooling.of(folder)
    if is_adapter(folder):
        return None
    if not is_step(folder):
        check_weights(folder)
        root = checkpoints_of(folder)
        folder = integrity.step_folder(root, max(integrity.committed_steps(root)))
    meta = read_meta(folder)
    return of_run(objective_of(meta["config"], meta["step"]))


def of_run(objective: Mapping[str, Any]) -> Pooling | None:
    """How an objective with these settings embeds texts; None if it embeds none."""
    return Pooling.of_objective(objective) if "pool" in objective else None


def _filled(objective: ObjectiveConfig, values: Mapping[str, Any]) -> ObjectiveConfig:
    if not isinstance(objective, EmbeddingConfig):
        return objective
    own = {field.name for field in fields(objective) if getattr(objective, field.name) is None}
    values = _fitting(objective, values)
    new = {name: values[name] for name in _SETTINGS if name in own and values.get(name) is not None}
    return replace(objective, **new)


def _fitting(objective: ObjectiveConfig, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings that an objective can take over from weights that embed texts.

    SPLADE and poolings of hidden states share the length of texts and the prompts only.
    """
    if _is_sparse(objective) == (values.get("pool") == "splade"):
        return values
    return {name: values[name] for name in ("max_length", "prompts") if name in values}
