"""Training steps beside Hugging Face `Trainer` with `BertForMaskedLM`, on the same batches.

    python -m benchmarks.step --device cpu    BERT-mini and BERT-base at length 128, in fp32
    python -m benchmarks.step --device cuda   BERT-base and BERT-large at 128 and 512, in bf16

Both sides train the same model on the same micro-batches with the same masks, by AdamW, with
gradients clipped and dropout 0.1 of hidden states (0 of attention probabilities, so that both may
take PyTorch's fused attention). Ours is the real trainer and makes its batches as it goes; theirs
finds them ready in memory. Each side is a process, and they take turns of some steps. On a GPU our
layers are compiled; theirs runs both ways. Model FLOPs utilisation counts for all sides the FLOPs
that ours needs.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from benchmarks.models import import_transformers
from benchmarks.pairing import Comparison, Contender, arguments, compare, publish
from data_pipeline.format.manifest import FORMAT, Manifest
from data_pipeline.format.shards import write_shard
from data_pipeline.tokenizers.huggingface import HuggingFace
from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer.accelerators import Accelerator, cpu, cuda
from trainer.config import load
from trainer.objectives import mlm
from trainer.strategies import Replica
from trainer.strategies.world import World
from trainer.training.experiment import Experiment
from trainer.training.run import build_trainer, open_checkpointer, open_loader

VOCAB_SIZE = 30_522
SHAPES = {"tiny": (2, 128), "mini": (4, 256), "base": (12, 768), "large": (24, 1024)}
"""Layers and width; heads are 64 wide."""

CASES = {"cpu": (("mini", "base"), (128,)), "cuda": (("base", "large"), (128, 512))}
"""Models and lengths."""


def bert(model: str) -> str:
    """The `model` section of an experiment."""
    layers, width = SHAPES[model]
    return (
        f"{{kind: bert, vocab_size: {VOCAB_SIZE}, layers: {layers}, width: {width}, heads: "
        f"{width // 64}, "
        f"ffn_width: {4 * width}, attention_dropout: 0.0}}"
    )


@dataclass(frozen=True)
class Job:
    """What all sides train.

    Attributes:
        device: cpu or cuda.
        model: a key of SHAPES.
        length: positions of an example.
        batch: examples of a step.
        turn: steps that a side takes in its turn.
        threads: of the CPU, for each side.
        folder: where the dataset is.
    """

    device: str
    model: str
    length: int
    batch: int
    turn: int
    threads: int
    folder: str

    def experiment(self) -> Experiment:
        """Our side's configuration; its masks are BERT's 20 predictions at length 128 and 80 at
        512.
        """
        on_gpu = self.device == "cuda"
        file = Path(self.folder) / f"{self.model}_{self.length}.yaml"
        file.write_text(f"""
output: {self.folder}/run
data: {{path: {self.folder}, sequence_length: {self.length}, packing: concat}}
model: {bert(self.model)}
objective: {{kind: mlm, mask_fraction: 0.157}}
optimizer: {{kind: adamw, lr: 1e-4, weight_decay: 0.01}}
training: {{steps: 1000000, global_batch_size: {self.batch}, micro_batch_size: {self.batch},
  precision: {"bf16" if on_gpu else "fp32"}, compile: {"true" if on_gpu else "false"}}}
strategy: single
""")
        return load(Experiment, str(file))

    def accelerator(self) -> Accelerator:
        """The device."""
        return cuda.Config().build() if self.device == "cuda" else cpu.Config(self.threads).build()


class Turns:
    """Holds a training loop between the turns of its side, and measures it.

    Attributes:
        steps: taken in all turns but the first, which warms up.
        seconds: that they took.
        cpu_seconds: that they took of all threads, which other programs on the machine disturb
            less.
    """

    def __init__(self, job: Job, commands: Connection) -> None:
        self._job, self._commands = job, commands
        self._began = self._cpu_began = 0.0
        self.steps, self.seconds, self.cpu_seconds = -job.turn, 0.0, 0.0

    def wait(self) -> bool:
        """Waits for a turn; returns whether there is one, or all is over."""
        another: bool = self._commands.recv()
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        return another

    def step(self) -> bool:
        """Ends a step, and the turn with its last one; returns whether to take another step."""
        self.steps += 1
        if self.steps % self._job.turn:
            return True
        if self._job.device == "cuda":
            torch.cuda.synchronize()
        if self.steps > 0:
            self.seconds += time.perf_counter() - self._began
            self.cpu_seconds += time.process_time() - self._cpu_began
        if self._job.device == "cuda":
            torch.cuda.empty_cache()  # the other side needs the memory
        self._commands.send(None)
        return self.wait()

    def report(self, *notes: str) -> None:
        """Tells the other end about the turns; the last thing that a side does."""
        if self._job.device == "cuda":
            notes = (f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", *notes)
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            rate = self.steps * self._job.batch / self.cpu_seconds
            notes = (f"{rate:.2f} a CPU-second, peak memory {memory:.1f} GiB", *notes)
        experiment, length = self._job.experiment(), self._job.length
        if peak := self._job.accelerator().peak_flops(experiment.training.precision):
            with torch.device("meta"):
                model = experiment.model.build()
            assert isinstance(experiment.objective, mlm.Config)
            predictions = round(experiment.objective.mask_fraction * (length - 2))
            flops = model.flops_per_token(length, predictions / length) * length * self._job.batch
            notes = (f"MFU {flops * self.steps / self.seconds / peak:.1%}", *notes)
        self._commands.send(", ".join(notes))


def ours(job: Job, commands: Connection) -> None:
    """Our side: the trainer's steps, and the loader's batches."""
    experiment = job.experiment()
    world, accelerator = World.start(60), job.accelerator()
    world.connect(accelerator.collective_backend)
    strategy = experiment.strategy.build(accelerator, world, experiment.training.precision)
    trainer = build_trainer(
        experiment, experiment.data.open(), strategy, open_checkpointer(experiment, world)
    )
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


def theirs(job: Job, commands: Connection, compiled: bool = False) -> None:
    """Hugging Face's side."""
    config = their_config(job, vocab_size=VOCAB_SIZE, attention_probs_dropout_prob=0.0)
    import transformers

    model = transformers.BertForMaskedLM(config)
    train_theirs(
        job,
        commands,
        model,
        ready_examples(job),
        per_device_train_batch_size=job.batch,
        torch_compile=compiled,
    )


def their_config(job: Job, **settings: Any) -> Any:
    """The `BertConfig` of a job's model."""
    layers, width = SHAPES[job.model]
    shape: dict[str, Any] = {
        "hidden_size": width,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
    }
    return import_transformers().BertConfig(num_hidden_layers=layers, **shape, **settings)


def train_theirs(
    job: Job,
    commands: Connection,
    model: Any,
    examples: list[Any],
    collate: Any = None,
    **settings: Any,
) -> None:
    """Hugging Face's `Trainer` in turns, with further `TrainingArguments`."""
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

    arguments = transformers.TrainingArguments(
        output_dir=f"{job.folder}/theirs",
        max_steps=1_000_000,
        learning_rate=1e-4,
        weight_decay=0.01,
        use_cpu=job.device == "cpu",
        bf16=job.device == "cuda",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    InOrder(
        model, arguments, data_collator=collate, train_dataset=examples, callbacks=[InTurns()]
    ).train()
    turns.report()


def ready_examples(job: Job) -> list[dict[str, Tensor]]:
    """The examples of our first 64 batches, as Hugging Face's models take them."""
    experiment = job.experiment()
    dataset, (phase,) = experiment.data.open(), experiment.resolved_phases()
    examples = []
    with open_loader(experiment, dataset, Replica(0, 1), phase) as loader:
        for batch in (batch for micro_batches in islice(loader, 64) for batch in micro_batches):
            labels = torch.full_like(batch["tokens"], -100, dtype=torch.int64)
            labels.scatter_(1, batch["predicted"], batch["labels"])
            attended = (batch["segments"] > 0).long()
            columns = {
                "input_ids": batch["tokens"].long(),
                "attention_mask": attended,
                "labels": labels,
            }
            examples += [
                dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
            ]
    return examples


def write_dataset(folder: Path, tokens: int = 2**22, documents: int = 16) -> None:
    """Random tokens of a vocabulary of BERT's size, as long documents."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    words = [*special, *(f"w{i}" for i in range(VOCAB_SIZE - len(special)))]
    model = tokenizers.models.WordPiece(
        {word: i for i, word in enumerate(words)}, unk_token="[UNK]"
    )
    tokenizer = Tokenizer(HuggingFace(tokenizers.Tokenizer(model), {}))
    tokenizer.save(folder / "tokenizer")
    values = np.random.default_rng(0).integers(len(special), VOCAB_SIZE, tokens, dtype=np.uint16)
    origin = np.array([(0, i) for i in range(documents)], dtype=np.uint32)
    shard = write_shard(
        folder / "train-000000.tar", np.split(values, documents), origin, values.dtype
    )
    Manifest(
        format=FORMAT,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=VOCAB_SIZE,
        dtype=values.dtype.name,
        source={},
        files=("random",),
        documents_in=documents,
        documents_rejected={},
        splits={"train": (shard,), "heldout": ()},
    ).save(folder)


class Side:
    """A side's process, seen from the other end."""

    def __init__(self, serve: Callable[[Any, Connection], None], job: Job) -> None:
        context = get_context("spawn")
        self._job = job
        self._commands, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(job, theirs), daemon=True)
        self._process.start()
        theirs.close()  # or the end of the process would go unnoticed

    def turn(self) -> float:
        """Lets it take its steps; returns how many examples these had."""
        self._commands.send(True)
        self._commands.recv()
        return self._job.turn * self._job.batch

    def finish(self) -> str:
        """Ends it; returns what it has to say."""
        self._commands.send(False)
        notes: str = self._commands.recv()
        self._process.join()
        return notes


def measure(job: Job, repeats: int) -> Comparison:
    """One model at one length."""
    sides = {"samestep": ours, "Hugging Face Trainer": theirs}
    where = f"the CPU, threads: {job.threads}, fp32"
    if job.device == "cuda":
        sides["Hugging Face Trainer, compiled"] = partial(theirs, compiled=True)
        where = f"{torch.cuda.get_device_name()}, bf16"
    title = f"Training steps of BERT-{job.model}: {job.batch} x {job.length} positions on {where}"
    return in_turns(title, sides, job, repeats)


def in_turns(
    title: str, sides: Mapping[str, Callable[[Any, Connection], None]], job: Job, repeats: int
) -> Comparison:
    """Lets sides train a job in turn, each in a process of its own."""
    started = {name: Side(serve, job) for name, serve in sides.items()}
    contenders = [Contender(name, side.turn) for name, side in started.items()]
    comparison = compare(title, "examples", contenders, repeats, clock="wall")
    comparison.notes.update({name: side.finish() for name, side in started.items()})
    return comparison


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=CASES, default="cpu")
    parser.add_argument("--model", choices=SHAPES, nargs="+", help="instead of both")
    parser.add_argument(
        "--length",
        type=int,
        nargs="+",
        help="positions of an example (default: 128, on a GPU 512, too)",
    )
    parser.add_argument(
        "--batch", type=int, help="examples of a step (default: so many that a step takes a while)"
    )
    parser.add_argument(
        "--turn", type=int, help="steps that a side takes in its turn (default: 2, on a GPU 50)"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="of the CPU, for each side (default: 2)"
    )
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("nothing measured: torch finds no CUDA device here")
        return
    models, lengths = CASES[options.device]
    comparisons = []
    for model, length in product(options.model or models, options.length or lengths):
        cells = 32_768 if on_gpu else 4_096 if model in ("tiny", "mini") else 1_024
        batch, turn = options.batch or cells // length, options.turn or (50 if on_gpu else 2)
        with tempfile.TemporaryDirectory() as folder:
            write_dataset(Path(folder))
            job = Job(options.device, model, length, batch, turn, options.threads, folder)
            comparisons.append(measure(job, options.repeats))
    publish(comparisons, options.json)


if __name__ == "__main__":
    main()
