"""Small collections in the layout of BEIR."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

WORDS = ("class", "statement", "name", "value", "function", "module", "object", "type", "list")


def write(folder: Path, seed: int = 0, documents: int = 90, queries: int = 12) -> Path:
    """Documents of random words and lengths; two are relevant to each query, at random."""
    random = np.random.default_rng(seed)
    (folder / "qrels").mkdir(parents=True)
    for file, count, longest in (("corpus", documents, 40), ("queries", queries, 6)):
        lengths = random.integers(1, longest, count)
        texts = [" ".join(random.choice(WORDS, length)) for length in lengths]
        rows = [{"_id": f"{file[0]}{n}", "text": text} for n, text in enumerate(texts)]
        (folder / f"{file}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    judgments = [
        f"q{query}\tc{document}\t{grade}\n"
        for query in range(queries)
        for grade, document in enumerate(random.choice(documents, 2, replace=False), 1)
    ]
    (folder / "qrels/test.tsv").write_text("".join(judgments))
    return folder
