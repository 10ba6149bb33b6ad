"""What is in a dataset and how its documents would pack.

The tables and the plot of `samestep data inspect`.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import get_args

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from data_pipeline.format.manifest import ShardInfo
from data_pipeline.packing import parts, text_pairs
from data_pipeline.packing.plans import Int64
from data_pipeline.packing.policies import plan_shard
from data_pipeline.reading.dataset import Dataset
from trainer.errors import DataError, MissingExtra
from trainer.examples import PackSpec, Policy

SEQUENCE_LENGTHS = (128, 512)
_BAR_CELLS = 40


@dataclass(frozen=True)
class Forecast:
    """What one packing makes of the training split, with one special token before and one after
    each piece.

    Attributes:
        sequence_length: positions of an example.
        policy: how documents become examples.
        examples: number of examples in an epoch.
        pieces: runs of tokens of one document in them.
        tokens: tokens in them.
    """

    sequence_length: int
    policy: Policy
    examples: int
    pieces: int
    tokens: int

    @property
    def real_share(self) -> float:
        """The fraction of positions that hold a token of a document.

        The rest is padding and special tokens.
        """
        return self.tokens / (self.examples * self.sequence_length)


@dataclass(frozen=True)
class Inspection:
    """A dataset's figures.

    Attributes:
        dataset: the dataset.
        split: what the rest is about: the training split, or the held-out one where there is no
            other.
        histogram: int64 [k], documents of 0, 1, 2-3, 4-7, ... tokens: entry i > 0 counts [2**(i-1),
            2**i).
        forecasts: of each sequence length and policy, for documents.
        text_lengths: the tokens of the sources and of the targets, for pairs of texts; for rows of
            a task, of the first texts, the second ones, ...; else empty.
    """

    dataset: Dataset
    split: str
    histogram: Int64
    forecasts: tuple[Forecast, ...]
    text_lengths: dict[str, Int64]

    @property
    def split_name(self) -> str:
        """What the split is called in titles."""
        return "training" if self.split == "train" else "held-out"


def inspect(dataset: Dataset) -> Inspection:
    """Packs documents in every way that they can be; lengths are read, tokens are not.

    Raises:
        DataError: the split is empty or a shard is damaged.
    """
    manifest = dataset.manifest
    split = "heldout" if manifest.task is not None and not manifest.splits["train"] else "train"
    policies = [
        policy for policy in get_args(Policy) if policy != "pairs" or manifest.has_sentences
    ]
    is_pairs = manifest.target_file is not None
    has_texts = is_pairs or manifest.task is not None
    settings = [
        (length, policy) for length in SEQUENCE_LENGTHS for policy in policies if not has_texts
    ]

    def count(info: ShardInfo) -> tuple[Int64, Int64, list[Int64]]:
        shard = dataset.read_index(info, has_texts or manifest.has_sentences)
        plans = [
            plan_shard(shard, PackSpec(length, prefix=1, suffix=1), policy)
            for length, policy in settings
        ]
        # frexp writes n as m * 2**e with m in [0.5, 1), so e is the number of binary digits of n.
        histogram = np.bincount(np.frexp(shard.length)[1], minlength=64)
        totals = np.array(
            [(p.examples, len(p.length), p.length.sum()) for p in plans], dtype=np.int64
        )
        if not has_texts:
            return histogram, totals, []
        return histogram, totals, list((text_pairs if is_pairs else parts).lengths(shard).T)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        histograms, totals_of, texts_of = zip(*pool.map(count, dataset.shards(split)), strict=True)
    histogram = np.sum(histograms, axis=0)
    totals = np.sum(totals_of, axis=0).tolist()
    if not histogram[1:].any():
        raise DataError(
            f"the documents of {dataset.name} hold no tokens; check the source and build the "
            "dataset again"
        )
    forecasts = (
        Forecast(*setting, *total) for setting, total in zip(settings, totals, strict=True)
    )
    columns = [
        np.concatenate(column)
        for column in zip_longest(*texts_of, fillvalue=np.zeros(0, dtype=np.int64))
    ]
    names = (
        ["source", "target"]
        if is_pairs
        else [f"text {number}" for number in range(1, len(columns) + 1)]
    )
    text_lengths = {name: column[column > 0] for name, column in zip(names, columns, strict=True)}
    return Inspection(dataset, split, np.trim_zeros(histogram, "b"), tuple(forecasts), text_lengths)


def _range_names(histogram: Int64) -> list[str]:
    firsts = [0, *(2**i for i in range(len(histogram) - 1))]
    return [f"{n:,}" if n < 2 else f"{n:,}-{2 * n - 1:,}" for n in firsts]


def report(inspection: Inspection, console: Console) -> None:
    """Prints the tables."""
    manifest = inspection.dataset.manifest
    contents = Table(
        "split", "shards", "documents", "tokens", "MB", title=escape(inspection.dataset.name)
    )
    for name, shards in manifest.splits.items():
        documents, tokens = sum(s.documents for s in shards), sum(s.tokens for s in shards)
        megabytes = sum(s.bytes for s in shards) / 1e6
        contents.add_row(
            name, f"{len(shards):,}", f"{documents:,}", f"{tokens:,}", f"{megabytes:,.1f}"
        )
    console.print(_right_aligned(contents))
    rejected = sum(manifest.documents_rejected.values())
    reasons = ", ".join(
        f"{reason}: {count:,}" for reason, count in sorted(manifest.documents_rejected.items())
    )
    console.print(
        f"{manifest.documents_in:,} documents read, {rejected:,} rejected"
        + f" ({reasons})" * bool(reasons)
    )
    console.print(
        f"vocabulary {manifest.vocab_size:,}, tokenizer {manifest.tokenizer_fingerprint[:12]}\n"
    )
    if manifest.task is not None:
        labels = ", ".join(manifest.task.labels)
        console.print(
            f"rows for {manifest.task.kind}" + f": {escape(labels)}" * bool(labels) + "\n"
        )

    lengths = Table("tokens", "documents", "", title=f"Length of {inspection.split_name} documents")
    for name, count in zip(
        _range_names(inspection.histogram), inspection.histogram.tolist(), strict=True
    ):
        bar = "█" * -(-count * _BAR_CELLS // int(inspection.histogram.max()))
        lengths.add_row(name, f"{count:,}", bar)
    console.print(_right_aligned(lengths))

    if inspection.text_lengths:
        rows = "pairs" if manifest.task is None else "rows"
        sides = Table(
            "",
            "median",
            "90 %",
            "99 %",
            "longest",
            title=f"Tokens of {inspection.split_name} {rows}",
        )
        for text, sizes in inspection.text_lengths.items():
            sides.add_row(
                text,
                *(f"{int(np.quantile(sizes, q, method='higher')):,}" for q in (0.5, 0.9, 0.99, 1)),
            )
        console.print(_right_aligned(sides))
        return
    forecast = Table(
        "length",
        "packing",
        "examples",
        "real tokens",
        "documents an example",
        title="Packing forecast",
    )
    for f in inspection.forecasts:
        share, mixture = f"{f.real_share:.1%}", f"{f.pieces / f.examples:.2f}"
        forecast.add_row(str(f.sequence_length), f.policy, f"{f.examples:,}", share, mixture)
    console.print(_right_aligned(forecast))


def _right_aligned(table: Table) -> Table:
    for column in table.columns:
        column.justify = "left" if column.header in ("split", "packing", "") else "right"
    return table


def plot(inspection: Inspection, path: Path) -> None:
    """Draws the histogram of lengths and the forecast into an image file.

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
    lengths.set(
        xlabel="tokens", ylabel="documents", title=f"Length of {inspection.split_name} documents"
    )
    lengths.tick_params("x", rotation=45)
    names = [f"{forecast.policy} {forecast.sequence_length}" for forecast in inspection.forecasts]
    bars = packing.barh(
        names, [100 * forecast.real_share for forecast in inspection.forecasts], color="#66ccee"
    )
    packing.bar_label(bars, fmt="%.1f", padding=3)
    packing.invert_yaxis()
    packing.set(xlim=(0, 110), xlabel="real tokens, % of positions", title="Packing forecast")
    for panel in (lengths, packing):
        panel.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot write the plot {path}: {error}; name a .png file in a writable folder"
        ) from error
