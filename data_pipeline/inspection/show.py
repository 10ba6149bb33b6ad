"""`samestep data show`: prints examples as the model sees them, with predicted tokens marked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeAlias

import numpy as np
from rich.text import Text

from data_pipeline.format.manifest import TaskLabels
from data_pipeline.order.example_order import Order
from data_pipeline.reading.cache import ShardCache
from data_pipeline.reading.config import Config as DataConfig
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.packed_split import PackedSplit
from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.config import Kinds, Tree, decode, read_tree
from samestep.errors import ConfigError
from samestep.examples import Batch, Examples, PackSpec, Vocabulary
from samestep.terminal import Console

_LEGEND = (
    r"predicted tokens: [bold green]\[masked][/] [bold yellow]\[was→is][/] [bold cyan]\[kept=][/]; "
    "one line for each chunk of an example, with its source"
)
_LEGEND_OF_ROWS = "texts of an example, their [bold green]label[/], and their source"
_LEGEND_OF_PAIRS = "source text, and → target"

Row: TypeAlias = dict[str, Any]
"""An example of a batch, by the names of its columns: arrays over positions, or numbers."""
Source: TypeAlias = tuple[str, int]
"""File and line of a document."""


class _Objective(Protocol):
    """The part of an objective that lays out a batch."""

    @property
    def needs(self) -> frozenset[str]: ...

    def pack_spec(self, sequence_length: int) -> PackSpec: ...

    def collate(self, examples: Examples, sequence_length: int) -> Batch: ...


class _ObjectiveConfig(Protocol):
    def build(self, vocabulary: Vocabulary) -> _Objective: ...


@dataclass(frozen=True)
class _View:
    """The sections of an experiment that determine the model's input."""

    objective: Annotated[_ObjectiveConfig, Kinds("trainer.objectives.kinds")]
    data: DataConfig
    seed: int = 0


def show(
    folder: str,
    experiment: str,
    overrides: Iterable[str],
    index: int,
    count: int,
    console: Console,
) -> None:
    """Prints the global examples index, index + 1, ... of a run on the dataset in `folder`.

    Raises:
        ConfigError: the experiment is wrong, or the dataset too small for it.
        DataError: the dataset is unfinished or damaged.
    """
    if index < 0:
        raise ConfigError(f"--index is {index}. It counts examples from 0.")
    tree = read_tree(experiment, overrides)
    sections: Tree = {name: tree[name] for name in ("objective", "seed") if name in tree}
    # A mixture is shown one dataset at a time.
    alone = {"path": folder, "sources": [], "weights": []}
    sections["data"] = {**tree.get("data", {}), **alone}
    view = decode(_View, sections)
    dataset = Dataset.open(folder, ShardCache.open_folder(view.data.cache, view.data.cache_size))
    tokenizer, task = dataset.tokenizer, dataset.manifest.task
    objective = view.objective.build(tokenizer.vocabulary)
    spec = objective.pack_spec(view.data.sequence_length)
    packed = PackedSplit(dataset, "train", spec, view.data.packing, view.seed)
    order = Order(packed.counts, seed=view.seed, lanes=view.data.lanes, window=view.data.window)
    legend = _LEGEND if spec.sides is None else _LEGEND_OF_PAIRS
    legend = legend if spec.parts is None else _LEGEND_OF_ROWS
    console.print(legend, style="dim", markup=True, highlight=False, soft_wrap=True)
    for number in range(index, index + count):
        at = order.locate([number])
        examples = packed.read(at, np.ones(1, dtype=np.float32))
        batch = objective.collate(examples, spec.sequence_length)
        row = {name: array[0] for name, array in batch.items()}
        segments = [row[name] for name in ("segments", "target_segments") if name in row]
        filled = sum(int((each > 0).sum()) for each in segments)
        relation = ""
        if examples.random is not None:
            is_random = examples.random[0]
            relation = ", NotNext: B is from elsewhere" if is_random else ", IsNext: B follows A"
        console.print(
            f"\nexample {number}: epoch {at.epoch[0]}, {len(examples.tokens)} tokens, "
            f"{int((row['weights'] > 0).sum())} predicted, {spec.positions - filled} positions of "
            f"padding{relation}",
            style="bold",
            highlight=False,
            soft_wrap=True,
        )
        (sources,) = packed.documents(at)
        if task is not None and spec.parts is not None:
            lines = _row_lines(row, examples, sources[0], task, tokenizer)
        elif spec.sides is not None:
            lines = _pair_lines(row, sources, tokenizer)
        else:
            # Every token is predicted from the ones before it: there is nothing to mark.
            if "next_tokens" in objective.needs:
                row["weights"] = np.zeros_like(row["weights"])
            prefix = spec.prefix if examples.isolated else 0
            lines = _chunk_lines(row, examples, sources, tokenizer, prefix, filled)
        for line in lines:
            console.print(line, soft_wrap=True)


def _row_lines(
    row: Row,
    examples: Examples,
    source: Source,
    task: TaskLabels,
    tokenizer: Tokenizer,
) -> Iterator[Text]:
    """Yields the texts of a row of a task, a line each, with its labels in them or below."""
    labels: Any = row.get("labels")
    texts = np.split(examples.tokens, np.cumsum(examples.length)[:-1])
    # Each line is a list of (tokens, mark).
    lines = [[(tokens, "")] for tokens in texts]
    last, column, below = texts[-1], int(examples.column[-1]), ""
    if task.kind == "multiple_choice":
        lines = [lines[0], *lines[1::2]]  # the first text precedes each of the others
        right = 1 + int(labels)
        lines[right] = [(lines[right][0][0], "→")]
    elif task.kind == "tagging":
        tags = labels[column : column + len(last)]
        at = np.flatnonzero(tags >= 0)
        names = [task.labels[tag] for tag in tags[at].tolist()]
        marks = ["", *("" if name == "O" else name for name in names)]
        lines[-1] = list(zip(np.split(last, at), marks, strict=True))
    elif task.kind == "question_answering" and labels.any():
        # Before the answer, the answer, behind it; the labels are its first and last position.
        spans = np.split(last, labels - column + np.array([0, 1]))
        lines[-1] = list(zip(spans, ("", "→", ""), strict=True))
    elif task.kind == "question_answering":
        below = "no answer here"
    elif task.kind == "regression":
        below = f"{labels:g}"
    elif task.kind == "retrieval" and examples.labels is not None:
        scores = examples.labels.values.tolist()
        # As choices, each passage follows the query; else the query is there once.
        passages = lines[1::2] if len(lines) == 2 * len(scores) else lines[1:]
        marked = zip(passages, scores, strict=True)
        lines = [lines[0], *([(parts[0][0], f"{score:g}")] for parts, score in marked)]
    elif "probabilities" in row:
        shares = zip(task.labels, row["probabilities"], strict=True)
        below = ", ".join(f"{name} {share:g}" for name, share in shares)
    else:
        below = task.labels[int(labels)]
    yield Text(f"{source[0]}:{source[1]}", "dim blue")
    for parts in lines:
        line = Text("  ")
        for tokens, mark in parts:
            if len(tokens):
                text = tokenizer.decode(tokens.tolist()).strip().replace("\n", "↵")
                line.append(f"[{mark} {text}] " if mark else f"{text} ", "bold green" * bool(mark))
        line.rstrip()
        yield line
    if below:
        yield Text(f"→ {below}", "bold green")


def _pair_lines(
    row: Row,
    sources: list[Source],
    tokenizer: Tokenizer,
) -> Iterator[Text]:
    """Yields each source and its target, which have the same segment number."""
    where = ", ".join(f"{file}:{line}" for file, line in dict.fromkeys(sources))
    yield Text(where, "dim blue")
    is_predicted = row["weights"] > 0
    segments = row["segments"]
    # A decoder alone has one sequence, and "predicted" has the positions of its targets.
    of_target = row["target_segments"] if "target_segments" in row else segments[row["predicted"]]
    for number in range(1, segments.max() + 1):
        read = row["tokens"][segments == number]
        labels = row["labels"][is_predicted & (of_target == number)]
        if "predicted" in row:  # the target, but for its last token, follows the source
            read = read[: len(read) - len(labels) + 1]
        for tokens, mark, style in ((read, "  ", ""), (labels, "→ ", "bold green")):
            text = tokenizer.decode(tokens.tolist()).replace("\n", "↵")
            yield Text.assemble(mark, (text, style))


def _chunk_lines(
    row: Row,
    examples: Examples,
    sources: list[Source],
    tokenizer: Tokenizer,
    prefix: int,
    filled: int,
) -> Iterator[Text]:
    """Yields the chunks of an example, each with the special tokens around it.

    A line ends where the next chunk, or its `prefix` of special tokens, begins.
    """
    begin = [0, *(examples.column[1:] - prefix).tolist()]
    end = [*begin[1:], filled]
    names = [""] * len(begin) if examples.random is None else ["A  ", "B  "]
    for name, first, last, (file, line) in zip(names, begin, end, sources, strict=True):
        where = (f"{name}{file}:{line}  ", "dim blue")
        yield Text.assemble(where, *_marked(row, first, last, tokenizer))


def _marked(
    row: Row,
    first: int,
    end: int,
    tokenizer: Tokenizer,
) -> Iterator[tuple[str, str]]:
    """Yields the positions [first, end) as (text, style)."""
    # Unused entries of "predicted" have weight 0. Of "a [MASK] sat on big mat", say with "cat"
    # masked, "mat" replaced by "hat" and "sat" predicted as it is, the line reads
    # "a [cat] [sat=] on big [mat→hat]".
    tokens, columns = row["tokens"], row["predicted"][row["weights"] > 0]
    original = tokens.copy()
    original[columns] = row["labels"][row["weights"] > 0]
    predicted = set(columns.tolist())
    special = set(tokenizer.vocabulary.special)
    before, start = "", first
    for position in range(first, end):
        if original[position] in special:
            yield f" {tokenizer.token(original[position])}", "dim"
            before, start = "", position + 1
            continue
        # Decoded from `start`: alone, a token does not show whether a space precedes it.
        text = tokenizer.decode(original[start : position + 1])
        new, before = text[len(before) :].replace("\n", "↵"), text
        # Decoders drop the space before the first word, here behind a special token.
        if position == start and position > first:
            new = f" {new.lstrip(' ')}"
        if position not in predicted:
            yield new, ""
            continue
        word = new.lstrip(" ") or "␣"
        gap = new[: -len(word)]
        if tokens[position] == tokenizer.vocabulary.mask:
            yield f"{gap}[{word}]", "bold green"
        elif tokens[position] == original[position]:
            yield f"{gap}[{word}=]", "bold cyan"
        else:
            yield f"{gap}[{word}→{tokenizer.token(tokens[position])}]", "bold yellow"
