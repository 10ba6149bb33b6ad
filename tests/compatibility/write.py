"""Writes small files of every format with the installed commit, for later commits to read.

    python -m tests.compatibility.write FOLDER

writes FOLDER/datasets, FOLDER/runs, FOLDER/exported and FOLDER/expected.json, in about a minute.
To keep the files of a commit, run this file, outside of any checkout, with that commit's packages
(`PYTHONPATH=CHECKOUT python write.py FOLDER`), and pack FOLDER:

    tar --create --xz --sort=name --owner=0 --group=0 --mtime=@0 --file COMMIT.tar.xz -C FOLDER .

`test_kept_files.py` reads all archives beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

STEPS, MORE = 4, 4  # of a run that is kept, and after it
RUNS = {
    "single": (1, "single"),
    "ddp": (2, "ddp"),
    "fsdp": (2, "fsdp"),
    "zero": (2, "{kind: deepspeed, stage: 2}"),
}
DATASETS = {
    "wordpiece": ["source.kind=jsonl", "source.paths=[texts/a.jsonl]", "sentences=rules"],
    "bpe": [
        "source.kind=jsonl",
        "source.paths=[texts/a.jsonl]",
        "tokenizer.algorithm=bpe",
        "tokenizer.vocab_size=300",
        "tokenizer.lowercase=false",
    ],
    "unigram": [
        "source={kind: text, paths: [texts/a.txt], document: paragraph}",
        "tokenizer.algorithm=unigram",
        "tokenizer.vocab_size=80",
    ],
    "rows": [
        "source={kind: classification, paths: [texts/rows.jsonl], labels: [even, odd]}",
    ],
}
PACKINGS = ("concat", "full_sentences", "padded", "pairs")
PAIRS = ["objective=mlm_nsp", "model.nsp=true"]
BUILD = """
source: {}
tokenizer: {path: set, algorithm: wordpiece, vocab_size: 160, lowercase: true}
output: set
heldout_fraction: 0.1
shard_bytes: 3000
workers: 1
"""
EXPERIMENT = """
output: set
accelerator: cpu
data: {path: datasets/wordpiece, sequence_length: 32, packing: best_fit, lanes: 2, threads: 0}
model: {kind: bert, vocab_size: 160, layers: 1, width: 8, heads: 2, ffn_width: 16, max_positions: 32,
  dropout: 0.1, attention_dropout: 0.0}
objective: {kind: mlm}
optimizer: {kind: adamw, lr: 1e-2}
schedule: {warmup_steps: 2}
training: {steps: 4, global_batch_size: 8, micro_batch_size: 4, log_every: 1, evaluate_every: 4}
checkpoint: {every: 4}
"""  # noqa: E501


def write_texts(folder: Path) -> None:
    """Texts of made-up words; a pure function."""
    chance = random.Random(0)
    words = [
        "".join(chance.choices("abcdefgh", k=chance.randint(2, 6))).capitalize() for _ in range(80)
    ]

    def sentence() -> str:
        return " ".join(chance.choices(words, k=chance.randint(4, 10))) + "."

    texts = [" ".join(sentence() for _ in range(chance.randint(2, 6))) for _ in range(60)]
    folder.mkdir()
    (folder / "a.txt").write_text("\n\n".join(texts))
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    rows = [{"text": text[:60], "label": len(text) % 2} for text in texts]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def samestep(*arguments: object) -> str:
    """Runs a command of the installed commit; returns what it printed."""
    command = [sys.executable, "-m", "samestep.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def losses(run: Path, least: int = 0) -> dict[str, float]:
    """The training losses in a run's metrics, by step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        str(row["step"]): row["train/loss"]
        for row in rows
        if "train/loss" in row and row["step"] > least
    }


def token_digest(folder: Path) -> str:
    """Hash of the token ids of all documents, split by split, in their stored order."""
    import numpy as np

    from data_pipeline.format.manifest import Manifest
    from data_pipeline.format.shards import Shard

    manifest, sha256 = Manifest.load(folder), hashlib.sha256()
    for split in sorted(manifest.splits):
        for info in manifest.splits[split]:
            shard = Shard.open(folder / info.name, manifest.dtype, sha256=info.sha256)
            for start, length in zip(shard.start, shard.length, strict=True):
                tokens = shard.tokens[start : start + length]
                sha256.update(np.append(tokens.astype(np.int64), -1).tobytes())
    return sha256.hexdigest()


def exported_logits(folder: Path) -> list[float]:
    """Some logits of an exported model, computed by transformers."""
    import torch
    from transformers import AutoModelForMaskedLM

    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        logits = AutoModelForMaskedLM.from_pretrained(folder).eval()(tokens).logits
    values: list[float] = logits[0, :, :7].flatten().tolist()
    return values


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.chdir(folder)
    write_texts(Path("texts"))
    Path("build.yaml").write_text(BUILD)
    Path("experiment.yaml").write_text(EXPERIMENT)
    expected: dict[str, Any] = {"datasets": {}, "losses": {}}
    for name, settings in DATASETS.items():
        where = [f"tokenizer.path=tokenizers/{name}"]
        settings = [*settings, *where]
        samestep("data", "tokenizer", "build.yaml", *settings)
        samestep("data", "build", "build.yaml", *settings, f"output=datasets/{name}")
        expected["datasets"][name] = token_digest(Path("datasets", name))
    for name, (processes, strategy) in RUNS.items():
        launch = [f"--processes={processes}", f"strategy={strategy}"]
        samestep("train", "experiment.yaml", f"output=runs/{name}", *launch)
        shutil.copytree(f"runs/{name}", f"more/{name}")
        steps = f"training.steps={STEPS + MORE}"
        samestep("train", "experiment.yaml", f"output=more/{name}", *launch, steps)
        expected["losses"][name] = losses(Path("more", name))
    for packing in PACKINGS:
        settings = [f"data.packing={packing}", *PAIRS * (packing == "pairs")]
        samestep("train", "experiment.yaml", f"output=more/{packing}", *settings)
        expected["losses"][packing] = losses(Path("more", packing))
    samestep("export", "runs/single", "exported")
    expected["logits"] = exported_logits(Path("exported"))
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    for scratch in ("more", "tokenizers", "build.yaml"):
        shutil.rmtree(scratch) if Path(scratch).is_dir() else Path(scratch).unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
