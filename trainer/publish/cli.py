"""`samestep publish`."""

from __future__ import annotations

import argparse

from trainer.command import Commands, add_command
from trainer.errors import EXIT_DONE


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
