"""Streams the batches of an experiment in a program of one's own.

    python examples/stream_batches.py configs/debug/demo.yaml data.path=datasets/python_docs

Options: --rank and --world-size read one rank's share of each global batch; --start-step begins
later, which takes no time; --steps ends after a number of steps.
"""

from __future__ import annotations

import argparse
import sys

import samestep


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Prints the batches of an experiment.")
    parser.add_argument("file", help="the experiment, a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--start-step", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args(arguments)

    experiment = samestep.load_experiment(args.file, args.overrides)
    tokenizer = samestep.open_dataset(experiment.data.paths[0]).tokenizer
    with samestep.open_batches(
        experiment, args.rank, args.world_size, start_step=args.start_step
    ) as batches:
        # A step is a list of micro-batches, each a dictionary of tensors with B rows.
        for micro_batches in batches:
            for batch in micro_batches:
                numbers = [number for number in batch["number"].tolist() if number >= 0]
                shapes = {name: tuple(batch[name].shape) for name in ("tokens", "labels")}
                print(f"step {batches.step}: examples {numbers}, {shapes}")  # noqa: T201
            if batches.step == args.start_step + args.steps:
                break
        print(tokenizer.decode(batch["tokens"][0].tolist()))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
