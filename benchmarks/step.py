"""Training steps on the CPU beside Hugging Face `Trainer` with `BertForMaskedLM`.

    python -m benchmarks.step

BERT-mini and BERT-base at length 128, in fp32; benchmarks/gpu.py measures GPUs. Both sides train
the same model on the same micro-batches with the same masks, by AdamW, with gradients clipped and
dropout 0.1 of hidden states (0 of attention probabilities, so that both may take PyTorch's fused
attention). Ours is the real trainer and makes its batches as it goes; theirs finds them ready in
memory. Each side is a process, and they take turns of some steps.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks import sides
from benchmarks.dataset import VOCAB_SIZE, write_dataset
from benchmarks.pairing import Comparison, arguments, publish
from samestep.config import load
from trainer.training.experiment import Experiment

SHAPES = {"tiny": (2, 128), "mini": (4, 256), "base": (12, 768), "large": (24, 1024)}
"""Layers and width; heads are 64 wide."""


def bert(model: str) -> str:
    """The `model` section of an experiment."""
    layers, width = SHAPES[model]
    return (
        f"{{kind: bert, vocab_size: {VOCAB_SIZE}, layers: {layers}, width: {width}, heads: "
        f"{width // 64}, "
        f"ffn_width: {4 * width}, attention_dropout: 0.0}}"
    )


@dataclass(frozen=True, kw_only=True)
class Job(sides.Job):
    """Pre-training of BERT.

    Attributes:
        model: a key of SHAPES.
        length: positions of an example.
    """

    model: str
    length: int

    def experiment(self) -> Experiment:
        """The configuration, with BERT's 20 predictions at length 128."""
        file = Path(self.folder) / f"{self.model}_{self.length}.yaml"
        file.write_text(f"""
output: {self.folder}/run
data: {{path: {self.folder}, sequence_length: {self.length}, packing: concat}}
model: {bert(self.model)}
objective: {{kind: mlm, mask_fraction: 0.157}}
optimizer: {{kind: adamw, lr: 1e-4, weight_decay: 0.01}}
training: {{steps: 1000000, global_batch_size: {self.batch}, micro_batch_size: {self.micro_batch}}}
accelerator: {{kind: cpu, threads: {self.threads}}}
strategy: single
""")
        return load(Experiment, str(file))


def measure(job: Job, turn: int, repeats: int) -> Comparison:
    """One model at one length, in turns of `turn` steps."""
    title = (
        f"Training steps of BERT-{job.model}: {job.batch} x {job.length} positions on the CPU, "
        f"threads: {job.threads}, fp32"
    )
    both = {"samestep": sides.ours, "Hugging Face Trainer": sides.theirs}
    return sides.compare_sides(title, both, job, turn, repeats)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SHAPES, nargs="+", default=["mini", "base"])
    parser.add_argument(
        "--length",
        type=int,
        nargs="+",
        default=[128],
        help="positions of an example (default: 128)",
    )
    parser.add_argument(
        "--batch", type=int, help="examples of a step (default: so many that a step takes a while)"
    )
    parser.add_argument(
        "--turn", type=int, default=2, help="steps that a side takes in its turn (default: 2)"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="of the CPU, for each side (default: 2)"
    )
    options = parser.parse_args()
    comparisons = []
    for model, length in product(options.model, options.length):
        positions = 4_096 if model in ("tiny", "mini") else 1_024
        batch = options.batch or positions // length
        with tempfile.TemporaryDirectory() as folder:
            write_dataset(Path(folder))
            job = Job(
                folder=folder,
                batch=batch,
                micro_batch=batch,
                threads=options.threads,
                model=model,
                length=length,
            )
            comparisons.append(measure(job, options.turn, options.repeats))
    publish(comparisons, options.json)


if __name__ == "__main__":
    main()
