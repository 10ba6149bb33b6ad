"""Fine-tuning beside Hugging Face `Trainer` with `BertForSequenceClassification`, on the same batches.

    python -m benchmarks.finetune datasets/sst2 --model mini

Both sides train the same model on batches of the dataset grouped by length, each as wide as its longest row, by AdamW
with clipped gradients and dropout of 0.1, in fp32 on the CPU. Ours is the real trainer and makes its batches as it
goes; theirs finds them ready in memory. Each side is a process, and they take turns of some steps.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.pairing import Comparison, Contender, arguments, compare, publish
from benchmarks.step import SHAPES, Side, Turns
from trainer.accelerators import Accelerator, cpu
from trainer.config import load
from trainer.experiment import Experiment
from trainer.run import build_trainer, open_checkpointer, open_loader
from trainer.strategies import Replica
from trainer.strategies.world import World


@dataclass(frozen=True)
class Job:
    """What both sides train.

    Attributes:
        dataset: a built dataset of classification.
        model: a key of `benchmarks.step.SHAPES`.
        vocab_size: of the dataset.
        labels: of the dataset.
        batch: examples of a step.
        turn: steps that a side takes in its turn.
        threads: of the CPU, for each side.
        folder: for files.
        device, length: as `benchmarks.step.Job` has them.
    """

    dataset: str
    model: str
    vocab_size: int
    labels: tuple[str, ...]
    batch: int
    turn: int
    threads: int
    folder: str
    device: str = "cpu"
    length: int = 128

    def experiment(self) -> Experiment:
        """Our side's configuration."""
        layers, width = SHAPES[self.model]
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
""")
        return load(Experiment, str(file))

    def accelerator(self) -> Accelerator:
        """The CPU."""
        return cpu.Config(self.threads).build()


def ours(job: Job, commands: Connection) -> None:
    """Our side: the trainer's steps, and the loader's batches."""
    experiment = job.experiment()
    world, accelerator = World.start(60), job.accelerator()
    world.connect(accelerator.collective_backend)
    strategy = experiment.strategy.build(accelerator, world, experiment.training.precision)
    trainer = build_trainer(experiment, experiment.data.open(), strategy, open_checkpointer(experiment, world))
    trainer.model.train()
    turns, batches, waited = Turns(job, commands), iter(trainer.loader), 0.0
    going = turns.wait()
    while going:
        asked = time.perf_counter()
        micro_batches = next(batches)
        waited += time.perf_counter() - asked if turns.steps >= 0 else 0.0
        trainer.train_step(micro_batches)
        going = turns.step()
    trainer.close()
    turns.report(f"{waited / turns.seconds:.1%} of it waiting for data")


def theirs(job: Job, commands: Connection) -> None:
    """Hugging Face's side."""
    sys.modules["torchvision"] = None  # type: ignore[assignment]  # unused; litdata's need not fit this torch
    import torch
    import transformers

    torch.set_num_threads(job.threads)
    turns = Turns(job, commands)

    class InTurns(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not turns.step()

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> None:
            return None

    layers, width = SHAPES[job.model]
    config = transformers.BertConfig(
        vocab_size=job.vocab_size,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        num_labels=len(job.labels),
    )
    settings = transformers.TrainingArguments(
        output_dir=f"{job.folder}/theirs",
        per_device_train_batch_size=1,  # of whole batches, ready made
        max_steps=1_000_000,
        learning_rate=1e-4,
        weight_decay=0.01,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = transformers.BertForSequenceClassification(config)
    batches = ready_batches(job)
    InOrder(model, settings, train_dataset=batches, data_collator=_only, callbacks=[InTurns()]).train()
    turns.report()


def _only(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return batches[0]


def ready_batches(job: Job, steps: int = 512) -> list[dict[str, Tensor]]:
    """Our first batches, as Hugging Face's models take them."""
    experiment = job.experiment()
    dataset, (phase,) = experiment.data.open(), experiment.resolved_phases()
    objective = experiment.objective.build(dataset.tokenizer.vocabulary)
    with open_loader(experiment, dataset, objective, Replica(0, 1), phase) as loader:
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
    sides = {"samestep": ours, "Hugging Face Trainer": theirs}
    started = {name: Side(serve, job) for name, serve in sides.items()}
    contenders = [Contender(name, side.turn) for name, side in started.items()]
    title = f"Fine-tuning BERT-{job.model}: {job.batch} rows a step, by length, the CPU, threads: {job.threads}, fp32"
    comparison = compare(title, "examples", contenders, repeats, clock="wall")
    comparison.notes.update({name: side.finish() for name, side in started.items()})
    return comparison


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("dataset", help="a built dataset of a classification")
    parser.add_argument("--model", choices=SHAPES, nargs="+", default=["mini"], help="(default: mini)")
    parser.add_argument("--batch", type=int, default=32, help="examples of a step (default: 32)")
    parser.add_argument("--turn", type=int, default=25, help="steps that a side takes in its turn (default: 25)")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU, for each side (default: 2)")
    options = parser.parse_args()
    from data_pipeline.dataset import Dataset

    manifest = Dataset.open(options.dataset).manifest
    labels = tuple((manifest.task or {})["labels"])
    comparisons = []
    for model in options.model:
        with tempfile.TemporaryDirectory() as folder:
            job = Job(
                str(Path(options.dataset).resolve()),
                model,
                manifest.vocab_size,
                labels,
                options.batch,
                options.turn,
                options.threads,
                folder,
            )
            comparisons.append(measure(job, options.repeats))
    publish(comparisons, options.json)


if __name__ == "__main__":
    main()
