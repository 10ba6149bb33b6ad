"""What parameter-efficient fine-tuning costs and yields, beside full fine-tuning, on tasks of one's
own.

    python -m benchmarks.peft sst2.yaml mrpc.yaml [key=value ...]

Each file is an experiment with `init_from` (docs/peft.md); each method fine-tunes it in a process
of its own, on one device, from the same weights and with the same batches. Memory is the most that
the accelerator's allocator held or, on a CPU, the most resident memory of the process, libraries
included.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from trainer.training.compose import build_trainer, open_checkpointer, open_strategy
from trainer.training.starting import load_experiment

# with learning rates of the size that each is known to need in models as large as BERT-base
METHODS = {
    "full": (3e-5, "model.peft=null"),
    "head": (1e-4, "frozen=[embeddings, layers]"),
    "lora": (4e-4, "model.peft={kind: lora, rank: 8, targets: [query, value]}"),
    "lora, all": (4e-4, "model.peft={kind: lora, targets: [query, key, value, out, up, down]}"),
    "adapters": (4e-4, "model.peft={kind: adapters, width: 64}"),
    "prefix": (5e-3, "model.peft={kind: prefix, length: 20}"),
    "prompt": (1e-2, "model.peft={kind: prompt, length: 20}"),
}


def work(file: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Fine-tunes, and returns what it took and the scores on the held-out rows."""
    experiment = load_experiment(file, ["strategy=single", *overrides])
    with open_strategy(experiment) as strategy:
        checkpointer = open_checkpointer(experiment, strategy.world)
        dataset = experiment.data.open()
        strategy.accelerator.reset_peak_memory()
        trainer = build_trainer(experiment, dataset, strategy, checkpointer, experiment.init_from)
        began = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - began
        peak = strategy.accelerator.peak_memory()
        if peak is None:
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        state = [value for each in trainer.optimizer.state.values() for value in each.values()]
        sizes = [
            parameter.numel()
            for parameter in strategy.parameters.values()
            if parameter.requires_grad
        ]
        last = experiment.resolved_phases()[-1]
        found = {
            "trained": sum(sizes),
            "optimizer": sum(value.nbytes for value in state if value.numel() > 1),
            "peak": peak,
            "seconds": seconds,
            "checkpoint": _size(Path(experiment.output) / "checkpoints"),
            "scores": trainer.evaluate(last),
        }
        trainer.close()
    return found


def _size(folder: Path) -> int:
    """The bytes of the newest checkpoint."""
    newest = max(folder.glob("step-*"))
    return sum(file.stat().st_size for file in newest.iterdir())


def measure(
    file: str, method: str, args: argparse.Namespace, overrides: Sequence[str]
) -> dict[str, Any]:
    """Runs a method with each seed: the median of each score, and the costs of the last run."""
    lr, added = METHODS[method]
    settings = [f"optimizer.lr={lr * args.rates}", added, "training.evaluate_every=null"]
    runs = [
        run(file, method, [*settings, f"seed={seed}", *overrides]) for seed in range(args.seeds)
    ]
    names = runs[0]["scores"]
    return {
        **runs[-1],
        "scores": {
            name: statistics.median(each["scores"][name] for each in runs) for name in names
        },
    }


def run(file: str, method: str, settings: Sequence[str]) -> dict[str, Any]:
    """Runs a method in a process of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        result = Path(temporary) / "result.json"
        output = f"output={temporary}/run"
        command = [
            sys.executable,
            "-m",
            "benchmarks.peft",
            file,
            output,
            *settings,
            "--result",
            str(result),
        ]
        if subprocess.run(command).returncode:
            raise SystemExit(f"{method} failed on {file}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """The methods, one a line, as Markdown."""
    names = [
        name for name, value in next(iter(found.values()))["scores"].items() if math.isfinite(value)
    ]
    heading = [
        "method",
        *names,
        "trained parameters",
        "optimizer, MB",
        "peak memory, MB",
        "checkpoint, MB",
        "seconds",
    ]
    lines = [f"| {' | '.join(heading)} |", f"|---{(len(heading) - 1) * '|---:'}|"]
    for method, each in found.items():
        cells = [method, *(f"{each['scores'][name]:.4f}" for name in names), f"{each['trained']:,}"]
        cells += [f"{each[name] / 1e6:,.1f}" for name in ("optimizer", "peak", "checkpoint")]
        cells.append(f"{each['seconds']:,.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="experiments; key=value: settings of all of them"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--rates",
        type=float,
        default=1,
        help="learning rates times this: 10 for models of width 256",
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs of each method, whose median scores are printed"
    )
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(given)
    files, overrides = (
        [each for each in args.files if ("=" in each) == is_setting] for is_setting in (False, True)
    )
    if args.result:
        Path(args.result).write_text(json.dumps(work(files[0], overrides)))
        return
    print(f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}")
    for file in files:
        print(f"\n{file}\n")
        print(
            table({method: measure(file, method, args, overrides) for method in args.methods}),
            flush=True,
        )


if __name__ == "__main__":
    main()
