"""Fine-tuning beside Hugging Face `Trainer` with `BertForSequenceClassification`, on the same
batches.

    python -m benchmarks.finetune datasets/sst2 --model mini

Both sides train the same model on batches of the dataset grouped by length, each as wide as its
longest row, by AdamW with clipped gradients and dropout of 0.1, in fp32 on the CPU. Ours is the
real trainer and makes its batches as it goes; theirs finds them ready in memory. Each side is a
process, and they take turns of some steps.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from torch import Tensor

from benchmarks import sides, step
from benchmarks.pairing import Comparison, arguments, publish
from data_pipeline.reading.dataset import Dataset
from samestep.config import load
from trainer.strategies import Replica
from trainer.training.compose import open_loader
from trainer.training.experiment import Experiment


@dataclass(frozen=True, kw_only=True)
class Job(sides.Job):
    """What both sides train.

    Attributes:
        model: a key of `step.SHAPES`.
        dataset: a built dataset of classification.
        vocab_size: of the dataset.
        labels: of the dataset.
    """

    model: str
    dataset: str
    vocab_size: int
    labels: tuple[str, ...]

    def experiment(self) -> Experiment:
        """Our side's configuration."""
        layers, width = step.SHAPES[self.model]
        file = Path(self.folder) / "experiment.yaml"
        file.write_text(f"""
output: {self.folder}/run
data: {{path: {self.dataset}, sequence_length: 128, packing: padded, group_by_length: {self.batch}}}
model: {{kind: bert, vocab_size: {self.vocab_size}, layers: {layers}, width: {width}, heads: {width // 64},
  ffn_width: {4 * width}, head: classification, labels: [{", ".join(self.labels)}]}}
objective: {{kind: classification}}
optimizer: {{kind: adamw, lr: 1e-4, weight_decay: 0.01}}
training: {{steps: 1000000, global_batch_size: {self.batch}, micro_batch_size: {self.micro_batch}}}
accelerator: {{kind: cpu, threads: {self.threads}}}
strategy: single
""")  # noqa: E501
        return load(Experiment, str(file))


def theirs(job: Job, turns: sides.Turns) -> None:
    """Hugging Face's side."""
    from benchmarks import huggingface

    model = huggingface.build_model(job.experiment().model)
    huggingface.train(job, turns, model, ready_batches(job))


def ready_batches(job: Job, steps: int = 512) -> list[dict[str, Tensor]]:
    """Our first batches, as Hugging Face's models take them."""
    experiment = job.experiment()
    dataset, (phase,) = experiment.data.open(), experiment.resolved_phases()
    with open_loader(experiment, dataset, Replica(0, 1), phase) as loader:
        return [
            {
                "input_ids": batch["tokens"].long(),
                "attention_mask": (batch["segments"] > 0).long(),
                "token_type_ids": batch["token_types"].long(),
                "labels": batch["labels"],
            }
            for (batch,) in islice(loader, steps)
        ]


def measure(job: Job, turn: int, repeats: int) -> Comparison:
    """Both sides in turns of `turn` steps."""
    both = {"samestep": sides.ours, "Hugging Face Trainer": theirs}
    title = (
        f"Fine-tuning BERT-{job.model}: {job.batch} rows per step, by length, the CPU, "
        f"threads: {job.threads}, fp32"
    )
    return sides.compare_sides(title, both, job, turn, repeats)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("dataset", help="a built dataset of a classification")
    parser.add_argument(
        "--model", choices=step.SHAPES, nargs="+", default=["mini"], help="(default: mini)"
    )
    parser.add_argument("--batch", type=int, default=32, help="examples of a step (default: 32)")
    parser.add_argument(
        "--turn", type=int, default=25, help="steps that a side takes in its turn (default: 25)"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="of the CPU, for each side (default: 2)"
    )
    options = parser.parse_args()
    manifest = Dataset.open(options.dataset).manifest
    comparisons = []
    for model in options.model:
        with tempfile.TemporaryDirectory() as folder:
            job = Job(
                folder=folder,
                batch=options.batch,
                micro_batch=options.batch,
                threads=options.threads,
                model=model,
                dataset=str(Path(options.dataset).resolve()),
                vocab_size=manifest.vocab_size,
                labels=() if manifest.task is None else manifest.task.labels,
            )
            comparisons.append(measure(job, options.turn, options.repeats))
    publish(comparisons, options.json)


if __name__ == "__main__":
    main()
