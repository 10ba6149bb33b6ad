"""What tests of several packages share: a small real dataset, and an experiment on it."""

from __future__ import annotations

import os
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

VOCAB_SIZE = 600


def make_dataset(folder: Path) -> Path:
    """About 1,300 paragraphs of English in 5 train shards and 1 held-out shard, WordPiece tokens."""
    from data_pipeline import tokenization
    from data_pipeline.manifest import Manifest
    from data_pipeline.shards import write_shard

    folder.mkdir()
    paragraphs = [p for name in sorted(topics) for p in topics[name].split("\n\n") if p.strip()][::2]
    tokenizer = tokenization.Config(path="", vocab_size=VOCAB_SIZE, lowercase=True).train(paragraphs[:400])
    tokenizer.save(folder / "tokenizer")
    documents = tokenizer.encode_batch(paragraphs)
    origin = np.array([(0, line) for line in range(len(documents))], dtype=np.uint32)
    dtype = np.dtype(np.uint16)
    train = tuple(
        write_shard(folder / f"train-{i:06d}.tar", documents[1 + i :: 6], origin[1 + i :: 6], dtype) for i in range(5)
    )
    heldout = (write_shard(folder / "heldout-000000.tar", documents[::60], origin[::60], dtype),)
    Manifest(
        format=1,
        tokenizer_fingerprint=tokenization.Tokenizer.load(folder / "tokenizer").fingerprint,
        vocab_size=tokenizer.vocabulary.size,
        dtype="uint16",
        source={},
        files=("topics",),
        documents_in=len(documents),
        documents_rejected={},
        splits={"train": train, "heldout": heldout},
    ).save(folder)
    return folder


def write_experiment(dataset: Path, path: Path) -> str:
    """A run that takes a second: a BERT of 2 layers of 32. Give it output=FOLDER."""
    path.write_text(
        f"""
output: set-by-the-test
accelerator: cpu
data: {{path: {dataset}, sequence_length: 32, packing: best_fit, lanes: 16}}
model: {{kind: bert, vocab_size: {VOCAB_SIZE}, layers: 2, width: 32, heads: 2, ffn_width: 64, max_positions: 32,
  dropout: 0.1, attention_dropout: 0.0}}
objective: {{kind: mlm}}
optimizer: {{kind: adamw, lr: 1e-3}}
schedule: {{warmup_steps: 4}}
training: {{steps: 12, global_batch_size: 10, micro_batch_size: 4, log_every: 1, collective_timeout: 60}}
checkpoint: {{every: 1000}}
"""
    )
    return str(path)


@pytest.fixture(scope="session")
def dataset_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "dataset")


@pytest.fixture(scope="session")
def experiment_file(dataset_folder: Path) -> str:
    return write_experiment(dataset_folder, dataset_folder.parent / "experiment.yaml")
