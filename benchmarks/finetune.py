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
from multiprocessing.connection import Connection
from operator import itemgetter
from pathlib import Path

from torch import Tensor

from benchmarks import step
from benchmarks.pairing import Comparison, arguments, publish
from data_pipeline.reading.dataset import Dataset
from trainer.config import load
from trainer.strategies import Replica
from trainer.training.experiment import Experiment
from trainer.training.run import open_loader


@dataclass(frozen=True)
class Job(step.Job):
    """What both sides train.

    Attributes:
        dataset: a built dataset of classification.
        vocab_size: of the dataset.
        labels: of the dataset.
    """

    dataset: str
    vocab_size: int
    labels: tuple[str, ...]

    def experiment(self) -> Experiment:
        """Our side's configuration."""
        layers, width = step.SHAPES[self.model]
        file = Path(self.folder) / "experiment.yaml"
        file.write_text(f"""
output: {self.folder}/run
data: {{path: {self.dataset}, sequence_length: {self.length}, packing: padded, group_by_length: {self.batch}}}
model: {{kind: bert, vocab_size: {self.vocab_size}, layers: {layers}, width: {width}, heads: {width // 64},
  ffn_width: {4 * width}, head: classification, labels: [{", ".join(self.labels)}]}}
objective: {{kind: classification}}
optimizer: {{kind: adamw, lr: 1e-4, weight_decay: 0.01}}
training: {{steps: 1000000, global_batch_size: {self.batch}, micro_batch_size: {self.batch}}}
strategy: single
""")  # noqa: E501
        return load(Experiment, str(file))


def theirs(job: Job, commands: Connection) -> None:
    """Hugging Face's side."""
    config = step.their_config(job, vocab_size=job.vocab_size, num_labels=len(job.labels))
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification(config)
    step.train_theirs(
        job, commands, model, ready_batches(job), itemgetter(0), per_device_train_batch_size=1
    )


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


def measure(job: Job, repeats: int) -> Comparison:
    """Both sides in turn."""
    sides = {"samestep": step.ours, "Hugging Face Trainer": theirs}
    title = (
        f"Fine-tuning BERT-{job.model}: {job.batch} rows per step, by length, the CPU, "
        f"threads: {job.threads}, fp32"
    )
    return step.in_turns(title, sides, job, repeats)


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
                device="cpu",
                model=model,
                length=128,
                batch=options.batch,
                turn=options.turn,
                threads=options.threads,
                folder=folder,
                dataset=str(Path(options.dataset).resolve()),
                vocab_size=manifest.vocab_size,
                labels=() if manifest.task is None else manifest.task.labels,
            )
            comparisons.append(measure(job, options.repeats))
    publish(comparisons, options.json)


if __name__ == "__main__":
    main()
