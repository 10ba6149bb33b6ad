"""Metrics of generated texts: `samestep evaluate RUN --generate`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, Any

import torch

from data_pipeline.format.shards import Tokens
from data_pipeline.packing import text_pairs
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.several_datasets import ConcatDataset
from data_pipeline.sources import BadRecord, PairSource
from samestep.config import Kinds, decode
from samestep.config.tree import merge_overrides
from samestep.errors import ConfigError, DataError
from samestep.storage import shown
from trainer.accelerators.detect import for_any_shapes
from trainer.generation import Generator
from trainer.generation.config import Config as GenerationConfig
from trainer.generation.ensemble import Ensemble
from trainer.inference.evaluate import Member, Step
from trainer.metrics import texts
from trainer.objectives.kinds import multi_task, seq2seq
from trainer.training import run_folder
from trainer.training.experiment import Experiment
from trainer.training.phases import phase_of
from trainer.training.weights.initial import stored_values
from trainer.training.weights.loading import Weights

logger = logging.getLogger(__name__)

_SOURCES = Annotated[Any, Kinds("data_pipeline.sources.kinds")]


def evaluate(
    experiment: Experiment,
    step: Step,
    settings: Sequence[str],
    metrics: Sequence[str],
    files: Sequence[str] = (),
    limit: int | None = None,
    ensemble: Sequence[Member] = (),
) -> dict[str, float]:
    """Generates a text for the source of each pair, and scores it against the target.

    Runs on a single device. The scores of a run alone are also appended to RUN/scores.jsonl.

    Args:
        experiment: the run.
        step: step of the checkpoint; None is the newest, "best" the best by `training.best`.
        settings: settings of `generation.Config`, such as "beams=4".
        metrics: names from `trainer.metrics.texts.METRICS`.
        files: pairs in the format of the run's dataset; () takes its held-out split.
        limit: maximum number of pairs; None takes all.
        ensemble: checkpoints of other runs, to average logits with.

    Raises:
        ConfigError: a model cannot generate, or the run's dataset has no pairs.
        CheckpointError: the run has no checkpoint.
        DataError: a pair cannot be read.
    """
    tree = merge_overrides({}, settings)
    config: GenerationConfig = decode(GenerationConfig, tree, "--generate")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit must be at least 1, not {limit}")
    members = [Member(experiment, step), *ensemble]
    for member in members:
        _check_head(member.experiment)
    dataset = _pairs_dataset(experiment)
    labels = tuple(dataset.manifest.source.get("labels", ()))
    # A missing package or another tokenizer is found here, before hours of generation.
    scorers = {name: texts.build(name, labels) for name in metrics}
    loaded = [_load(member, dataset) for member in members]
    weights = loaded[0]
    # Lengths change at each step, which devices that compile for fixed shapes cannot serve.
    accelerator = for_any_shapes(experiment.accelerator)
    device = accelerator.device
    models = [each.model().to(device) for each in loaded]
    model = models[0] if len(models) == 1 else Ensemble(models)
    generate = Generator(model, dataset.tokenizer.vocabulary, config, device)
    pairs = _of_files(dataset, tuple(files)) if files else heldout_pairs(dataset)
    sources: Sequence[Tokens]
    sources, references = zip(*islice(pairs, limit), strict=True)
    if labels and (wrong := texts.unknown_labels(references, labels)):
        raise DataError(
            f"the target {wrong[0]!r} is not a label, because the tokenizer does not decode labels "
            "to themselves; name files of pairs with --pairs, or change source.labels"
        )
    sources = _truncate(sources, experiment, weights)
    logger.info("generating %d texts on %s", len(sources), accelerator.description)
    # A source ends with the end token, as in training.
    generated = generate([[*source.tolist(), generate.end] for source in sources])
    predictions = [dataset.tokenizer.decode(tokens) for tokens in generated]
    scores = {name: score(predictions, references) for name, score in scorers.items()}
    # A model may write anything; texts that are no label count as wrong.
    if labels:
        scores["no_label"] = len(texts.unknown_labels(predictions, labels))
    if not ensemble:
        of = ",".join(map(shown, files)) or dataset.name
        stored = {f"generated/{name}": value for name, value in scores.items()}
        run_folder.append_scores(
            experiment, weights.step or 0, of, {"pairs": len(predictions), **stored}
        )
    return {"step": weights.step or 0, "pairs": len(predictions), **scores}


def _check_head(experiment: Experiment) -> None:
    """A head for a task has replaced the one that predicts tokens."""
    head = experiment.model.head
    if head != "language_model":
        raise ConfigError(
            f"the model of {experiment.output} has the head {head}, which generates no text; leave "
            "--generate out to score its predictions"
        )


def _load(member: Member, dataset: Dataset) -> Weights:
    """Opens a checkpoint, and checks that it has the dataset's tokenizer."""
    weights = member.load()
    # On the meta device, so the check allocates no second copy of the model.
    with torch.device("meta"):
        shapes = weights.config.build()
    stored_values(weights, shapes, dataset)
    return weights


def _pairs_dataset(experiment: Experiment) -> Dataset:
    """The run's dataset, if it is a single one with pairs of texts."""
    dataset = experiment.data.open()
    if isinstance(dataset, ConcatDataset):
        raise ConfigError(
            "the run mixes several datasets, which are scored one at a time; name one, as with "
            f"data.sources=[] data.weights=[] data.path={next(iter(dataset.sources.values())).name}"
        )
    if dataset.manifest.target_file is None:
        raise ConfigError(
            f"{dataset.name} holds documents, not pairs of texts; set data.path to a dataset of "
            "pairs"
        )
    return dataset


def _truncate(
    sources: Sequence[Tokens], experiment: Experiment, weights: Weights
) -> Sequence[Tokens]:
    """Truncates the sources of an encoder-decoder model that was trained on truncated sources."""
    task = experiment.objective.task
    if not (isinstance(task, seq2seq.Config | multi_task.Config) and task.truncate_sources):
        return sources
    if task.layout != "encoder_decoder":
        return sources
    phase = phase_of(experiment.resolved_phases(), (weights.step or 1) - 1)
    longest = phase.sequence_length - 1  # the end token takes a position
    if cut := sum(len(source) > longest for source in sources):
        logger.info(
            "%d of %d sources are longer than %d tokens and are truncated",
            *(cut, len(sources), longest),
        )
    return [source[:longest] for source in sources]


def heldout_pairs(dataset: Dataset) -> Iterator[tuple[Tokens, str]]:
    """Yields the source tokens and the decoded target of each pair of the held-out split."""
    for info in dataset.shards("heldout"):
        shard = dataset.open_shard(info, sentences=True)
        # The tokens of a pair lie end to end: s s s t t has the lengths 3 and 2.
        starts, lengths = shard.start.tolist(), text_pairs.lengths(shard).tolist()
        for start, (source, target) in zip(starts, lengths, strict=True):
            tokens = shard.tokens[start : start + source + target]
            yield tokens[:source], dataset.tokenizer.decode(tokens[source:])


def _of_files(dataset: Dataset, paths: tuple[str, ...]) -> Iterator[tuple[Tokens, str]]:
    """The source tokens, prefix included, and the target of each pair in files."""
    source: PairSource = decode(_SOURCES, dataset.manifest.source, "source").at(paths).build()
    for record in source.records():
        try:
            text, target = source.parse_pair(record)
        except BadRecord as error:
            place = f"{shown(source.files[record.file])}:{record.line}"
            raise DataError(f"{place}: {error}; correct the line") from error
        yield dataset.tokenizer.encode_batch([text])[0], target
