"""Text to tokens on disk: `samestep data build`, Hugging Face `datasets`, and a bare loop around
the tokenizer.

    python -m benchmarks.build --corpus corpus/*.jsonl.zst

All start from JSON Lines and the same tokenizer, and use one process for the work. The packages of
others are imported where they are used, because our worker processes import this module again.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from benchmarks.corpus import data_arguments, make_dataset, make_tokenizer, write_corpus
from benchmarks.pairing import Comparison, Contender, compare, publish

_ROOT = Path(__file__).parents[1]
_PEAK_OF_CHILD = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
LENGTH = 128
_BATCH = 1000  # documents, as `datasets.map` takes them
_SHARD_BYTES = 2**22


def with_datasets(corpus: Path, tokenizer: Path, folder: Path) -> None:
    """Tokenises and groups as Hugging Face's run_mlm.py does."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    fast = transformers.AutoTokenizer.from_pretrained(tokenizer)

    def tokenize(examples: dict[str, list[str]]) -> Any:
        return fast(examples["text"], return_special_tokens_mask=True)

    def group(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {name: list(itertools.chain(*lists)) for name, lists in examples.items()}
        total = len(joined["input_ids"]) // LENGTH * LENGTH
        return {
            name: [ids[first : first + LENGTH] for first in range(0, total, LENGTH)]
            for name, ids in joined.items()
        }

    raw = datasets.load_dataset(
        "json", data_files=str(corpus), split="train", cache_dir=str(folder)
    )
    tokenized = raw.map(tokenize, batched=True, remove_columns=raw.column_names)
    tokenized.map(group, batched=True)


def with_a_bare_loop(corpus: Path, tokenizer: Path, folder: Path) -> None:
    """Does the least that leaves tokens and document lengths on disk."""
    backend = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    lengths: list[int] = []
    folder.mkdir()
    with (folder / "tokens.bin").open("wb") as out:
        for texts in _batches(corpus):
            for encoding in backend.encode_batch_fast(texts, add_special_tokens=False):
                ids = np.array(encoding.ids, np.uint16)
                lengths.append(len(ids))
                out.write(ids.tobytes())
    np.save(folder / "lengths.npy", np.array(lengths))


def _batches(corpus: Path) -> Iterator[list[str]]:
    with corpus.open(encoding="utf-8") as lines:
        while batch := [json.loads(line)["text"] for line in itertools.islice(lines, _BATCH)]:
            yield batch


def compare_builds(
    corpus: Path, megabytes: float, algorithm: str, folder: Path, repeats: int
) -> Comparison:
    """Measures all three on one corpus."""
    tokenizer = make_tokenizer(corpus, algorithm, folder / algorithm)
    number = itertools.count()

    def contender(name: str, make: Callable[[Path, Path, Path], Any]) -> Contender:
        def work() -> float:
            with tempfile.TemporaryDirectory(dir=folder) as output:
                make(corpus, tokenizer, Path(output, f"{next(number)}"))
            return megabytes

        return Contender(name, work)

    contenders = [
        contender("samestep data build", make_dataset),
        contender("datasets.map, as run_mlm.py", with_datasets),
        contender("encode_batch_fast and numpy", with_a_bare_loop),
    ]
    return compare(
        f"Build, {algorithm}, {megabytes:.0f} MB of text", "MB", contenders, repeats, warm=False
    )


def peak_memory(corpus: Path, tokenizer: Path, folder: Path) -> float:
    """Most memory that any process of a build had, in MB."""
    settings = [
        f"source.paths=[{corpus}]",
        f"tokenizer.path={tokenizer}",
        f"output={folder}",
        "workers=1",
    ]
    command = ["data", "build", "configs/data/jsonl.yaml", *settings, f"shard_bytes={_SHARD_BYTES}"]
    # A process's peak counts that of the one that started it, so a small one stands between the
    # build and this one.
    program = [sys.executable, "-c", _PEAK_OF_CHILD, sys.executable, "-m", "samestep.cli", *command]
    done = subprocess.run(
        program, cwd=_ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return int(done.stdout) / 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    args = data_arguments(__doc__).parse_args(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        corpus, large = folder / "corpus.jsonl", folder / "large.jsonl"
        megabytes = write_corpus(args.corpus, args.megabytes, corpus)
        compared = [
            compare_builds(corpus, megabytes, name, folder, args.repeats)
            for name in ("wordpiece", "bpe")
        ]
        more = write_corpus(args.corpus, 4 * args.megabytes, large)
        once, times_four = (
            peak_memory(c, folder / "wordpiece", folder / c.stem) for c in (corpus, large)
        )
    memory = f"peak memory {once:.0f} MB; with {more:.0f} MB of text {times_four:.0f} MB"
    compared[0] = dataclasses.replace(compared[0], notes={"samestep data build": memory})
    publish(compared, args.json)


if __name__ == "__main__":
    main()
