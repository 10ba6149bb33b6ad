"""Batches for masked language modeling.

Our loader, webdataset, litdata, and an array in memory as the limit.

    python -m benchmarks.loader --corpus corpus/*.jsonl.zst

All read the same examples, shuffled, without worker processes, and mask them anew each time. "Our
masking" is that of `trainer.objectives.kinds.mlm`. Hugging Face's collator spends most of its
time on looking for special tokens; "Hugging Face's masking" is its rest, with the special tokens
found in one go.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.corpus import data_arguments, prepare_dataset
from benchmarks.pairing import Comparison, Contender, compare, publish
from data_pipeline.reading.batches import BatchLayout
from data_pipeline.reading.config import Config
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.loader import SplitOrder, StreamingLoader
from samestep.hashing import combine
from trainer.objectives.kinds import mlm
from trainer.strategies import Replica

Rows: TypeAlias = npt.NDArray[np.uint16]
Collate: TypeAlias = Callable[[Sequence[Rows]], object]

SHAPES = ((128, 64), (512, 32))  # sequence length, batch size
_SHARD_BYTES = 2**17  # so that there are as many shards as a large dataset has in use at a time
_ROWS_AN_ITEM = 500
_SETTLE = (
    0.3  # seconds, after which threads have made what they make ahead, and nobody else pays for it
)


def open_loader(
    dataset: Dataset, length: int, batch_size: int, threads: int = 0, finite: bool = False
) -> StreamingLoader:
    """Our loader, in the only process of a run of masked language modeling."""
    objective = mlm.MaskedLM(mlm.Config(), dataset.tokenizer.vocabulary)
    return StreamingLoader(
        dataset,
        Config(str(dataset.path), sequence_length=length, threads=threads),
        SplitOrder(seed=0, finite=finite),
        BatchLayout(batch_size, batch_size, Replica(0, 1)),
        pack_spec=objective.pack_spec(length),
        collate=objective.collate,
    )


def save_rows(dataset: Dataset, length: int, file: Path) -> Path:
    """Writes all examples as the model sees them, without masks: uint16 [N, S]."""
    rows = []
    for (batch,) in open_loader(dataset, length, 1024, finite=True):
        tokens, predicted = batch["tokens"], batch["predicted"]
        originals = torch.where(
            batch["weights"] > 0, batch["labels"].to(tokens.dtype), tokens.gather(1, predicted)
        )
        tokens.scatter_(1, predicted, originals)
        rows.append(tokens[batch["example"] >= 0].numpy().astype(np.uint16))
    np.save(file, np.concatenate(rows))
    return file


def from_memory_map(file: Path, batch_size: int, collate: Collate) -> Iterator[object]:
    """The least work that there can be: one fancy index a batch."""
    rows = np.load(file, mmap_mode="r")
    draw = np.random.default_rng(0)
    while True:
        order = draw.permutation(len(rows))
        for first in range(0, len(rows) - batch_size + 1, batch_size):
            yield collate(rows[order[first : first + batch_size]])


def from_webdataset(file: Path, batch_size: int, collate: Collate) -> Iterator[object]:
    """webdataset with a member for each example, the way that its documentation begins with."""
    import webdataset

    folder = file.with_suffix(".webdataset")
    if not folder.exists():
        folder.mkdir()
        with webdataset.ShardWriter(str(folder / "%06d.tar"), maxcount=5000, verbose=0) as out:
            for number, row in enumerate(np.load(file)):
                out.write({"__key__": f"{number:08d}", "npy": row})
    shards = [str(path) for path in sorted(folder.iterdir())]
    rows = (
        webdataset.WebDataset(shards, shardshuffle=len(shards))
        .shuffle(1000)
        .decode()
        .to_tuple("npy")
    )
    return _endless(
        rows.map(lambda sample: sample[0]).batched(batch_size, collation_fn=collate, partial=False)
    )


def from_litdata(file: Path, batch_size: int, collate: Collate) -> Iterator[object]:
    """litdata with its loader for tokens."""
    import litdata

    folder = file.with_suffix(".litdata")
    count, length = np.load(file, mmap_mode="r").shape
    blocks = partial(litdata.TokensLoader, block_size=length)
    if not folder.exists():
        firsts = list(range(0, count, _ROWS_AN_ITEM))
        write = partial(_rows_of_item, file)
        litdata.optimize(
            write,
            firsts,
            str(folder),
            chunk_bytes="8MB",
            item_loader=blocks(),
            num_workers=1,
            verbose=False,
        )
    rows = litdata.StreamingDataset(str(folder), item_loader=blocks(), shuffle=True)
    return _endless(
        litdata.StreamingDataLoader(rows, batch_size=batch_size, collate_fn=collate, drop_last=True)
    )


def _rows_of_item(file: Path, first: int) -> Rows:
    rows: Rows = np.load(file, mmap_mode="r")[first : first + _ROWS_AN_ITEM].reshape(-1)
    return rows


def _endless(batches: Iterable[object]) -> Iterator[object]:
    while True:
        yield from batches


def masking(dataset: Dataset) -> tuple[Collate, Collate, Collate]:
    """Makes batches of rows with our masking, with Hugging Face's collator, and with its masking
    alone.
    """
    import transformers

    objective = mlm.MaskedLM(mlm.Config(), dataset.tokenizer.vocabulary)
    collator = transformers.DataCollatorForLanguageModeling(
        transformers.AutoTokenizer.from_pretrained(dataset.path / "tokenizer")
    )
    special = torch.tensor(collator.tokenizer.all_special_ids)

    def ours(rows: Sequence[Rows]) -> object:
        tokens = np.asarray(rows).astype(np.int32)
        return tokens, *objective.mask(tokens, combine(0, np.arange(len(tokens))))

    def theirs(rows: Sequence[Rows]) -> object:
        tokens = torch.from_numpy(np.asarray(rows).astype(np.int64))
        return collator.torch_mask_tokens(tokens, torch.isin(tokens, special))

    return ours, collator, theirs


def compare_loaders(
    dataset: Dataset, folder: Path, length: int, batch_size: int, batches: int, repeats: int
) -> Comparison:
    """Measures all of them on the same examples; the slow ones on fewer."""
    rows = save_rows(dataset, length, folder / f"{length}.npy")
    ours, collator, theirs = masking(dataset)

    def contender(name: str, source: Iterator[object], batches: int) -> Contender:
        def work() -> float:
            made = batch_size * sum(1 for _ in islice(source, batches))
            time.sleep(_SETTLE)
            return made

        return Contender(name, work)

    slow = max(1, batches // 16)
    contenders = [
        contender("our loader", open_loader(dataset, length, batch_size), batches),
        contender(
            "our loader, one thread", open_loader(dataset, length, batch_size, threads=1), batches
        ),
        contender("memory map, our masking", from_memory_map(rows, batch_size, ours), batches),
        contender("litdata, our masking", from_litdata(rows, batch_size, ours), batches // 4),
        contender("litdata, Hugging Face's masking", from_litdata(rows, batch_size, theirs), slow),
        contender(
            "litdata, Hugging Face's collator", from_litdata(rows, batch_size, collator), slow
        ),
        contender(
            "webdataset, Hugging Face's collator", from_webdataset(rows, batch_size, collator), slow
        ),
    ]
    title = f"Loader, {length} tokens, batches of {batch_size}"
    return compare(title, "examples", contenders, repeats)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = data_arguments(__doc__)
    parser.add_argument("--batches", type=int, default=1024, help="batches a round (default: 1024)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        dataset = Dataset.open(prepare_dataset(args, folder, _SHARD_BYTES))
        compared = [
            compare_loaders(dataset, folder, length, batch_size, args.batches, args.repeats)
            for length, batch_size in SHAPES
        ]
    publish(compared, args.json)


if __name__ == "__main__":
    main()
