"""Pairs of a query and a passage, as files and as datasets, for the scripts beside this module.

    python -m examples.retrieval.pairs titles corpus.jsonl.zst pairs.jsonl
    python -m examples.retrieval.pairs questions train-v2.0.json pairs.jsonl
    python -m examples.retrieval.pairs collection dev-v2.0.json beir/squad

`titles` pairs titles with the texts of a corpus in BEIR's layout, `questions` pairs questions that
have an answer with their paragraphs, and `collection` writes a folder in BEIR's layout: all
paragraphs of a file, its answered questions, and which paragraph answers which. Questions are in
the layout of SQuAD's files, or JSON Lines with `question` and `context`. A line of pairs is
{"query": "...", "positive": "..."}.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec

import samestep

Pair = tuple[str, str]


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of JSON Lines, compressed or not."""
    with fsspec.open(str(file), "rt", encoding="utf-8", compression="infer") as lines:
        yield from map(json.loads, lines)


def write_lines(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes JSON Lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_text("".join(lines), encoding="utf-8")


def read_pairs(file: Path, words: int | None = None) -> list[Pair]:
    """The pairs of a file, of several positives the first.

    Args:
        words: kept of each text; None keeps all.
    """
    rows = [(row["query"], row["positive"]) for row in read_lines(file)]
    pairs = [(query, text if isinstance(text, str) else text[0]) for query, text in rows]
    if words is None:
        return pairs
    return [(_first(query, words), _first(text, words)) for query, text in pairs]


def _first(text: str, words: int) -> str:
    return " ".join(text.split()[:words])


def titles(corpus: Path) -> Iterator[Pair]:
    """Titles and texts of documents that have both; a title that begins the text is cut off."""
    for document in read_lines(corpus):
        title, text = document.get("title", "").strip(), document["text"].strip()
        text = text.removeprefix(title).strip()
        if title and text:
            yield title, text


def questions(file: Path) -> Iterator[Pair]:
    """Questions that have an answer, and their paragraphs."""
    if file.suffix != ".json":
        for row in read_lines(file):
            if not row.get("is_impossible"):
                yield row["question"].strip(), row["context"]
        return
    for article in json.loads(file.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                if not question.get("is_impossible"):
                    yield question["question"].strip(), paragraph["context"]


def write_collection(pairs: Iterable[Pair], folder: Path) -> None:
    """Writes a folder in BEIR's layout, with each different passage as a document."""
    documents: dict[str, str] = {}
    queries, judgments = [], ["query-id\tcorpus-id\tscore"]
    for number, (query, passage) in enumerate(pairs):
        document = documents.setdefault(passage, f"d{len(documents)}")
        queries.append({"_id": f"q{number}", "text": query})
        judgments.append(f"q{number}\t{document}\t1")
    corpus = ({"_id": name, "text": text} for text, name in documents.items())
    write_lines(folder / "corpus.jsonl", corpus)
    write_lines(folder / "queries.jsonl", queries)
    (folder / "qrels").mkdir(exist_ok=True)
    (folder / "qrels" / "test.tsv").write_text("\n".join(judgments) + "\n", encoding="utf-8")


def build_pairs(pairs: Iterable[Pair], model: str | Path, folder: Path) -> Path:
    """Builds a dataset of pairs of kind `retrieval`; returns its folder.

    Args:
        model: the tokenizer's folder or address.
        folder: for the rows and the dataset.
    """
    file = folder / "rows.jsonl"
    write_lines(file, ({"query": query, "positive": text} for query, text in pairs))
    return build(file, model, folder)


def build(rows: Path, model: str | Path, folder: Path) -> Path:
    """Builds a dataset of kind `retrieval` without held-out rows; returns its folder."""
    file, output = folder / "data.yaml", folder / "data"
    recipe = {
        "source": {"kind": "retrieval", "paths": [str(rows)]},
        "tokenizer": {"path": str(model)},
        "heldout_fraction": 0,
        "workers": 1,
        "output": str(output),
    }
    file.write_text(json.dumps(recipe), encoding="utf-8")
    samestep.build_dataset(file)
    return output


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.retrieval.pairs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=("titles", "questions", "collection"))
    parser.add_argument("file", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args(arguments)
    if options.kind == "collection":
        write_collection(questions(options.file), options.output)
        return 0
    pairs = (titles if options.kind == "titles" else questions)(options.file)
    rows = ({"query": query, "positive": text} for query, text in dict.fromkeys(pairs))
    write_lines(options.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
