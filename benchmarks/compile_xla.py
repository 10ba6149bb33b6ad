"""How long XLA compiles a training step of BERT, by its number of layers, with layers as a loop and
written out.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python -m benchmarks.compile_xla

Runs where torch-xla is installed. Each step is compiled in a process of its own, for the devices of
that machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.dataset import VOCAB_SIZE, write_dataset
from samestep.config import load
from trainer.accelerators.kinds import xla
from trainer.strategies.world import World
from trainer.training.compose import build_trainer, open_checkpointer
from trainer.training.experiment import Experiment

LAYERS = (4, 12, 24)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--width", type=int, default=128, help="of hidden states; heads are 64 wide"
    )
    parser.add_argument(
        "--one", nargs=3, metavar=("FOLDER", "LAYERS", "SCAN"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.one is not None:
        compile_one(Path(args.one[0]), int(args.one[1]), args.one[2], args.width)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder) / "dataset", (2**14,) * 16)
        for scan in ("true", "false"):
            for layers in LAYERS:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.compile_xla",
                    "--width",
                    str(args.width),
                ]
                done = subprocess.run(
                    [*command, "--one", folder, str(layers), scan],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                print(
                    f"scan_layers={scan}, {layers} layers: {done.stdout.splitlines()[-1]}",
                    flush=True,
                )


def compile_one(folder: Path, layers: int, scan: str, width: int) -> None:
    """Takes one step, and prints what compiling its graph took."""
    from torch_xla.debug import metrics

    file = folder / "experiment.yaml"
    file.write_text(
        f"""
output: {folder}/run-{layers}-{scan}
strategy: {{kind: xla_spmd, scan_layers: {scan}}}
data: {{path: {folder}/dataset, sequence_length: 128, lanes: 4}}
model: {{kind: bert, vocab_size: {VOCAB_SIZE}, layers: {layers}, width: {width}, heads: {width // 64},
  ffn_width: {4 * width}, attention_dropout: 0.0}}
objective: {{kind: mlm}}
optimizer: {{kind: adamw}}
training: {{steps: 1, global_batch_size: 8, micro_batch_size: 2}}
"""  # noqa: E501
    )
    experiment = load(Experiment, str(file), [])
    world = World.start(60)
    world.connect("gloo")
    strategy = experiment.strategy.build(xla.Config().build(), world, "fp32")
    trainer = build_trainer(
        experiment, experiment.data.open(), strategy, open_checkpointer(experiment, world)
    )
    before = metrics.metric_data("CompileTime")[1]
    trainer.train_step(next(iter(trainer.loader)))
    trainer.close()
    print(f"{(metrics.metric_data('CompileTime')[1] - before) / 1e9:.1f} s")


if __name__ == "__main__":
    main()
