"""The command `samestep certify`."""

from __future__ import annotations

import argparse
from pathlib import Path

from samestep import environment
from samestep.command import Commands, add_command, add_processes
from samestep.errors import EXIT_DONE, EXIT_FAILED, ConfigError


def register(commands: Commands) -> None:
    """Adds `certify` to the `samestep` command."""
    certify = add_command(
        commands,
        "certify",
        _certify,
        "prove that the devices here compute the same bits, or name the one that does not",
        "examples:\n  samestep certify\n"
        "  samestep certify --processes 4 --against one.json\n"
        "  torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29400 "
        "--no-python samestep certify",
        "Checks matrix products, kernels and the passes of a model on each device, the collectives "
        "between them, and training under DDP, FSDP2 and HSDP, in fp32 and bf16: bit for bit among "
        "ranks and strategies, and against losses of a CPU. Takes a minute. Exits with 1 if a "
        "check fails.",
    )
    add_processes(certify, without_gpus="two")
    certify.add_argument(
        "--output",
        type=Path,
        default=Path("certificate.json"),
        metavar="FILE",
        help="the certificate to write (default: certificate.json)",
    )
    certify.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="a certificate of any number of devices, whose bits must be the same",
    )


def _certify(args: argparse.Namespace) -> int:
    from samestep.cli import main
    from samestep.terminal import Console
    from trainer.accelerators import detect
    from trainer.elastic import agent
    from trainer.inspect.certify.run import certify, read

    if args.processes is not None and args.processes < 1:
        raise ConfigError(f"--processes is {args.processes}. Use 1 or more.")
    arguments = ["certify", "--output", str(args.output)]
    if args.against is not None:
        read(args.against)
        arguments += ["--against", str(args.against)]
    processes = args.processes or detect.gpu_count() or 2
    if processes > 1 and environment.launcher_rank() is None:
        return agent.run_workers(main, arguments, processes)
    has_passed = certify(args.output, args.against, Console(highlight=False, markup=False))
    return EXIT_DONE if has_passed else EXIT_FAILED
