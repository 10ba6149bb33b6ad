"""Six short runs whose numbers a refactoring must not change, each on 1 process and on 3.

    python -m tests.conformance.six_runs --source OLD_CHECKOUT --save before.json
    python -m tests.conformance.six_runs --against before.json

The first command trains with the code before the change, the second with this checkout. Each run
is reduced to three digests: the training losses and gradient norms of all steps, the data that
the run consumed (the last head of its ledger), and the exported weights. Equal digests mean equal
bits. Digests of different machines, PyTorch versions or Python versions cannot be compared.

Only the public command and public settings are used, so that one script runs both checkouts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import string
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeAlias

import yaml
from safetensors import safe_open

from tests.distributions import write_distribution

STEPS = 50
VOCAB_SIZE = 600
STRATEGIES = {1: "single", 3: "fsdp"}
METRICS = ("train/loss", "train/grad_norm")

Digests: TypeAlias = dict[str, str]

DATASETS = {
    "wordpiece": """
source: {kind: jsonl, paths: [topics.jsonl]}
tokenizer: {path: tokenizers/wordpiece}
output: datasets/wordpiece
shard_bytes: 65536
sentences: rules
workers: 1
""",
    "bpe": """
source: {kind: jsonl, paths: [topics.jsonl]}
tokenizer: {path: tokenizers/bpe, algorithm: bpe, vocab_size: 600}
output: datasets/bpe
shard_bytes: 65536
workers: 1
""",
    "unigram": """
source: {kind: jsonl, paths: [topics.jsonl]}
tokenizer: {path: tokenizers/unigram, algorithm: unigram, vocab_size: 600}
output: datasets/unigram
shard_bytes: 65536
workers: 1
""",
    "reviews": """
source: {kind: classification, paths: [reviews.jsonl], texts: [sentence],
  labels: [negative, positive]}
tokenizer: {path: tokenizers/wordpiece}
output: datasets/reviews
shard_bytes: 4096
workers: 1
""",
}

# A batch of 10 in micro-batches of at most 2 accumulates gradients on 1 process and on 3, and
# does not divide evenly among 3.
COMMON = f"""
accelerator: cpu
data: {{sequence_length: 64, lanes: 16}}
optimizer: {{kind: adamw, lr: 1e-3}}
schedule: {{warmup_steps: 5}}
training: {{steps: {STEPS}, global_batch_size: 10, micro_batch_size: 2, precision: fp32,
  log_every: 1}}
checkpoint: {{every: 1000}}
"""


@dataclass(frozen=True)
class Run:
    """An experiment, and what must exist before it starts.

    Attributes:
        datasets: names of the datasets to build, in order.
        settings: the experiment, on top of COMMON.
        starts_from: the run whose checkpoint on 1 process it reads.
    """

    datasets: tuple[str, ...]
    settings: str
    starts_from: str | None = None


# Some models have dropout in attention, which is unfused then; the others use fused attention.
RUNS = {
    "bert": Run(
        ("wordpiece",),
        """
data: {path: datasets/wordpiece, packing: pairs}
model: {kind: bert, vocab_size: 600, layers: 3, width: 32, heads: 4, ffn_width: 64,
  max_positions: 64, nsp: true, dropout: 0.1, attention_dropout: 0.1}
objective: {kind: mlm_nsp}
""",
    ),
    "roberta": Run(
        ("bpe",),
        """
data: {path: datasets/bpe, packing: best_fit}
model: {kind: roberta, vocab_size: 600, layers: 3, width: 32, heads: 4, ffn_width: 64,
  max_positions: 64, dropout: 0.1, attention_dropout: 0.0}
objective: {kind: mlm}
""",
    ),
    "t5": Run(
        ("unigram",),
        """
data: {path: datasets/unigram, packing: best_fit}
model: {kind: t5, vocab_size: 700, layers: 2, width: 32, heads: 4, head_width: 8, ffn_width: 64,
  tied: false, activation: geglu_tanh, dropout: 0.1, attention_dropout: 0.1}
objective: {kind: span_corruption, z_loss: 1e-4}
optimizer: {kind: adafactor, lr: 1e-2, min_dim_size_to_factor: 16}
""",
    ),
    "gpt2": Run(
        ("bpe",),
        """
data: {path: datasets/bpe, packing: concat}
model: {kind: gpt2, vocab_size: 600, layers: 3, width: 32, heads: 4, ffn_width: 64,
  max_positions: 64, dropout: 0.1, attention_dropout: 0.0}
objective: {kind: causal_lm}
""",
    ),
    "sst2": Run(
        ("wordpiece", "reviews"),
        """
init_from: runs/bert-1
data: {path: datasets/reviews, packing: padded}
model: {dropout: 0.1, attention_dropout: 0.1}
objective: {kind: classification}
optimizer: {lr: 3e-3}
""",
        starts_from="bert",
    ),
    "distillation": Run(
        ("bpe",),
        """
data: {path: datasets/bpe, packing: best_fit}
model: {kind: roberta, vocab_size: 600, layers: 2, width: 32, heads: 4, ffn_width: 64,
  max_positions: 64, dropout: 0.1, attention_dropout: 0.0}
objective: {kind: distillation, teacher: runs/roberta-1, of: {kind: mlm}, temperature: 2.0,
  soft: 5.0, hard: 2.0, cosine: 1.0}
""",
        starts_from="roberta",
    ),
}


class Checkout:
    """The `samestep` command of a checkout, run in a working folder.

    Raises:
        SystemExit: `source` is no checkout, or Python imports its packages from elsewhere.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        file = source / "pyproject.toml"
        if not file.exists():
            raise SystemExit(f"{source} is no checkout: it has no pyproject.toml. Change --source.")
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        self._module = project["scripts"]["samestep"].partition(":")[0]
        self._folder = folder
        metadata = write_distribution(
            folder / "metadata", "samestep", project.get("entry-points", {})
        )
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",  # the number of threads changes how sums are rounded
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join([str(metadata), str(source)]),
        }
        package = self._module.partition(".")[0]
        found = Path(self._python("-c", f"import {package}; print({package}.__file__)").strip())
        if not found.is_relative_to(source):
            raise SystemExit(f"Python imports {found}, which is not in --source {source}.")

    def samestep(self, *arguments: object) -> None:
        """Runs a command; raises SystemExit with the end of its messages when it fails."""
        self._python("-m", self._module, *map(str, arguments))

    def _python(self, *arguments: str) -> str:
        # Paths in settings are relative to the working folder, so they are the same in each one.
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            command = " ".join(arguments)
            raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stderr[-4000:]}")
        return done.stdout


def write_text(path: Path) -> None:
    """Writes Python's help topics as documents of four paragraphs each."""
    documents = []
    for name in sorted(topics):
        paragraphs = [part for part in topics[name].split("\n\n") if part.strip()]
        for first in range(0, len(paragraphs), 4):
            documents.append({"text": "\n\n".join(paragraphs[first : first + 4])})
    _write_rows(path, documents)


def write_vocabulary(path: Path) -> None:
    """Writes a lower-case WordPiece vocabulary of characters and of the most frequent words.

    Training WordPiece twice on one text gives two vocabularies, with other ids and other numbers in
    every run, so this one is not trained. Byte-level BPE and SentencePiece train to the same ids.
    """
    alphanumeric = string.ascii_lowercase + string.digits
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.punctuation, *alphanumeric]
    tokens += [f"##{character}" for character in alphanumeric]
    counts = Counter(re.findall(r"[a-z]{2,}", " ".join(topics.values()).lower()))
    # Words of equal frequency are in alphabetical order.
    words = sorted(counts, key=lambda word: (-counts[word], word))
    tokens += words[: VOCAB_SIZE - len(tokens)]
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(tokens) + "\n", encoding="utf-8")


def write_reviews(path: Path) -> None:
    """Writes 480 sentences that praise or criticize something, with their labels."""
    subjects = ("class", "file", "list", "name", "number", "object", "string", "function")
    degrees = ("", "very ", "always ", "in the end ", "once more ", "for the most part ")
    opinions = {
        "positive": ("useful", "simple", "valid", "fast", "safe"),
        "negative": ("useless", "hard", "invalid", "slow", "unsafe"),
    }
    rows = [
        {"sentence": f"the {subject} is {degree}{opinion}", "label": label}
        for subject in subjects
        for degree in degrees
        for label, words in opinions.items()
        for opinion in words
    ]
    _write_rows(path, rows)


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def build_datasets(checkout: Checkout, folder: Path, names: set[str]) -> None:
    """Builds the datasets in `names`, and trains their tokenizers unless they exist."""
    write_text(folder / "topics.jsonl")
    write_reviews(folder / "reviews.jsonl")
    write_vocabulary(folder / "tokenizers" / "wordpiece" / "vocab.txt")
    for name, settings in DATASETS.items():
        if name not in names:
            continue
        file = folder / f"{name}-data.yaml"
        file.write_text(settings, encoding="utf-8")
        if not (folder / yaml.safe_load(settings)["tokenizer"]["path"]).exists():
            checkout.samestep("data", "tokenizer", file)
        checkout.samestep("data", "build", file)


def train(checkout: Checkout, folder: Path, name: str, processes: int) -> Digests:
    """Trains one run, exports it, and returns its digests."""
    file = folder / f"{name}.yaml"
    file.write_text(f"base: common.yaml\n{RUNS[name].settings}", encoding="utf-8")
    run, exported = f"runs/{name}-{processes}", f"exported/{name}-{processes}"
    overrides = (f"output={run}", f"strategy={STRATEGIES[processes]}")
    checkout.samestep("train", file, "--processes", processes, *overrides)
    checkout.samestep("export", run, exported)
    return {
        "losses": losses_digest(folder / run / "metrics.jsonl"),
        "ledger": _read_rows(folder / run / "ledger.jsonl")[-1]["head"],
        "weights": weights_digest(folder / exported / "model.safetensors"),
    }


def losses_digest(file: Path) -> str:
    """Digest of the loss and gradient norm of every step; columns about time are left out."""
    rows = [row for row in _read_rows(file) if METRICS[0] in row]
    if [row["step"] for row in rows] != list(range(1, STEPS + 1)):
        raise SystemExit(f"{file} does not have one row for each of the {STEPS} steps.")
    values = [repr(row[name]) for row in rows for name in METRICS]
    return hashlib.sha256("\n".join(values).encode()).hexdigest()


def weights_digest(file: Path) -> str:
    """Digest of the names, types, shapes and bytes of all tensors, in the order of names."""
    digest = hashlib.sha256()
    with safe_open(file, framework="numpy") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
            digest.update(tensor.tobytes())
    return digest.hexdigest()


def _read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def make_runs(source: Path, folder: Path, names: list[str]) -> Iterator[tuple[str, Digests]]:
    """Makes the runs in `names` on 1 and 3 processes, and yields each one's name and digests.

    Runs that others start from are made even when they are not in `names`.
    """
    checkout = Checkout(source, folder)
    needed = {run for name in names if (run := RUNS[name].starts_from)}
    datasets = {dataset for name in {*names, *needed} for dataset in RUNS[name].datasets}
    build_datasets(checkout, folder, datasets)
    (folder / "common.yaml").write_text(COMMON, encoding="utf-8")
    for name in RUNS:
        for processes in STRATEGIES:
            if name in names:
                yield f"{name}-{processes}", train(checkout, folder, name, processes)
            elif name in needed and processes == 1:
                train(checkout, folder, name, processes)


def compare(found: Digests, expected: Digests | None) -> str:
    """Returns `equal`, or which digests differ."""
    if expected is None:
        return "differs: not in the file of --against"
    differing = [part for part in found if found[part] != expected.get(part)]
    return f"differs: {', '.join(differing)}" if differing else "equal"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Make six short runs on 1 and 3 processes and print digests of their numbers."
    )
    checkout = Path(__file__).resolve().parents[2]
    help_ = "the checkout whose code is run (default: this one)"
    parser.add_argument("--source", type=Path, default=checkout, metavar="DIR", help=help_)
    help_ = "compare with the results in FILE; exit with 1 if any differs"
    parser.add_argument("--against", type=Path, metavar="FILE", help=help_)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the results as JSON")
    names = list(RUNS)
    help_ = f"make these runs only: {', '.join(names)}"
    parser.add_argument("--only", nargs="+", choices=names, default=names, help=help_)
    help_ = "work in this new folder, and keep it (default: a temporary one)"
    parser.add_argument("--folder", type=Path, metavar="DIR", help=help_)
    args = parser.parse_args()
    if args.folder and args.folder.exists() and any(args.folder.iterdir()):
        # A finished run that is found there would not be trained again.
        parser.error(f"--folder {args.folder} is not empty; name a new folder")
    return args


def main() -> int:
    """Makes the runs, prints a line for each, and returns the exit code."""
    args = _parse()
    expected = json.loads(args.against.read_text(encoding="utf-8")) if args.against else None
    results: dict[str, Digests] = {}
    same = True
    print(f"{'run':12} {'processes':9}  {'losses':16} {'ledger':16} {'weights':16}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for key, found in make_runs(args.source.resolve(), folder.resolve(), args.only):
            results[key] = found
            name, _, processes = key.partition("-")
            line = f"{name:12} {processes:>9}  {' '.join(part[:16] for part in found.values())}"
            if expected is not None:
                verdict = compare(found, expected.get(key))
                same = same and verdict == "equal"
                line += f"  {verdict}"
            print(line, flush=True)
    if args.save:
        args.save.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
