"""Memory and traffic of whole training steps, from the TPUs' own compiler; needs no TPU.

    make test-tpu-compiler

For each row, `samestep train` runs on XLA's CPU back-end until XLA gets the graph of the step, with
forward pass, backward pass, clipping, update, shardings and donated buffers. libtpu compiles this
graph for a slice. What it needs of each chip stands beside `samestep plan`; an operation that TPUs
lack, or too little memory, is an error. Rows are kept in a file of JSON Lines, so the same command
goes on after an interruption.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from benchmarks import libtpu
from benchmarks.dataset import VOCAB_SIZE, write_dataset

ROOT = Path(__file__).parents[1]
MIB = 2**20


class Row(NamedTuple):
    """A step to compile.

    Attributes:
        recipe: below configs/pretrain.
        examples: of each chip.
        settings: besides those.
    """

    recipe: str
    examples: int
    settings: tuple[str, ...] = ()
    topology: str = "v5e:2x2"

    @property
    def name(self) -> str:
        return " ".join((self.recipe, str(self.examples), *self.settings, self.topology))

    @property
    def chips(self) -> int:
        return _chips(self.topology)

    def overrides(self) -> list[str]:
        """Settings of the run; the batch is one micro-batch."""
        batch = self.examples * self.chips
        return [
            f"training.micro_batch_size={self.examples}",
            f"training.global_batch_size={batch}",
            "phases=[]",
            "training.compile=false",  # of torch
            *self.settings,
        ]


ROWS = (
    Row("bert_base", 64),
    Row("bert_base", 16, ("data.sequence_length=512",)),
    Row("bert_base", 16, topology="v5e:4x4"),
    Row("bert_base", 64, topology="v6e:2x2"),
    Row("bert_large", 16),
    Row("roberta_base", 16),
    Row("electra_base", 32),
    Row("modernbert_base", 8),
    Row("gpt2_small", 8),
    Row("t5_base", 8),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", default="", help="rows whose names hold this text")
    add("--output", type=Path, default=Path("runs/tpu_compiler.jsonl"), help="a row a line")
    add("--dump", nargs=4, metavar=("HLO", "DATA", "OUTPUT", "NAME"), help=argparse.SUPPRESS)
    add("--compile", nargs=2, metavar=("HLO", "TOPOLOGY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    rows = [row for row in ROWS if args.only in row.name]
    if args.dump:
        (row,) = (each for each in ROWS if each.name == args.dump[3])
        dump(row, *map(Path, args.dump[:3]))
    if args.compile:
        print(json.dumps(compile_step(Path(args.compile[0]), args.compile[1])))
        return
    args.output.parent.mkdir(parents=True, exist_ok=True)
    done = read(args.output)
    for row in rows:
        if row.name not in done:
            print(f"compiling {row.name}", file=sys.stderr, flush=True)
            with args.output.open("a") as file:
                print(json.dumps({"name": row.name, **measure(row)}), file=file)
    found = read(args.output)
    print(table([(row, found[row.name]) for row in rows]))
    if failed := [row.name for row in rows if "error" in found[row.name]]:
        sys.exit(f"not compiled: {'; '.join(failed)}. Remove their lines to try again.")


def read(file: Path) -> dict[str, dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return {each["name"]: each for each in map(json.loads, lines)}


def measure(row: Row) -> dict[str, Any]:
    """Dumps and compiles a row, in separate processes."""
    python = os.environ["SAMESTEP_XLA_PYTHON"]
    common = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    with tempfile.TemporaryDirectory() as folder:
        graph, data = Path(folder) / "step.pb", Path(folder) / "data"
        sentinels = 100 if row.recipe.startswith("t5") else 0
        write_dataset(data, (2**14,) * 64, VOCAB_SIZE, sentinels, sentence=20)
        cpu = {
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(row.chips),
            "XLA_FLAGS": f"--xla_dump_to={folder}/dump --xla_dump_hlo_as_proto "
            "--xla_backend_optimization_level=0",
        }
        names = [str(graph), str(data), str(Path(folder) / "run"), row.name]
        command = [python, "-m", "benchmarks.tpu_compiler"]
        dumped = subprocess.run(
            [*command, "--dump", *names], env=common | cpu, capture_output=True, text=True
        )
        if not graph.exists():
            return {"error": f"no graph: {dumped.stderr[-2000:]}"}
        compiled = subprocess.run(
            [*command, "--compile", str(graph), row.topology],
            env=common | libtpu.variables(python, row.topology),
            capture_output=True,
            text=True,
        )
    if compiled.returncode:
        return {"error": compiled.stderr[-2000:]}
    found: dict[str, Any] = json.loads(compiled.stdout.splitlines()[-1])
    return found


def plan(row: Row) -> dict[str, float]:
    """Bytes of a chip by `samestep plan`: the state, all at the peak, and sent."""
    file = ROOT / "configs/pretrain" / f"{row.recipe}.yaml"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "samestep.cli", "plan", str(file)),
            *("--devices", str(row.chips), "--strategy", "fsdp", "--json"),
            *("accelerator=xla", "strategy=xla_spmd", *row.overrides()),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    (phase,) = json.loads(done.stdout)["phases"]
    of_run = phase["plans"][0]
    sent = sum(each["sent"] for each in of_run["collectives"])
    state = of_run["bytes"]["parameters"] + of_run["bytes"]["optimizer"]
    return {"state": state, "total": of_run["bytes"]["total"], "sent": sent}


def dump(row: Row, graph: Path, data: Path, output: Path) -> NoReturn:
    """Runs the row until XLA has the graph of its step, and copies that to `graph`."""
    from samestep.config import load
    from trainer.accelerators.kinds.xla import Config, XlaAccelerator
    from trainer.strategies.world import World
    from trainer.training.compose import build_trainer, open_checkpointer
    from trainer.training.experiment import Experiment

    place = Path(re.findall("xla_dump_to=([^ ]+)", os.environ["XLA_FLAGS"])[0])
    named, compiles = XlaAccelerator.graph, XlaAccelerator._compile
    current = ""

    def graphs() -> set[Path]:
        return set(place.glob("*before_optimizations.hlo.pb"))

    def wait(known: set[Path]) -> None:
        # The processor need not compile the step, nor compute it.
        while not (new := graphs() - known):
            time.sleep(0.05)
        size = -1
        while size != (size := new.copy().pop().stat().st_size) or not size:
            time.sleep(0.2)
        graph.write_bytes(new.pop().read_bytes())
        os._exit(0)

    @contextmanager
    def graph_of(self: XlaAccelerator, work: str) -> Iterator[None]:
        nonlocal current
        current = work
        with named(self, work):
            yield

    def compile_and_watch(self: XlaAccelerator) -> None:
        if current.split(" of ")[0] == "step":
            threading.Thread(target=wait, args=(graphs(),), daemon=True).start()
        compiles(self)

    for name, replaced in (("graph", graph_of), ("_compile", compile_and_watch)):
        setattr(XlaAccelerator, name, replaced)
    file = ROOT / "configs/pretrain" / f"{row.recipe}.yaml"
    settings = [f"data.path={data}", f"output={output}", "tracking=", "accelerator=xla"]
    experiment = load(Experiment, str(file), [*settings, "strategy=xla_spmd", *row.overrides()])
    world = World.start(60)
    world.connect("gloo")
    accelerator = Config().build()
    accelerator.platform = "tpu"  # takes the kernel of attention
    strategy = experiment.strategy.build(accelerator, world, experiment.training.precision)
    trainer = build_trainer(
        experiment, experiment.data.open(), strategy, open_checkpointer(experiment, world)
    )
    trainer.train_step(next(iter(trainer.loader)))
    sys.exit("the step has ended without a graph of that name")


def compile_step(graph: Path, topology: str) -> dict[str, float]:
    """What a chip needs for the graph of a step, in bytes."""
    began = time.monotonic()
    made = libtpu.compiled(_module(graph.read_bytes()), topology)
    memory = made.get_compiled_memory_stats()
    return {
        "seconds": time.monotonic() - began,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
        "needed": memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "sent": sent(made.hlo_modules()[0].to_string(), _chips(topology)),
    }


def _chips(topology: str) -> int:
    return math.prod(map(int, topology.split(":")[1].split("x")))


def _module(proto: bytes) -> bytes:
    """The first field of an HloProto, an HloModuleProto."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = proto[at]
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return value, at

    at = 0
    while True:
        tag, at = varint(at)
        size, at = varint(at)
        if tag == 10:  # field 1, of bytes
            return proto[at : at + size]
        at += size


_COLLECTIVE = re.compile(
    r"\s+(?:ROOT )?%\S+ = (.*?) "
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_SIZES = {"pred": 1, "bf16": 2}


def sent(hlo: str, chips: int) -> float:
    """Bytes that a chip sends in a step, by the ring algorithm.

    Rounds of a loop are the largest constant of its condition. An asynchronous collective has
    several pieces of one channel; a sum whose parts stay on the chips is a fusion that calls
    `all-reduce-scatter`.
    """
    bodies: dict[str, list[str]] = defaultdict(list)
    own = ""
    for line in hlo.splitlines():
        if line[:1] in ("%", "E") and line.endswith("{"):
            own = re.match(r"(?:ENTRY )?%?([^ (]+)", line)[1]  # type: ignore[index]
        elif line.startswith("  "):
            bodies[own].append(line)
    joined = {name: "\n".join(lines) for name, lines in bodies.items()}
    calls = {
        name: set(re.findall(r"(?:calls|to_apply|body|condition)=%([^,\s})]+)", body))
        for name, body in joined.items()
    }
    rounds: dict[str, int] = defaultdict(lambda: 1)

    def mark(name: str, times: int, seen: set[str]) -> None:
        if name not in seen:
            seen.add(name)
            rounds[name] = max(rounds[name], times)
            for other in calls.get(name, ()):
                mark(other, times, seen)

    for body in joined.values():
        for condition, inner in re.findall(
            r" while\(.*condition=%([^,\s]+), body=%([^,\s]+)", body
        ):
            texts = [joined[condition], *(joined[each] for each in calls[condition])]
            constants = [int(each) for each in re.findall(r"constant\((\d+)\)", "\n".join(texts))]
            mark(inner, max(constants, default=1), set())
    found: dict[str, tuple[str, int, int]] = {}
    for name, lines in bodies.items():
        for line in lines:
            if match := _COLLECTIVE.match(line):
                channel = re.search(r"channel_id=(\d+)", line)
                key = channel[1] if channel else line
                kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else match[2]
                times = rounds[name]
                if key in found:  # a piece may run beside the loop
                    times = min(times, found[key][2])
                    kind = found[key][0] if found[key][0] == "reduce-scatter" else kind
                found[key] = (kind, _bytes(match[1]), times)
    part = (chips - 1) / chips
    factors = {"all-reduce": 2 * part, "collective-permute": 1.0}
    return sum(size * times * factors.get(kind, part) for kind, size, times in found.values())


def _bytes(shape: str) -> int:
    shapes = re.findall(r"\b(pred|bf16|[suf]\d+)\[([\d,]*)\]", shape)
    return sum(
        math.prod(int(each) for each in dims.split(",") if each)
        * (_SIZES.get(kind) or int(kind[1:]) // 8)
        for kind, dims in shapes
    )


def table(rows: list[tuple[Row, dict[str, Any]]]) -> str:
    """A table of Markdown."""
    lines = [
        "| step | examples of a chip | slice | compiled in s | arguments MiB (plan) "
        "| peak MiB (plan) | reported MiB | sent MiB (plan) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, found in rows:
        name = " ".join((row.recipe, *row.settings))
        cells = [f"{name}", str(row.examples), row.topology]
        if "error" in found:
            message = re.findall("RESOURCE_EXHAUSTED[^\n]*|[^\n]+", found["error"])[-1]
            cells += [message[:200], *[""] * 4]
        else:
            planned = plan(row)
            arguments, peak, sent_ = (
                f"{found[own] / MIB:,.0f} ({planned[other] / MIB:,.0f})"
                for own, other in (("arguments", "state"), ("peak", "total"), ("sent", "sent"))
            )
            reported = f"{found['needed'] / MIB:,.0f}"
            cells += [f"{found['seconds']:.0f}", arguments, peak, reported, sent_]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
