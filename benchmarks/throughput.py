"""Predicted throughput, and published figures that it was not fitted to, as Markdown.

    python -m benchmarks.throughput             # four recipes on one H100 and one H200
    python -m benchmarks.throughput --anchors   # predictions beside published figures

The anchors are configured with what their authors use, as far as it is published:

- NVIDIA DeepLearningExamples, BERT-large in PyTorch on one A100 80 GB, fp16, LAMB: unfused
  attention, dropout of PyTorch instead of ours, one kernel for an operator, 20 predictions at 128.
  At length 512 their kernels skip padding. How long rows are is not published; MLPerf packs two
  sequences of the same Wikipedia into 512 positions. So a row is assumed to have 256 positions.
- MLPerf Training 4.0, BERT-large on eight H200: 7,972 sequences per second, two of them packed in
  512 positions. fp8 in the layers' products, activations in 16 bits, one kernel for attention,
  which skips what sequences may not see: rows of 256. Every device takes 96 sequences a step
  (assumed).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor

from samestep.config import load
from trainer.inspect.plan.fusion import EAGER, FUSED, Implementation
from trainer.inspect.plan.throughput import Prediction, Predictor
from trainer.inspect.plan.trace import Step
from trainer.training.experiment import Experiment

_CONFIGS = Path(__file__).parents[1] / "configs" / "pretrain"
RECIPES = {
    "BERT-large 128": ("bert_large_lamb", 0, []),
    "BERT-large 512": ("bert_large_lamb", 1, []),
    "RoBERTa-base 512, packed": ("roberta_base", 0, ["data.packing=best_fit"]),
    "T5-base 512/114": ("t5_base", 0, []),
}
"""Name -> recipe, phase, settings."""


@dataclass(frozen=True)
class Anchor:
    """A published throughput.

    Attributes:
        published: sequences per second and device.
        device: name of its data sheet.
        devices: number of devices.
        length: positions that a sequence is assumed to have.
        examples: of a step, on all devices.
        micro_batch: on each device.
        how: kernels of the published code.
        strategy: `plan.STRATEGIES`' nearest to theirs.
        stock_dropout: whether dropout is PyTorch's.
    """

    published: float
    device: str
    devices: int
    length: int
    examples: int
    micro_batch: int
    how: Implementation
    strategy: str = "single"
    stock_dropout: bool = True

    def predict(self) -> float:
        """Predicted sequences per second and device."""
        settings = [
            f"phases=[{{steps: 10, sequence_length: {self.length}}}]",
            "training.steps=10",
            f"training.global_batch_size={self.examples}",
            f"training.micro_batch_size={self.micro_batch}",
            "schedule.warmup_steps=0",
        ]
        experiment = load(Experiment, str(_CONFIGS / "bert_large_lamb.yaml"), settings)
        with stock_dropout() if self.stock_dropout else ExitStack():
            step = Step(experiment, on_cpu=False)
            predictor = Predictor(
                experiment, step, self.devices, self.strategy, {"published": self.how}
            )
            (found,) = predictor.predictions(experiment.resolved_phases(), [self.device])
        return found[1][0].sequences


ANCHORS = {
    "NVIDIA DeepLearningExamples, A100 80 GB, 128": Anchor(580, "a100", 1, 128, 65_536, 256, EAGER),
    "NVIDIA DeepLearningExamples, A100 80 GB, 512": Anchor(210, "a100", 1, 256, 32_768, 64, EAGER),
    "MLPerf 4.0, 8 x H200": Anchor(
        7972 / 8,
        "h200",
        8,
        256,
        8 * 96,
        96,
        replace(FUSED, fuses_loss=True, narrow=True, speedup=2),
        strategy="zero1",
        stock_dropout=False,
    ),
}


@contextmanager
def stock_dropout() -> Iterator[None]:
    """Replaces the project's dropout by PyTorch's, a single kernel with a stored mask."""

    def dropout(x: Tensor, p: float, key: Tensor | None, positions: Tensor | None = None) -> Tensor:
        return x if key is None or p == 0 else F.dropout(x, p)

    def attention_dropout(x: Tensor, p: float, key: Tensor | None, version: int) -> Tensor:
        return dropout(x, p, key)

    modules = ("layers.layer", "layers.embeddings", "heads", "transformer")
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch(f"trainer.models.{module}.dropout", dropout))
        stack.enter_context(
            patch("trainer.models.layers.attention.attention_dropout", attention_dropout)
        )
        yield


def predictions(
    names: Sequence[str], extra: Sequence[str] = ()
) -> Iterator[tuple[str, list[Prediction]]]:
    """Predictions for each recipe, with extra settings, on one device of each kind."""
    for title, (recipe, index, settings) in RECIPES.items():
        experiment = load(Experiment, str(_CONFIGS / f"{recipe}.yaml"), [*settings, *extra])
        phase = experiment.resolved_phases()[index]
        predictor = Predictor(experiment, Step(experiment, on_cpu=False), 1, "single")
        for _, found in predictor.predictions([phase], names):
            yield title, found


def recipes() -> str:
    """The table of recipes."""
    columns = ["recipe", "device", "eager", "compiled", "fused", "and bf16 residual"]
    columns += ["fastest / eager", "MFU, eager", "MFU, fastest"]
    lines = [f"| {' | '.join(columns)} |", f"|---|---{'|---:' * (len(columns) - 2)}|"]
    devices = ["h100", "h200"]
    narrow = dict(predictions(devices, ["training.residual=bf16"]))
    for title, found in predictions(devices):
        for device in dict.fromkeys(each.device for each in found):
            own = {each.implementation: each for each in found if each.device == device}
            fastest = next(
                each
                for each in narrow[title]
                if (each.device, each.implementation) == (device, "fused")
            )
            order = [*(own[name] for name in ("eager", "compiled", "fused")), fastest]
            cells = [title, device, *(f"{each.sequences:,.0f}" for each in order)]
            cells.append(f"{fastest.sequences / own['eager'].sequences:.1f}")
            cells += [f"{each.mfu:.0%}" for each in (own["eager"], fastest)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def anchors() -> str:
    """The table of published figures."""
    lines = [
        "| published | sequences/s and device | predicted | predicted / published |",
        "|---|---:|---:|---:|",
    ]
    for name, anchor in ANCHORS.items():
        found = anchor.predict()
        lines.append(
            f"| {name} | {anchor.published:,.0f} | {found:,.0f} | {found / anchor.published:.2f} |"
        )
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--anchors", action="store_true", help="beside published figures")
    work: Callable[[], str] = anchors if parser.parse_args(given).anchors else recipes
    print(work())


if __name__ == "__main__":
    main()
