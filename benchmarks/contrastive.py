"""A step of contrastive training beside sentence-transformers, on the same pairs.

    python -m benchmarks.contrastive pairs.jsonl --batch 64 --micro-batch 16

All sides train the published all-MiniLM-L6-v2 (or --model) on pairs of a query and a passage, at
equal global batch, by AdamW with clipped gradients and its dropout, in fp32 on one process. Ours
and CachedMultipleNegativesRankingLoss embed at most a micro-batch with gradients at a time;
MultipleNegativesRankingLoss holds the whole batch, and computes each embedding once instead of
twice. Each side is a process that makes its batches as it goes, theirs from text, ours from a
built dataset, and they take turns of some steps.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import sides
from benchmarks.models import import_transformers
from benchmarks.pairing import Comparison, arguments, publish
from examples.published.minilm import unpack_minilm
from examples.retrieval.pairs import Pair, build_pairs, read_pairs
from trainer.training.experiment import Experiment
from trainer.training.starting import load_experiment

STEPS = 1_000_000  # more than there are turns for
RATE, DECAY, TEMPERATURE = 2e-5, 0.01, 0.05


@dataclass(frozen=True, kw_only=True)
class Job(sides.Job):
    """What all sides train.

    Attributes:
        model: a folder of sentence-transformers.
        pairs: short enough for `sequence_length` and the model.
    """

    model: str
    pairs: tuple[Pair, ...]

    def experiment(self) -> Experiment:
        """Our side's configuration."""
        tree = {
            "output": f"{self.folder}/run",
            "init_from": self.model,
            "data": {
                "path": f"{self.folder}/data",
                "sequence_length": 512,
                "packing": "padded",
                "group_by_length": self.batch,
            },
            "objective": {"kind": "contrastive", "temperature": TEMPERATURE},
            "optimizer": {"kind": "adamw", "lr": RATE, "weight_decay": DECAY},
            "training": {
                "steps": STEPS,
                "global_batch_size": self.batch,
                "micro_batch_size": self.micro_batch,
            },
            "accelerator": {"kind": "cpu", "threads": self.threads},
            "strategy": "single",
        }
        file = Path(self.folder) / "experiment.yaml"
        file.write_text(json.dumps(tree), encoding="utf-8")
        return load_experiment(str(file))


def theirs(job: Job, turns: sides.Turns, loss: str) -> None:
    """A loss of sentence-transformers, with its trainer."""
    transformers = import_transformers()
    import sentence_transformers as untyped
    import torch
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses

    library: Any = untyped
    torch.set_num_threads(job.threads or torch.get_num_threads())

    class InTurns(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            turns.hold(parts["model"], parts["optimizer"])
            turns.wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not turns.step()

    model = library.SentenceTransformer(job.model, device="cpu")
    cached = {"mini_batch_size": job.micro_batch} if "Cached" in loss else {}
    queries, passages = zip(*job.pairs, strict=True)
    library.SentenceTransformerTrainer(
        model=model,
        args=library.SentenceTransformerTrainingArguments(
            output_dir=f"{job.folder}/{loss}",
            max_steps=STEPS,
            learning_rate=RATE,
            weight_decay=DECAY,
            per_device_train_batch_size=job.batch,
            optim="adamw_torch_fused",
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"query": queries, "positive": passages}),
        loss=getattr(losses, loss)(model, scale=1 / TEMPERATURE, **cached),
        callbacks=[InTurns()],
    ).train()


def measure(job: Job, steps: int, repeats: int) -> Comparison:
    """All sides in turns of some steps."""
    build_pairs(job.pairs, job.model, Path(job.folder))
    all_sides: Mapping[str, sides.Serve] = {
        "samestep": sides.ours,
        "their cached loss": partial(theirs, loss="CachedMultipleNegativesRankingLoss"),
        "their plain loss": partial(theirs, loss="MultipleNegativesRankingLoss"),
    }
    title = (
        f"Contrastive training: {job.batch} pairs per step, micro-batches of {job.micro_batch}, "
        f"the CPU, threads: {job.threads}, fp32"
    )
    return sides.compare_sides(title, all_sides, job, steps, repeats)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("pairs", type=Path, help="JSON Lines with query and positive")
    parser.add_argument("--model", help="a folder of sentence-transformers (default: MiniLM)")
    parser.add_argument("--batch", type=int, default=64, help="pairs of a step (default: 64)")
    parser.add_argument("--micro-batch", type=int, default=16, help="(default: 16)")
    parser.add_argument("--words", type=int, default=32, help="kept of a text (default: 32)")
    parser.add_argument("--turn", type=int, default=2, help="steps of a turn (default: 2)")
    parser.add_argument("--threads", type=int, default=2, help="of each side (default: 2)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            folder=folder,
            batch=options.batch,
            micro_batch=options.micro_batch,
            threads=options.threads,
            model=options.model or str(unpack_minilm(Path(folder) / "minilm")),
            pairs=tuple(read_pairs(options.pairs, options.words)),
        )
        comparison = measure(job, options.turn, options.repeats)
    publish([comparison], options.json)


if __name__ == "__main__":
    main()
