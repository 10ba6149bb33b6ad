"""Examples as the model sees them, with what it has to predict marked: `samestep data show`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeAlias

import numpy as np
from rich.console import Console
from rich.text import Text

from data_pipeline.format.manifest import TaskLabels
from data_pipeline.order.example_order import Order
from data_pipeline.reading.cache import ShardCache
from data_pipeline.reading.config import Config as DataConfig
from data_pipeline.reading.dataset import Dataset, PackedSplit
from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer.config import Kinds, Tree, decode, read_tree
from trainer.errors import ConfigError
from trainer.examples import Batch, Examples, PackSpec, Vocabulary

_LEGEND = Text.assemble(
    "predicted tokens: ",
    ("[masked]", "bold green"),
    " ",
    ("[was→is]", "bold yellow"),
    " ",
    ("[kept=]", "bold cyan"),
    "; one line for each chunk of an example, with its source",
    style="dim",
)
_LEGEND_OF_ROWS = Text.assemble(
    "texts of an example, their ", ("label", "bold green"), ", and their source", style="dim"
)
_LEGEND_OF_PAIRS = Text("source text, and → target", style="dim")

Row: TypeAlias = dict[str, Any]
"""An example of a batch, by the names of its columns: arrays of positions, or numbers."""


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
    """The sections of an experiment that decide what the model sees."""

    objective: Annotated[_ObjectiveConfig, Kinds("trainer.objectives")]
    data: DataConfig
    seed: int = 0


def show(
    folder: str, experiment: str, overrides: Iterable[str], index: int, count: int, console: Console
) -> None:
    """Prints what a run of `experiment` on the dataset in `folder` consumes as global example
    index, index + 1, ...

    Raises:
        ConfigError: the experiment is wrong, or the dataset too small for it.
        DataError: the dataset is unfinished or damaged.
    """
    if index < 0:
        raise ConfigError(f"--index counts examples from 0; {index} is none of them")
    tree = read_tree(experiment, overrides)
    sections: Tree = {name: tree[name] for name in ("objective", "seed") if name in tree}
    alone = {"path": folder, "sources": [], "weights": []}
    sections["data"] = {**tree.get("data", {}), **alone}
    view = decode(_View, sections)
    dataset = Dataset.open(folder, ShardCache.open_folder(view.data.cache, view.data.cache_size))
    tokenizer, length = dataset.tokenizer, view.data.sequence_length
    objective = view.objective.build(tokenizer.vocabulary)
    spec = objective.pack_spec(length)
    packed = PackedSplit(dataset, "train", spec, view.data.packing, view.seed)
    order = Order(packed.counts, seed=view.seed, lanes=view.data.lanes, window=view.data.window)
    legend = _LEGEND if spec.sides is None else _LEGEND_OF_PAIRS
    console.print(legend if spec.parts is None else _LEGEND_OF_ROWS, soft_wrap=True)
    for number in range(index, index + count):
        at = order.locate([number])
        examples = packed.read(at, np.ones(1, dtype=np.float32))
        row = {
            name: array[0]
            for name, array in objective.collate(examples, spec.sequence_length).items()
        }
        filled = sum(
            int((row[name] > 0).sum()) for name in ("segments", "target_segments") if name in row
        )
        predicted = int((row["weights"] > 0).sum())
        if spec.sides is None and "next_tokens" in objective.needs:
            row["weights"] = np.zeros_like(
                row["weights"]
            )  # labels are the next tokens: there is nothing to mark
        relation, names = "", [""] * len(examples.column)
        if examples.random is not None:
            relation = (
                ", NotNext: B is from elsewhere"
                if examples.random[0]
                else ", IsNext: B is the text after A"
            )
            names = ["A  ", "B  "]
        console.print(
            f"\nexample {number}: epoch {at.epoch[0]}, {len(examples.tokens)} tokens, {predicted} "
            "predicted, "
            f"{spec.positions - filled} positions of padding{relation}",
            style="bold",
            highlight=False,
            soft_wrap=True,
        )
        (sources,) = packed.documents(at)
        if dataset.manifest.task is not None and spec.parts is not None:
            _print_row(row, examples, sources[0], dataset.manifest.task, tokenizer, console)
            continue
        if spec.sides is not None:
            _print_pairs(row, sources, tokenizer, console)
            continue
        # A piece is shown with the special tokens around it: up to where the next piece, or its
        # prefix, begins.
        prefix = spec.prefix if examples.isolated else 0
        begin = [0, *(examples.column[1:] - prefix).tolist()]
        for name, first, end, (file, line) in zip(
            names, begin, [*begin[1:], filled], sources, strict=True
        ):
            source = f"{name}{file}:{line}  "
            console.print(
                Text.assemble((source, "dim blue"), *_render(row, first, end, tokenizer)),
                soft_wrap=True,
            )


def _print_row(
    row: Row,
    examples: Examples,
    source: tuple[str, int],
    task: TaskLabels,
    tokenizer: Tokenizer,
    console: Console,
) -> None:
    """Prints the texts of a row of a task, a line each, and what is to be predicted, in them or
    below them.
    """
    labels: Any = row.get("labels")
    texts = [
        [(tokens, "")] for tokens in np.split(examples.tokens, np.cumsum(examples.length)[:-1])
    ]
    last, column, below = texts[-1][0][0], int(examples.column[-1]), ""
    if task.kind == "multiple_choice":
        texts = [texts[0], *texts[1::2]]  # the first one is in front of each of the others
        texts[1 + int(labels)] = [(tokens, "→") for tokens, _ in texts[1 + int(labels)]]
    elif task.kind == "tagging":
        tags = labels[column : column + len(last)]
        at = np.flatnonzero(tags >= 0)
        marks = ["" if task.labels[tag] == "O" else task.labels[tag] for tag in tags[at].tolist()]
        texts[-1] = list(zip(np.split(last, at), ["", *marks], strict=True))
    elif task.kind == "question_answering" and labels.any():
        texts[-1] = list(
            zip(np.split(last, labels - column + np.array([0, 1])), ("", "→", ""), strict=True)
        )
    elif task.kind == "question_answering":
        below = "no answer here"
    elif task.kind == "regression":
        below = f"{labels:g}"
    elif "probabilities" in row:
        below = ", ".join(
            f"{name} {share:g}"
            for name, share in zip(task.labels, row["probabilities"], strict=True)
        )
    else:
        below = task.labels[labels]
    console.print(Text(f"{source[0]}:{source[1]}", "dim blue"), soft_wrap=True)
    for text in texts:
        line = Text("  ")
        for tokens, mark in text:
            if len(tokens):
                part = tokenizer.decode(tokens.tolist()).strip().replace("\n", "↵")
                line.append(
                    f"{part} " if not mark else f"[{mark} {part}] ", "bold green" if mark else ""
                )
        line.rstrip()
        console.print(line, soft_wrap=True)
    if below:
        console.print(Text(f"→ {below}", "bold green"), soft_wrap=True)


def _print_pairs(
    row: Row, sources: list[tuple[str, int]], tokenizer: Tokenizer, console: Console
) -> None:
    """Prints each source with its target, which have the same segment number."""
    where = ", ".join(f"{file}:{line}" for file, line in dict.fromkeys(sources))
    console.print(Text(where, "dim blue"), soft_wrap=True)
    counts = row["weights"] > 0
    segments = row["segments"]
    of_target = row["target_segments"] if "target_segments" in row else segments[row["predicted"]]
    for number in range(1, segments.max() + 1):
        read, labels = (
            row["tokens"][segments == number],
            row["labels"][counts & (of_target == number)],
        )
        if "predicted" in row:  # the target goes on in the same row
            read = read[: len(read) - len(labels) + 1]
        for tokens, style in ((read, ""), (labels, "bold green")):
            text = tokenizer.decode(tokens.tolist()).replace("\n", "↵")
            console.print(Text.assemble("→ " if style else "  ", (text, style)), soft_wrap=True)


def _render(row: Row, first: int, end: int, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The positions [first, end) as (text, style) parts."""
    tokens, columns = row["tokens"], row["predicted"][row["weights"] > 0]
    original = tokens.copy()
    original[columns] = row["labels"][row["weights"] > 0]
    predicted = set(columns.tolist())
    special = set(tokenizer.vocabulary.special)
    parts: list[tuple[str, str]] = []
    before = ""
    start = first
    for position in range(first, end):
        # Whether a space precedes a token shows only in the text of the tokens up to it.
        if original[position] in special:
            parts.append((f" {tokenizer.token(original[position])}", "dim"))
            before, start = "", position + 1
            continue
        text = tokenizer.decode(original[start : position + 1])
        new, before = text[len(before) :].replace("\n", "↵"), text
        if position == start and position > first:
            new = f" {new.lstrip(' ')}"
        if position not in predicted:
            parts.append((new, ""))
            continue
        word = new.lstrip(" ") or "␣"
        gap = new[: -len(word)]
        if tokens[position] == tokenizer.vocabulary.mask:
            marked, style = f"[{word}]", "bold green"
        elif tokens[position] == original[position]:
            marked, style = f"[{word}=]", "bold cyan"
        else:
            marked, style = f"[{word}→{tokenizer.token(tokens[position])}]", "bold yellow"
        parts.append((gap + marked, style))
    return parts
