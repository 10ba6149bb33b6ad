"""The whole job in a few minutes on a CPU.

Text -> tokenizer -> shards -> pre-training, killed and resumed -> export -> fine-tuning -> report.

Run with `make demo`. Every part is the ordinary `samestep` command. This file only types it, kills
it, and shows what came of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import plotext
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import samestep
from data_pipeline.reading.dataset import Dataset
from examples import wrong_words
from trainer.inference.fill import Candidate
from trainer.monitoring.jsonl import read_rows
from trainer.studies.finetune.suite import read_results

FOLDER = Path("demo")
RUN = FOLDER / "run"
DATA = "configs/data/python_docs.yaml"
EXPERIMENT = "configs/debug/demo.yaml"
TASK = "configs/tasks/tagging/wrong_words.yaml"
KILL_AFTER_STEP = 800

# Sentences, and the words that a reader would accept. Written before any model was trained.
CLOZE = {
    "if the file does not exist, an [MASK] is raised.": "exception error oserror ioerror",
    "return a list of [MASK] in the directory.": "files names filenames entries strings modules",
    "the second [MASK] is optional.": "argument parameter arg item form",
    "raises a [MASK] if the key is not found.": "keyerror valueerror error exception",
    "if the argument is [MASK], an empty string is returned.": "omitted none given empty missing",
    "return [MASK] if the object is a class.": "true false",
    "convert a string [MASK] an integer.": "to into as",
    "write the data [MASK] the file.": "to into",
    "this method is called [MASK] the server is started.": "when before after if once until",
    "the default [MASK] is none.": "value",
}
# What the README promises. The gain is the F1 score by pre-training minus the one without.
LEAST_SENTENCES, MOST_LOSS, LEAST_ACCURACY, LEAST_GAIN = 7, 4.0, 0.30, 0.10

console = Console(highlight=False)


def main() -> int:
    began = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    tokenizer = f"tokenizer.path={FOLDER / 'tokenizer'}"
    run("data", "tokenizer", DATA, tokenizer)
    run("data", "build", DATA, tokenizer, f"output={FOLDER / 'dataset'}")
    kill_at_step(start("train", EXPERIMENT, "--processes", "2"), KILL_AFTER_STEP)
    run("train", EXPERIMENT, "--processes", "3")
    run("ledger", "verify", str(RUN))
    run("evaluate", str(RUN), "objective.mask_fraction=0.15")
    wrong_words.write_rows(FOLDER / "rows")
    suite = str(FOLDER / "suite")
    run("finetune-suite", str(RUN), "--tasks", TASK, "--seeds", "1", "--scratch", "--output", suite)
    run("export", str(RUN), str(FOLDER / "exported"))
    run("report", str(RUN), "--output", str(FOLDER / "report.html"))

    pretrained, scratch = (result.scores for result in read_results(FOLDER / "suite").values())
    model = samestep.load_model(FOLDER / "exported")
    result = Result(
        filled=[model.fill(sentence, top=3)[0] for sentence in CLOZE],
        scores=list(read_rows(RUN / "scores.jsonl"))[-1],
        unigram_loss=unigram_loss(),
        pretrained_f1=pretrained["entity_f1"],
        scratch_f1=scratch["entity_f1"],
    )
    console.print()
    console.print(cloze_table(result))
    console.print(Text.from_ansi(loss_picture(result)))
    console.print(summary(result, time.monotonic() - began))
    if missed := list(missed_targets(result)):
        sys.exit(f"the demo fails: {'; '.join(missed)}")
    return 0


@dataclass(frozen=True)
class Result:
    """What the demo measured.

    Attributes:
        filled: the likeliest tokens of each sentence's mask.
        scores: of the held-out documents, at 15 % masks.
        unigram_loss: of the same documents, in nats.
        pretrained_f1: of the wrong words found by the fine-tuned model, 0 to 1.
        scratch_f1: the same, with random initial weights.
    """

    filled: list[list[Candidate]]
    scores: Mapping[str, float]
    unigram_loss: float
    pretrained_f1: float
    scratch_f1: float

    @property
    def accepted(self) -> list[bool]:
        """For each sentence, whether an acceptable word is among the first three."""
        return [
            any(candidate.token in words.split() for candidate in candidates)
            for words, candidates in zip(CLOZE.values(), self.filled, strict=True)
        ]


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Starts a samestep command as a user would type it."""
    shown = " ".join(repr(each) if " " in each else each for each in arguments)
    console.print(f"\n[bold cyan]$ samestep {shown}")
    return subprocess.Popen([str(Path(sys.executable).with_name("samestep")), *arguments])


def run(*arguments: str) -> None:
    """Runs a samestep command to its end."""
    if start(*arguments).wait() != 0:
        sys.exit(f"the demo fails, as samestep {arguments[0]} has failed")


def kill_at_step(agent: subprocess.Popen[bytes], step: int) -> None:
    """Kills all processes of a run, at once and without warning, when it has logged `step`."""
    while not any(row["step"] >= step for row in read_rows(RUN / "metrics.jsonl")):
        if agent.poll() is not None:
            sys.exit("the demo stops: training ended before it could be killed")
        time.sleep(0.2)
    processes = family(agent.pid)
    for process in processes:
        os.kill(process, signal.SIGKILL)
    agent.wait()
    console.print(f"\n[bold red]SIGKILL[/] to all {len(processes)} processes after step {step}")


def family(pid: int) -> list[int]:
    """Returns a process and its descendants: the command, its fork server, and their workers."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(process for child in children for process in family(int(child)))]


def unigram_loss() -> float:
    """Mean negative log likelihood of the held-out tokens by their frequency in training, nats."""
    dataset = Dataset.open(FOLDER / "dataset")
    counts = []
    for split in ("train", "heldout"):
        shards = [dataset.open_shard(info) for info in dataset.shards(split)]
        documents = [
            shard.tokens[start : start + length]
            for shard in shards
            for start, length in zip(shard.start, shard.length, strict=True)
        ]
        size = dataset.tokenizer.vocabulary.size
        counts.append(np.bincount(np.concatenate(documents), minlength=size))
    train, heldout = counts
    # Add-one smoothing, for tokens that training never saw.
    probability = (train + 1) / (train + 1).sum()
    return float(-(heldout * np.log(probability)).sum() / heldout.sum())


def cloze_table(result: Result) -> Table:
    title = "what the model fills in"
    table = Table("sentence", "likeliest words", "", title=title, title_justify="left", box=SIMPLE)
    for sentence, candidates, accepted in zip(CLOZE, result.filled, result.accepted, strict=True):
        words = ", ".join(f"{each.token} {each.probability:.0%}" for each in candidates)
        table.add_row(escape(sentence), words, "[green]✓" if accepted else "[red]✗")
    return table


def loss_picture(result: Result) -> str:
    """Draws the loss over steps, in characters."""
    rows = list(read_rows(RUN / "metrics.jsonl"))
    train, heldout = (
        zip(*((row["step"], row[name]) for row in rows if name in row), strict=True)
        for name in ("train/loss", "heldout/loss")
    )
    plotext.theme("clear")
    plotext.plotsize(min(console.width, 100), 16)
    plotext.title("loss in nats per masked token (30 % masks)")
    plotext.xlabel("step")
    plotext.plot(*train, marker="braille", label="training, killed and resumed")
    plotext.scatter(*heldout, marker="●", label="held-out documents")
    steps = [0, rows[-1]["step"]]
    plotext.plot(steps, 2 * [result.unigram_loss], marker="-", label="by frequency of words")
    return str(plotext.build())


def summary(result: Result, seconds: float) -> Table:
    speeds = sorted(
        row["perf/tokens_per_second"]
        for row in read_rows(RUN / "metrics.jsonl")
        if "perf/tokens_per_second" in row
    )
    table = Table(show_header=False, title="the run", title_justify="left")
    table.add_row(
        "held-out loss (15 % masks)",
        f"{result.scores['heldout/loss']:.2f} nats; by frequency {result.unigram_loss:.2f}",
    )
    table.add_row("masked words guessed right", f"{result.scores['heldout/accuracy']:.0%}")
    table.add_row("sentences filled well", f"{sum(result.accepted)} of {len(CLOZE)}")
    table.add_row(
        "wrong words found (F1)",
        f"{100 * result.pretrained_f1:.0f} after pre-training, "
        f"{100 * result.scratch_f1:.0f} from random weights",
    )
    table.add_row("tokens a second (median)", f"{speeds[len(speeds) // 2]:,.0f}")
    table.add_row("time, all steps together", f"{seconds:.0f} s")
    table.add_row("page with curves and settings", str(FOLDER / "report.html"))
    table.add_row("model for transformers", str(FOLDER / "exported"))
    return table


def missed_targets(result: Result) -> Iterator[str]:
    """Yields what falls short of the README's promises."""
    if sum(result.accepted) < LEAST_SENTENCES:
        yield f"fewer than {LEAST_SENTENCES} of {len(CLOZE)} sentences are filled well"
    if result.scores["heldout/loss"] > MOST_LOSS:
        yield f"the held-out loss is above {MOST_LOSS} nats"
    if result.scores["heldout/accuracy"] < LEAST_ACCURACY:
        yield f"fewer than {LEAST_ACCURACY:.0%} of the masked words are right"
    if result.pretrained_f1 < result.scratch_f1 + LEAST_GAIN:
        yield f"pre-training adds less than {LEAST_GAIN:.0%} F1"


if __name__ == "__main__":
    sys.exit(main())
