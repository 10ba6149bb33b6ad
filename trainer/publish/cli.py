"""The commands `samestep export`, `publish` and `average`."""

from __future__ import annotations

import argparse
from pathlib import Path

from samestep.command import Commands, add_command
from samestep.errors import EXIT_DONE


def register_publish(commands: Commands) -> None:
    """Adds `samestep publish`."""
    parser = add_command(
        commands,
        "publish",
        _publish,
        "push the checkpoints of a run to the Hugging Face Hub",
        "Each checkpoint is exported and becomes a revision of a model repository, step-000100;\n"
        "step-000000 is the model before training, and main the newest. Revisions that are there\n"
        "already are left out, so the same command continues, and adds later checkpoints.\n"
        "Needs a token with write rights: `hf auth login`, or HF_TOKEN.\n\n"
        "example:\n  samestep publish runs/bert_mini ada/bert_mini --private",
    )
    add = parser.add_argument
    add("source", metavar="RUN", help="a run, or the folder or address of its checkpoints")
    add("repository", metavar="REPO", help="OWNER/NAME; created if there is none")
    add(
        "--revisions",
        choices=("all", "last", "best"),
        default="all",
        help="all checkpoints and step 0 (the default), the last one, or the best one",
    )
    add("--private", action="store_true", help="make a new repository private")
    add("--dry-run", action="store_true", help="only print what would be pushed")


def _publish(args: argparse.Namespace) -> int:
    from trainer.publish.hub import publish

    publish(args.source, args.repository, args.revisions, args.private, args.dry_run)
    return EXIT_DONE


def register_export(commands: Commands) -> None:
    """Adds `samestep export`."""
    export = add_command(
        commands,
        "export",
        _export,
        "write a checkpoint as a Hugging Face folder",
        "example:\n  samestep export runs/bert_mini exported/bert_mini",
    )
    export.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="a run (its newest checkpoint), RUN/best, or a step's folder or address; or hf://NAME",
    )
    export.add_argument("folder", metavar="DIR", help="the folder to write")
    export.add_argument(
        "--scores",
        nargs="+",
        type=Path,
        metavar="FILE",
        default=[],
        help="files of samestep evaluate --scores, which become tables of the model card",
    )
    instead = export.add_mutually_exclusive_group()
    instead.add_argument(
        "--adapter",
        action="store_true",
        help="export only the adapter of a model with model.peft, in the format of the peft "
        "library",
    )
    instead.add_argument(
        "--part",
        metavar="NAME",
        help="export one part of the model: generator (ELECTRA, DeBERTa-v3)",
    )


def _export(args: argparse.Namespace) -> int:
    from trainer.publish.export import export, export_adapter

    if args.adapter:
        export_adapter(args.checkpoint, args.folder, args.scores)
    else:
        export(args.checkpoint, args.folder, args.part, scores=args.scores)
    return EXIT_DONE


def register_average(commands: Commands) -> None:
    """Adds `samestep average`."""
    average = add_command(
        commands,
        "average",
        _average,
        "average the weights of a run's last checkpoints",
        "The new folder can be evaluated, exported and started from like a run.\n\n"
        "examples:\n"
        "  samestep train configs/debug/bert_mini.yaml checkpoint.keep_last=4\n"
        "  samestep average runs/bert_mini runs/bert_mini_average --last 4",
    )
    average.add_argument(
        "source", metavar="RUN", help="a run, or the folder or address of its checkpoints"
    )
    average.add_argument("folder", metavar="DIR", help="the folder to write")
    average.add_argument(
        "--last",
        type=int,
        metavar="N",
        default=5,
        help="number of newest checkpoints (default: 5); a run keeps 2 by default: "
        "checkpoint.keep_last",
    )
    average.add_argument(
        "--decay",
        type=float,
        metavar="D",
        help="exponential average: the weight of each checkpoint is D times the next one's "
        "(default: equal weights)",
    )


def _average(args: argparse.Namespace) -> int:
    from trainer.publish.average import average

    average(args.source, args.folder, args.last, args.decay)
    return EXIT_DONE
