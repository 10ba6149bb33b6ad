"""`samestep data inspect`: the content of a dataset, and how its documents would pack."""

from __future__ import annotations

import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from rich.table import Table

from data_pipeline.format.manifest import PASSAGES, ShardInfo
from data_pipeline.packing import Int64, task_rows, text_pairs
from data_pipeline.packing.policy import plan_shard
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.label_counts import LabelCounts, count_labels
from data_pipeline.reading.passage_counts import count_passages
from samestep.errors import DataError, MissingExtra
from samestep.examples import PackSpec, Policy
from samestep.terminal import Console

# The two lengths of BERT's pre-training.
SEQUENCE_LENGTHS = (128, 512)
_BAR_WIDTH = 40  # characters


@dataclass(frozen=True)
class Forecast:
    """The training split under one packing.

    There is one special token before and one after each chunk of a document.

    Attributes:
        sequence_length: positions of an example.
        policy: how documents become examples.
        examples: number of examples in an epoch.
        chunks: number of chunks of documents in them.
        tokens: number of tokens in them.
    """

    sequence_length: int
    policy: Policy
    examples: int
    chunks: int
    tokens: int

    @property
    def real_share(self) -> float:
        """Fraction of positions with a token of a document, not padding or a special token."""
        # Shards of one document have no sentence pairs: segments come from another one, too.
        return self.tokens / max(1, self.examples * self.sequence_length)


@dataclass(frozen=True)
class Inspection:
    """The figures of a dataset.

    Attributes:
        dataset: the dataset.
        split: the split of the other figures: "train", or "heldout" if that is the only one.
        histogram: int64 [k], number of documents of 0, 1, 2-3, 4-7, ... tokens: entry i > 0 counts
            lengths in [2**(i-1), 2**i).
        forecasts: for documents, one for each sequence length and policy.
        text_lengths: for text pairs, tokens of each source and of each target; for rows of a task,
            of each first text, each second one, ...; of retrieval, of queries and of all passages;
            else empty.
        labels: number of rows with each class, or of words with each tag; None for other datasets.
    """

    dataset: Dataset
    split: str
    histogram: Int64
    forecasts: tuple[Forecast, ...]
    text_lengths: dict[str, Int64]
    labels: LabelCounts | None

    @property
    def split_name(self) -> str:
        """The split in titles."""
        return "training" if self.split == "train" else "held-out"


def inspect(dataset: Dataset) -> Inspection:
    """Packs documents in all possible ways; reads lengths, not tokens.

    Raises:
        DataError: the split is empty or a shard is damaged.
    """
    manifest = dataset.manifest
    split = "heldout" if manifest.task is not None and not manifest.splits["train"] else "train"
    is_pairs = manifest.target_file is not None
    # Pairs and rows are packed in one way each, which the objective determines.
    has_texts = is_pairs or manifest.task is not None
    settings: list[tuple[int, Policy]] = [
        (length, policy)
        for length in SEQUENCE_LENGTHS
        for policy in get_args(Policy)
        if not has_texts and (policy not in ("pairs", "full_sentences") or manifest.has_sentences)
    ]

    def count(info: ShardInfo) -> tuple[Int64, Int64, Int64]:
        """The histogram, the (examples, chunks, tokens) of each setting, and lengths [D, texts]."""
        shard = dataset.read_index(info, has_texts or manifest.has_sentences)
        totals = []
        for length, policy in settings:
            plan = plan_shard(shard, PackSpec(length, prefix=1, suffix=1), policy)
            totals.append((plan.examples, len(plan.length), plan.length.sum()))
        # frexp writes n as m * 2**e with m in [0.5, 1), so e is the number of binary digits of n:
        # lengths 0, 1, 2, 3, 4 are counted in entries 0, 1, 2, 2, 3.
        histogram = np.bincount(np.frexp(shard.length)[1], minlength=64)
        lengths = np.zeros((0, 0), dtype=np.int64)
        if has_texts:
            lengths = (text_pairs if is_pairs else task_rows).lengths(shard)
        return histogram, np.array(totals, dtype=np.int64).reshape(-1, 3), lengths

    histogram, totals = np.zeros(64, np.int64), np.zeros((len(settings), 3), np.int64)
    columns: dict[int, list[Int64]] = defaultdict(list)
    # Threads are enough: most of the time goes into reading and into numpy, which release the
    # interpreter lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for counts, sizes, lengths in pool.map(count, dataset.shards(split)):
            histogram += counts
            totals += sizes
            # Rows of a shard may have fewer texts than others; these have length 0.
            for number, column in enumerate(lengths.T):
                columns[number].append(column[column > 0])
    if not histogram[1:].any():
        raise DataError(
            f"the documents of {dataset.name} hold no tokens. Check the source and build the "
            "dataset again."
        )
    forecasts = tuple(
        Forecast(*setting, *total) for setting, total in zip(settings, totals.tolist(), strict=True)
    )
    names = ("source", "target")
    text_lengths = {
        names[number] if is_pairs else f"text {number + 1}": np.concatenate(column)
        for number, column in columns.items()
    }
    if passages := manifest.splits.get(PASSAGES):
        found = [dataset.read_index(info).length for info in passages]
        text_lengths = {"query": text_lengths["text 1"], "passage": np.concatenate(found)}
    histogram = np.trim_zeros(histogram, "b")
    labels = count_labels(dataset)
    return Inspection(dataset, split, histogram, forecasts, text_lengths, labels)


def _range_names(histogram: Int64) -> list[str]:
    firsts = [0, *(2**i for i in range(len(histogram) - 1))]
    return [f"{n:,}" if n < 2 else f"{n:,}-{2 * n - 1:,}" for n in firsts]


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title)
    for header in headers:
        is_text = header in ("split", "packing", "label", "")
        table.add_column(header, justify="left" if is_text else "right")
    return table


def report(inspection: Inspection, console: Console) -> None:
    """Prints the tables."""
    dataset, manifest = inspection.dataset, inspection.dataset.manifest
    contents = _table(dataset.name, "split", "shards", "documents", "tokens", "MB")
    for name, shards in manifest.splits.items():
        documents, tokens = sum(s.documents for s in shards), sum(s.tokens for s in shards)
        megabytes = sum(s.bytes for s in shards) / 1e6
        contents.add_row(
            name, f"{len(shards):,}", f"{documents:,}", f"{tokens:,}", f"{megabytes:,.1f}"
        )
    console.print(contents)
    rejected = sorted(manifest.documents_rejected.items())
    # Reasons quote values of the source, such as the label "[/neg]".
    reasons = ", ".join(f"{reason}: {count:,}" for reason, count in rejected)
    total = sum(count for _, count in rejected)
    console.print(
        f"{manifest.documents_in:,} documents read, {total:,} rejected"
        + (f" ({reasons})" if reasons else "")
    )
    if manifest.duplicates is not None:
        console.print(f"{manifest.duplicates:,} have the text of another one")
    console.print(
        f"vocabulary {manifest.vocab_size:,}, tokenizer {manifest.tokenizer_fingerprint[:12]}\n"
    )
    if manifest.task is not None:
        labels = ", ".join(manifest.task.labels)
        console.print(f"rows for {manifest.task.kind}" + (f": {labels}\n" if labels else "\n"))
    if (rows := count_passages(dataset)) is not None:
        console.print(f"{rows}\n")
    if (found := inspection.labels) is not None:
        counts = _table("Labels", "label", *found.splits)
        for label, cells in found.rows():
            counts.add_row(label, *cells)
        console.print(counts)
        for warning in found.warnings():
            console.print(f"warning: {warning}")

    title = f"Length of {inspection.split_name} documents"
    lengths = _table(title, "tokens", "documents", "")
    most = int(inspection.histogram.max())
    histogram = inspection.histogram.tolist()
    for name, count in zip(_range_names(inspection.histogram), histogram, strict=True):
        # Rounded up, so that a single document shows.
        lengths.add_row(name, f"{count:,}", "█" * -(-count * _BAR_WIDTH // most))
    console.print(lengths)

    if inspection.text_lengths:
        rows = "pairs" if manifest.task is None else "rows"
        title = f"Tokens of {inspection.split_name} {rows}"
        texts = _table(title, "", "median", "90 %", "99 %", "longest")
        for name, sizes in inspection.text_lengths.items():
            # "higher" gives a length that occurs, not a value between two.
            quantiles = np.quantile(sizes, (0.5, 0.9, 0.99, 1), method="higher")
            texts.add_row(name, *(f"{int(size):,}" for size in quantiles))
        console.print(texts)
        return
    headers = ("length", "packing", "examples", "real tokens", "documents an example")
    packing = _table("Packing forecast", *headers)
    for f in inspection.forecasts:
        share, mixture = f"{f.real_share:.1%}", f"{f.chunks / max(1, f.examples):.2f}"
        packing.add_row(str(f.sequence_length), f.policy, f"{f.examples:,}", share, mixture)
    console.print(packing)


def plot(inspection: Inspection, path: Path) -> None:
    """Plots the histogram of lengths and the forecasts into an image file.

    Raises:
        MissingExtra: matplotlib is not installed.
        DataError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "plot", "samestep data inspect --plot") from None
    figure = Figure(figsize=(11, 4), layout="constrained")
    lengths, packing = figure.subplots(1, 2, width_ratios=(3, 2))
    lengths.bar(_range_names(inspection.histogram), inspection.histogram, color="#4477aa")
    title = f"Length of {inspection.split_name} documents"
    lengths.set(xlabel="tokens", ylabel="documents", title=title)
    lengths.tick_params("x", rotation=45)
    names = [f"{forecast.policy} {forecast.sequence_length}" for forecast in inspection.forecasts]
    shares = [100 * forecast.real_share for forecast in inspection.forecasts]
    bars = packing.barh(names, shares, color="#66ccee")
    packing.bar_label(bars, fmt="%.1f", padding=3)
    packing.invert_yaxis()
    packing.set(xlim=(0, 110), xlabel="real tokens, % of positions", title="Packing forecast")
    for panel in (lengths, packing):
        panel.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: the suffix is no image format
        raise DataError(
            f"cannot write the plot {path}: {error}. Name a .png file in a writable folder."
        ) from error
