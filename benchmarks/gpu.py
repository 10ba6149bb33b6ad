"""Training steps on a GPU: samestep and Hugging Face Trainer, eager and compiled, side by side.

    make bench-gpu                                     all recipes, two hours or more
    python -m benchmarks.gpu --recipe bert_large_512   one of them
    python -m benchmarks.gpu --tiny                    a trial of some minutes, with tiny models
    python -m benchmarks.gpu --device cpu              a trial without a GPU

All sides train the same model on the same batches of 32,768 positions, in bf16, by AdamW, with
gradients clipped and dropout 0.1 of hidden states and attention probabilities. Each side is a
process; they take turns on one GPU, round after round, and a figure is the median of the rounds.
Between its turns, a side keeps nothing in the GPU's memory.

samestep is the real trainer and makes its batches as it goes; Trainer finds the same batches ready
in memory. Each side computes a batch in one piece if that fits, else in halves, quarters and so on.
MFU, model FLOPs utilization, counts for all sides the FLOPs that samestep's model needs. Kernel
launches are those of one more step, under torch.profiler. The last column is what `samestep plan`
predicts.

The tables replace the ones in docs/benchmarks.md, after each recipe, so an interrupted run keeps
what it has measured. A side that fails gets a row that says why, and the others go on. Where even
one sequence is out of memory, there is a larger GPU or a smaller model to choose; a failure of
another kind prints its traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.dataset import write_dataset
from benchmarks.gpu_tables import (
    BEGIN,
    END,
    REFERENCE,
    Result,
    Row,
    TakenTurn,
    replace_tables,
    report,
    table,
)
from benchmarks.pairing import arguments, in_rounds, versions
from benchmarks.sides import Job, Measured, Serve, Side, SideFailed, Turn, ours, theirs
from samestep.config import load
from trainer.accelerators.kinds import cuda
from trainer.inspect.plan.datasheets import DEVICES
from trainer.inspect.plan.fusion import IMPLEMENTATIONS
from trainer.inspect.plan.throughput import Predictor
from trainer.inspect.plan.trace import Step
from trainer.training.experiment import Experiment
from trainer.training.forecast import flops_of_step
from trainer.training.model import build_objectives

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks.md"

POSITIONS = 32_768
TINY = {"layers": 2, "width": 64, "heads": 2, "ffn_width": 128, "vocab_size": 512}
TINY_LENGTH, TINY_BATCH = 32, 4


@dataclass(frozen=True)
class Recipe:
    """A model and its batches.

    Attributes:
        title: of its table.
        config: a file of configs/pretrain, for the model's shape.
        length: positions of a sequence; of an encoder-decoder, of its source.
        settings: of the experiment, by section, where they differ from the file.
        packed: whether rows hold several documents, which attend to themselves only.
    """

    title: str
    config: str
    length: int
    settings: Mapping[str, Any]
    packed: bool = False


_BERT: Mapping[str, Any] = {
    "model": {"nsp": False},
    "objective": {"kind": "mlm", "mask_fraction": 0.157},
}
_ROBERTA: Mapping[str, Any] = {"model": {"initialization": "bert"}}
_T5: Mapping[str, Any] = {
    "model": {"dropout": 0.1, "attention_dropout": 0.1},
    "objective": {"z_loss": 0.0},  # which Hugging Face's T5 does not have
}
RECIPES = {
    "bert_base_128": Recipe("BERT-base, 128 positions, 20 predictions", "bert_base", 128, _BERT),
    "bert_base_512": Recipe("BERT-base, 512 positions, 80 predictions", "bert_base", 512, _BERT),
    "bert_large_128": Recipe("BERT-large, 128 positions, 20 predictions", "bert_large", 128, _BERT),
    "bert_large_512": Recipe("BERT-large, 512 positions, 80 predictions", "bert_large", 512, _BERT),
    "roberta_base_512": Recipe(
        "RoBERTa-base, 512 positions, several documents in a row",
        "roberta_base",
        512,
        _ROBERTA,
        packed=True,
    ),
    "t5_base_512": Recipe(
        "T5-base (v1.1), sources of 512 positions and targets of 114", "t5_v1_1_base", 512, _T5
    ),
}


@dataclass(frozen=True)
class Contestant:
    """A side of each recipe.

    Attributes:
        serve: trains in turns.
        settings: of our experiment, by section; Hugging Face's sides have none.
    """

    name: str
    serve: Serve
    settings: Mapping[str, Any] = field(default_factory=dict)


def contestants(device: str) -> dict[str, Contestant]:
    """The sides by their names on the command line, ours first."""
    eager, compiled = {"compile": False}, {"compile": True}
    plain, fused = accelerator(device, False), accelerator(device, True)
    ours_eager = {"training": eager, "accelerator": plain}
    ours_compiled = {"training": compiled, "accelerator": plain}
    found = {
        "eager": Contestant("samestep", ours, ours_eager),
        "compiled": Contestant("samestep, compiled", ours, ours_compiled),
    }
    if fused != plain:
        name = "samestep, compiled, fused attention"
        narrow = compiled | {"residual": "bf16"}
        for side, label, training in (
            ("fused", name, compiled),
            ("residual", f"{name}, bf16 residual", narrow),
            ("fp8", f"{name}, bf16 residual, fp8", narrow | {"fp8": True}),
        ):
            settings = {"training": training, "accelerator": fused}
            found[side] = Contestant(label, partial(ours, must_fuse=True), settings)
    found["trainer"] = Contestant("Hugging Face Trainer", theirs)
    found["trainer_compiled"] = Contestant(REFERENCE, partial(theirs, compiled=True))
    return found


def accelerator(device: str, fused_attention: bool) -> dict[str, Any]:
    """The `accelerator` section, with `fused_attention` where there is such a setting."""
    if device == "cpu":
        return {"kind": "cpu", "threads": 1}
    has_setting = any(each.name == "fused_attention" for each in dataclasses.fields(cuda.Config))
    return {"kind": "cuda"} | ({"fused_attention": fused_attention} if has_setting else {})


@dataclass(frozen=True, kw_only=True)
class GpuJob(Job):
    """A recipe for one side.

    Attributes:
        settings: of the side.
        tiny: makes the model and its batches tiny.
    """

    recipe: Recipe
    settings: Mapping[str, Any] = field(default_factory=dict)
    tiny: bool = False

    @property
    def length(self) -> int:
        return TINY_LENGTH if self.tiny else self.recipe.length

    def experiment(self) -> Experiment:
        """The configuration: the recipe's model, the side's settings, and the same for all."""
        sections: list[Mapping[str, Any]] = [
            {"optimizer": {"kind": "adamw", "bias_correction": True, "weight_decay": 0.01}},
            {"training": {"steps": 1_000_000, "evaluate_every": None, "max_grad_norm": 1.0}},
            {"training": {"global_batch_size": self.batch, "micro_batch_size": self.micro_batch}},
            {"training": {"precision": "bf16" if self.device == "cuda" else "fp32"}},
            {"accelerator": accelerator(self.device, False)},
            self.recipe.settings,
            {"model": TINY if self.tiny else {}},
            self.settings,
        ]
        packing = "best_fit" if self.recipe.packed else "concat"
        overrides = [
            f"output={self.folder}/run",
            f"data={{path: {self.folder}, sequence_length: {self.length}, packing: {packing}}}",
            "phases=[]",
            "schedule={warmup_steps: 100}",
            "strategy=single",
            # JSON is YAML; a section's settings are merged into those of the file.
            *(f"{name}={json.dumps(each)}" for part in sections for name, each in part.items()),
        ]
        return load(
            Experiment, str(ROOT / f"configs/pretrain/{self.recipe.config}.yaml"), overrides
        )

    def write_data(self) -> None:
        """Writes a document that fills rows without padding, or short ones for packed rows."""
        experiment = self.experiment()
        vocab_size = experiment.model.vocab_size
        sentinels = 100 if self.recipe.config.startswith("t5") else 0
        folder = Path(self.folder)
        # The objective says how many tokens fill a row, and needs a tokenizer to say so.
        write_dataset(folder, [1000], vocab_size, sentinels)
        (objective,) = build_objectives(experiment, experiment.data.open())
        spec = objective.pack_spec(self.length)
        row = spec.sequence_length - spec.prefix - spec.suffix
        tokens = row * self.batch * (16 if self.tiny else 64)
        # A single document: the next one would shift a row by its [SEP], and pad it by a position.
        lengths = [tokens]
        if self.recipe.packed:
            # A quarter of a row on average.
            count = 4 * tokens // row
            lengths = np.random.default_rng(0).integers(row // 20, row // 2, count).tolist()
        write_dataset(folder, lengths, vocab_size, sentinels)

    def flops_of_step(self) -> float:
        """Model FLOPs of a step of ours."""
        experiment = self.experiment()
        (objective,) = build_objectives(experiment, experiment.data.open())
        (phase,) = experiment.resolved_phases()
        with torch.device("meta"):
            model = experiment.build_model()
        return flops_of_step(model, objective, phase)

    def peak_flops(self) -> float | None:
        """The GPU's peak in the precision of the matrix products, if it is known."""
        experiment = self.experiment()
        assert experiment.accelerator is not None
        return experiment.accelerator.build().peak_flops(experiment.training.precision)


def predicted(job: GpuJob) -> float | None:
    """The throughput that `samestep plan` predicts, in sequences per second.

    None for devices without a data sheet.
    """
    experiment = job.experiment()
    device = sheet_of(torch.cuda.get_device_name()) if job.device == "cuda" else None
    if device is None:
        return None
    config = experiment.accelerator
    fused = isinstance(config, cuda.Config) and config.fused_attention
    how = "eager" if not experiment.training.compile else "fused" if fused else "compiled"
    step = Step(experiment, on_cpu=False)
    predictor = Predictor(experiment, step, 1, "single", only={how: IMPLEMENTATIONS[how]})
    ((_, (found,)),) = predictor.predictions(experiment.resolved_phases(), [device])
    return found.sequences


def sheet_of(name: str) -> str | None:
    """The data sheet for a GPU's name, "NVIDIA H100 80GB HBM3" -> "h100"."""
    words = name.lower().replace("-", " ").split()
    return next((device for device in DEVICES if device in words), None)


class Running:
    """A side that has taken its first steps, and fills its row."""

    def __init__(
        self, contestant: Contestant, job: GpuJob, row: Row, taken: list[TakenTurn]
    ) -> None:
        """Starts the side with the largest micro-batch that fits.

        Args:
            taken: to which its turns are added.

        Raises:
            SideFailed: none fits, or there is another error.
        """
        micro_batch, warm_up = job.batch, Turn(untimed=0, timed=2)
        while True:
            self.job = dataclasses.replace(job, micro_batch=micro_batch)
            self._side = Side(contestant.serve, self.job)
            try:
                first = self._side.take(warm_up)
                break
            except SideFailed as failure:
                if not failure.out_of_memory or micro_batch == 1:
                    raise
                micro_batch //= 2
        self._row, self._turns, self._taken = row, list[Measured](), taken
        row.micro_batch = micro_batch
        taken.append(TakenTurn(row.side, "warm-up", first))

    def take(self, turn: Turn) -> Measured | None:
        """Lets the side take a turn; None if it fails, or has failed before."""
        if self._row.failure is not None:
            return None
        try:
            measured = self._side.take(turn)
        except SideFailed as failure:
            self._row.failure = str(failure)
            return None
        purpose = "profiled" if turn.profiled else "measured"
        self._taken.append(TakenTurn(self.side, purpose, measured))
        return measured

    @property
    def side(self) -> str:
        return self._row.side

    def measure(self, turn: Turn) -> float | None:
        """Lets the side take a turn whose figures count; returns its sequences per second."""
        if (found := self.take(turn)) is None:
            return None
        self._turns.append(found)
        if graphs := sum(step.graphs for step in found.by_step):
            say(f"{self.side} compiled {graphs} graphs in timed steps, which are slower for it")
        return self._rate(found)

    def _rate(self, turn: Measured) -> float:
        return self.job.batch * turn.steps / turn.seconds

    def finish(self, flops_of_step: float, peak_flops: float | None) -> None:
        """Counts kernel launches, ends the side and fills the row."""
        profiled = self.take(Turn(untimed=1, timed=1, profiled=True))
        self._side.finish()
        if self._row.failure is not None:
            return
        row, turns = self._row, self._turns
        assert profiled is not None
        row.rates = [self._rate(each) for each in turns]
        row.launches = profiled.launches
        row.peak_memory = max(each.peak_memory for each in turns)
        row.waiting = statistics.median(each.waited / each.seconds for each in turns)
        if peak_flops is not None:
            row.mfu = flops_of_step / self.job.batch * statistics.median(row.rates) / peak_flops


def measure(job: GpuJob, sides: Sequence[Contestant], turn: Turn, repeats: int) -> Result:
    """Measures all sides of a recipe; one that fails gets a row that says why."""
    result = Result(job.recipe.title, job.batch, [Row(side.name) for side in sides])
    running: list[Running] = []
    for side, row in zip(sides, result.rows, strict=True):
        say(f"{job.recipe.title}: {row.side}, first steps")
        own = dataclasses.replace(job, settings=side.settings)
        try:
            running.append(started := Running(side, own, row, result.turns))
            if side.settings:
                row.predicted = predicted(started.job)
        except SideFailed as failure:
            row.failure = str(failure)
            say(f"{row.side}: {failure}")
    for number, each in in_rounds(running, range(repeats)):
        rate = each.measure(turn)
        if rate is not None:
            say(f"round {number + 1} of {repeats}: {each.side}, {rate:,.0f} sequences/s")
    flops, peak = job.flops_of_step(), job.peak_flops()
    for each in running:
        each.finish(flops, peak)
    return result


def conditions(device: str) -> dict[str, str]:
    """What the figures depend on besides the program."""
    found = {"date": date.today().isoformat(), "device": "the CPU", "versions": versions()}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        platform = (
            f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
        )
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        found["device"] = ", ".join([properties.name, memory, *driver(), platform])
    return found


def driver() -> list[str]:
    """The version of NVIDIA's driver, if there is one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [f"driver {line}" for line in answer.stdout.splitlines()[:1]]


def say(text: str) -> None:
    """Tells the progress, apart from the tables."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = arguments(__doc__, repeats=5)
    parser.add_argument(
        "--recipe", choices=RECIPES, nargs="+", default=list(RECIPES), help="(default: all)"
    )
    sides = list(contestants("cuda"))
    parser.add_argument("--side", choices=sides, nargs="+", default=sides, help="(default: all)")
    parser.add_argument(
        "--turn", type=int, help="timed steps of a side's turn (default: 30; of tiny models 2)"
    )
    parser.add_argument(
        "--positions",
        type=int,
        default=POSITIONS,
        help=f"positions of a step, which fix its number of sequences (default: {POSITIONS:,})",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models and batches, to try the program"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cuda: the first NVIDIA GPU, or AMD's with a torch for ROCm. cpu: tiny models in "
        "fp32, whose layers are traced but not compiled; its figures mean nothing",
    )
    parser.add_argument(
        "--page",
        type=Path,
        help=f"a Markdown file with the lines {BEGIN} and {END}, between which the tables go "
        "(default: docs/benchmarks.md; of tiny models, or of some recipes, none)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    on_gpu, tiny = options.device == "cuda", options.tiny or options.device == "cpu"
    if on_gpu and not torch.cuda.is_available():
        reason = cuda.unusable() or "Run this on a machine with one, or try it with --device cpu."
        print(f"bench-gpu: nothing measured, as torch finds no GPU. {reason}", file=sys.stderr)
        return 1
    # The page's tables are replaced together, so parts of them need a page of their own.
    every = contestants(options.device)
    sides = [side for name, side in every.items() if name in options.side]
    complete = len(options.recipe) == len(RECIPES) and len(sides) == len(every) and not tiny
    page = options.page or (PAGE if complete else None)
    turn = Turn(untimed=3 if on_gpu else 0, timed=options.turn or (2 if tiny else 30))
    found, results = conditions(options.device), list[Result]()
    for name in options.recipe:
        recipe = RECIPES[name]
        batch = TINY_BATCH if tiny else max(1, options.positions // recipe.length)
        with tempfile.TemporaryDirectory() as folder:
            job = GpuJob(
                folder=folder,
                batch=batch,
                micro_batch=batch,
                device=options.device,
                threads=None if on_gpu else 1,
                backend="inductor" if on_gpu else "eager",
                recipe=recipe,
                tiny=tiny,
            )
            job.write_data()
            results.append(measure(job, sides, turn, options.repeats))
        print(f"\n{table(results[-1])}", flush=True)
        # After each recipe, so that an interruption leaves those before it.
        if page is not None:
            replace_tables(page, report(found, results, turn, options.repeats))
        if options.json is not None:
            measured = [dataclasses.asdict(result) for result in results]
            text = json.dumps({**found, "measured": measured}, indent=1)
            options.json.write_text(text + "\n", encoding="utf-8")
    return 1 if all(row.failure for result in results for row in result.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
