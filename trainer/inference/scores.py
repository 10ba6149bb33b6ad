"""Scores of generated texts: `samestep evaluate RUN --generate`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, Any

import torch

from data_pipeline.format.shards import Tokens
from data_pipeline.packing import text_pairs
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.mixed_dataset import MixedDataset
from data_pipeline.sources import BadRecord, PairSource
from trainer.accelerators.detect import for_any_shapes
from trainer.checkpoint import integrity
from trainer.config import Kinds, Tree, decode
from trainer.config.tree import merge, parse_override
from trainer.errors import ConfigError, DataError
from trainer.generation import Generator
from trainer.generation.config import Config as GenerationConfig
from trainer.metrics import texts
from trainer.objectives import seq2seq
from trainer.storage import shown
from trainer.training import run_folder
from trainer.training.experiment import Experiment
from trainer.training.initial_weights import stored_values
from trainer.training.phases import phase_of
from trainer.training.run import checkpoint_folder
from trainer.training.weights import load_weights

logger = logging.getLogger(__name__)

_SOURCES = Annotated[Any, Kinds("data_pipeline.sources")]


def evaluate(
    experiment: Experiment,
    step: int | None,
    settings: Sequence[str],
    metrics: Sequence[str],
    files: Sequence[str] = (),
    limit: int | None = None,
) -> dict[str, float]:
    """Scores what a checkpoint of a run generates for the sources of pairs of texts, on a single device.

    The scores are appended to RUN/scores.jsonl, too, as a row like those of metrics.jsonl.

    Args:
        experiment: of the run.
        step: that of the checkpoint; None means the newest.
        settings: of a `generation.Config`, as "beams=4".
        metrics: some of `trainer.metrics.texts.METRICS`.
        files: pairs in the format of the run's dataset; none means its held-out split.
        limit: how many of the pairs are taken; None means all.

    Raises:
        ConfigError: the model cannot generate, or the run's dataset has no pairs.
        CheckpointError: the run has no checkpoint.
        DataError: a pair cannot be read.
    """
    tree: Tree = {}
    for setting in settings:
        tree = merge(tree, parse_override(setting))
    config: GenerationConfig = decode(GenerationConfig, tree, "--generate")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit must be at least 1, not {limit}")
    head = experiment.model.head
    if head != "language_model":
        raise ConfigError(
            f"the model of {experiment.output} has a {head} head, which writes no text; leave --generate out, and "
            "samestep evaluate scores what it predicts"
        )
    checkpoints = checkpoint_folder(experiment)
    weights = load_weights(
        checkpoints if step is None else integrity.step_folder(checkpoints, step)
    )
    dataset = experiment.data.open()
    if isinstance(dataset, MixedDataset):
        raise ConfigError(
            "the run mixes several datasets, of which one can be scored at a time; name it, as with data.sources=[] "
            f"data.weights=[] data.path={next(iter(dataset.sources.values())).name}"
        )
    if dataset.manifest.target_file is None:
        raise ConfigError(
            f"{dataset.name} holds documents, not pairs of texts; set data.path to a dataset of pairs"
        )
    labels = tuple(dataset.manifest.source.get("labels", ()))
    scorers = {
        name: texts.build(name, labels) for name in metrics
    }  # a missing package is named before hours of work
    with torch.device("meta"):
        shapes = weights.config.build()
    stored_values(
        weights, shapes, dataset
    )  # refuses another tokenizer, before the weights are read
    model = weights.model()
    accelerator = for_any_shapes(experiment.accelerator)
    device = accelerator.device
    generate = Generator(model.to(device), dataset.tokenizer.vocabulary, config, device)
    pairs = _of_files(dataset, tuple(files)) if files else heldout_pairs(dataset)
    sources, references = zip(*islice(pairs, limit), strict=True)
    if labels and (wrong := texts.unknown_labels(references, labels)):
        raise DataError(
            f"the target {wrong[0]!r} is no label, as the tokenizer does not give labels back as they are; name the "
            "files of pairs with --pairs, or labels of its characters in source.labels"
        )
    task = experiment.objective.task
    if (
        isinstance(task, seq2seq.Config)
        and task.truncate_sources
        and task.layout == "encoder_decoder"
    ):
        phase = phase_of(experiment.resolved_phases(), (weights.step or 1) - 1)
        room = (
            phase.sequence_length - 1
        )  # the model reads as much of a source as it has learnt from
        if cut := sum(len(source) > room for source in sources):
            logger.info(
                "%d of %d sources are longer than %d tokens and lose their end",
                cut,
                len(sources),
                room,
            )
        sources = tuple(source[:room] for source in sources)
    logger.info("generating %d texts on %s", len(sources), accelerator.description)
    generated = generate([[*source.tolist(), generate.end] for source in sources])
    written = [dataset.tokenizer.decode(tokens) for tokens in generated]
    scores = {name: score(written, references) for name, score in scorers.items()}
    if labels:
        scores["no_label"] = len(texts.unknown_labels(written, labels))
    of = ",".join(map(shown, files)) or dataset.name
    generated_scores = {f"generated/{name}": value for name, value in scores.items()}
    run_folder.append_scores(
        experiment, weights.step or 0, of, {"pairs": len(written), **generated_scores}
    )
    return {"step": weights.step or 0, "pairs": len(written), **scores}


def heldout_pairs(dataset: Dataset) -> Iterator[tuple[Tokens, str]]:
    """The tokens of each source of the held-out split, and its target, as far as tokens give the text back."""
    for info in dataset.shards("heldout"):
        shard = dataset.open_shard(info, sentences=True)
        for start, (source, target) in zip(
            shard.start.tolist(), text_pairs.lengths(shard).tolist(), strict=True
        ):
            middle = start + source
            yield (
                shard.tokens[start:middle],
                dataset.tokenizer.decode(shard.tokens[middle : middle + target]),
            )


def _of_files(dataset: Dataset, paths: tuple[str, ...]) -> Iterator[tuple[Tokens, str]]:
    """The tokens of each source in files of the dataset's format, the prefix included, and its target."""
    source: PairSource = decode(_SOURCES, dataset.manifest.source, "source").at(paths).build()
    pairs = []
    for record in source.records():
        try:
            pairs.append(source.parse_pair(record))
        except BadRecord as error:
            raise DataError(
                f"{shown(source.files[record.file])}:{record.line}: {error}; correct it"
            ) from None
    encoded = dataset.tokenizer.encode_batch([text for text, _ in pairs])
    return zip(encoded, (target for _, target in pairs), strict=True)
