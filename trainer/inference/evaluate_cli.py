"""The command `samestep evaluate`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from samestep import environment
from samestep.command import Commands, add_command, add_processes
from samestep.errors import EXIT_DONE, ConfigError
from trainer.inference.retrieval.cli import add_pooling, pooling_of

if TYPE_CHECKING:
    from samestep.config import Tree
    from trainer.inference.evaluate import Step
    from trainer.inference.retrieval.suite import Suite
    from trainer.metrics.per_class import ClassReport
    from trainer.training.experiment import Experiment

_METRICS = (  # trainer.metrics.texts.METRICS, which takes longer to import
    *("bleu", "bleu_intl", "chrf", "rouge_1", "rouge_2", "rouge_l", "rouge_lsum"),
    *("accuracy", "f1", "macro_f1", "matthews", "pearson", "spearman"),
    *("answer_exact_match", "answer_f1"),
)

_NEEDED = {
    **dict.fromkeys(("split", "measures", "rerank"), "retrieval"),
    "rerank_top": "rerank",
    "columns": "sts",
}
_OF_RUNS = (
    *("step", "predictions", "encoder", "ensemble", "generate", "metrics", "pairs", "limit"),
    "processes",
)
_POOLING = "--pool, --normalize, --max-length, --query-prompt and --document-prompt"


def register(commands: Commands) -> None:
    """Adds `evaluate` to the `samestep` command."""
    evaluate = add_command(
        commands,
        "evaluate",
        _evaluate,
        "score a run's newest checkpoint on the held-out documents",
        "examples:\n  samestep evaluate runs/bert_mini\n"
        "  samestep evaluate runs/bert_mini --encoder runs/mrpc    # what has it forgotten?\n"
        "  samestep evaluate runs/mrpc_0 --ensemble runs/mrpc_1 --ensemble runs/mrpc_2",
    )
    evaluate.add_argument("run_folder", metavar="RUN", help="the output folder of a run")
    evaluate.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that override the run's, e.g. data.path=DIR training.evaluate_batches=null",
    )
    evaluate.add_argument(
        "--step", metavar="N|best", help="the checkpoint to score (default: the newest)"
    )
    evaluate.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE",
        help="a new file for the predictions of a task's head, one line a row: .jsonl, .jsonl.gz "
        "or .jsonl.zst",
    )
    evaluate.add_argument(
        "--scores", type=Path, metavar="FILE", help="also write the scores to this file, as JSON"
    )
    evaluate.add_argument(
        "--encoder",
        metavar="CKPT",
        help="take all parameters except the heads from this checkpoint, such as a run fine-tuned "
        "from RUN: measures what it has forgotten",
    )
    evaluate.add_argument(
        "--ensemble",
        action="append",
        default=[],
        metavar="RUN",
        help="combine the predictions with this run's, of the same task; repeat it for more "
        "runs. The outputs are averaged (with --generate, the logits of each token); for tags, the "
        "runs vote",
    )
    generated = evaluate.add_argument_group(
        "scores of generated texts, instead of the loss (in one process)"
    )
    help_ = "generate texts, with these settings, such as beams=4"
    generated.add_argument("--generate", nargs="*", metavar="key=value", help=help_)
    help_ = f"out of: {', '.join(_METRICS)} (default: bleu chrf)"
    generated.add_argument(
        "--metrics",
        nargs="+",
        choices=_METRICS,
        metavar="METRIC",
        help=help_,
    )
    help_ = "files of pairs in the format of the run's dataset (default: its held-out split)"
    generated.add_argument("--pairs", nargs="+", metavar="FILE", default=[], help=help_)
    generated.add_argument("--limit", type=int, metavar="N", help="the first N pairs only")
    _add_embeddings(evaluate)
    add_pooling(evaluate)
    add_processes(evaluate)


def _add_embeddings(evaluate: argparse.ArgumentParser) -> None:
    embedded = evaluate.add_argument_group(
        "scores of embeddings; RUN may be any checkpoint, a Hugging Face folder or hf://NAME"
    )
    add = embedded.add_argument
    help_ = (
        "documents, queries and judgments in BEIR's layout: corpus.jsonl, queries.jsonl, qrels/; "
        "of several folders, also the mean"
    )
    add("--retrieval", type=Path, nargs="+", metavar="DIR", help=help_)
    add("--split", metavar="NAME", help="qrels/NAME.tsv (default: test)")
    help_ = "nDCG and others at k, such as ndcg@10 map@100 (default: six of them)"
    add("--measures", nargs="+", metavar="M@K", help=help_)
    help_ = (
        "also score the documents that are found by a model with one label that reads query and "
        "document together, and their new order"
    )
    add("--rerank", metavar="CKPT", help=help_)
    help_ = "documents of each query that are scored again (default: 100)"
    add("--rerank-top", type=int, metavar="K", help=help_)
    help_ = "rows with two texts and a score of their similarity: .jsonl, .csv, .tsv or .parquet"
    add("--sts", metavar="FILE", help=help_)
    help_ = "columns of --sts (default: sentence1 sentence2 score)"
    add("--columns", nargs=3, metavar="NAME", help=help_)


def _evaluate(args: argparse.Namespace) -> int:
    from samestep.cli import main
    from trainer.elastic import agent
    from trainer.elastic.cli import processes_to_start, worker_arguments
    from trainer.training.starting import stored_experiment

    for name, needed in _NEEDED.items():
        if getattr(args, name) is not None and not getattr(args, needed):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} needs --{needed}. Add it, or leave {option} out.")
    if args.retrieval or args.sts:
        return _evaluate_embeddings(args)
    if pooling_of(args):
        raise ConfigError(f"{_POOLING} need --retrieval or --sts. Add one, or leave them out.")
    if args.encoder and args.ensemble:
        raise ConfigError("--encoder and --ensemble cannot be combined. Leave one of them out.")
    folders = [args.run_folder, *args.ensemble]
    experiments = [stored_experiment(folder, args.overrides) for folder in folders]
    steps = [_step(args.step, experiment) for experiment in experiments]
    if args.generate is not None:
        from trainer.inference.evaluate import Member
        from trainer.inference.scores import evaluate as evaluate_texts

        for option in ("predictions", "encoder"):
            if getattr(args, option):
                raise ConfigError(
                    f"--{option} is for the predictions of a head, and --generate writes texts; "
                    "leave one out (samestep generate writes texts to a file)"
                )
        others = [Member(*each) for each in zip(experiments[1:], steps[1:], strict=True)]
        settings = (args.generate, args.metrics or ["bleu", "chrf"], args.pairs, args.limit, others)
        return _show_scores(evaluate_texts(experiments[0], steps[0], *settings), args.scores)
    for option in ("metrics", "pairs", "limit"):
        if getattr(args, option):
            raise ConfigError(f"--{option} needs --generate. Add it, or leave --{option} out.")
    processes = processes_to_start(args, experiments[0].accelerator)
    if processes > 1:
        given = ("step", "predictions", "scores", "encoder")
        flags = [f"--{name}={getattr(args, name)}" for name in given if getattr(args, name)]
        flags += [f"--ensemble={run}" for run in args.ensemble]
        return agent.run_workers(
            main, worker_arguments(args, "evaluate", args.run_folder, *flags), processes
        )
    if processes == 1:
        experiments = [experiment.in_one_process() for experiment in experiments]
    from trainer.inference.evaluate import Member, evaluate_in_detail

    others = [Member(*each) for each in zip(experiments[1:], steps[1:], strict=True)]
    found = evaluate_in_detail(experiments[0], steps[0], args.predictions, args.encoder, others)
    return _show_scores(found.scores, args.scores, found.classes)


def _evaluate_embeddings(args: argparse.Namespace) -> int:
    from trainer.inference.retrieval.scores import of_similarity

    if args.overrides:
        raise ConfigError("key=value does not go with --retrieval or --sts. Leave it out.")
    for name in _OF_RUNS:
        # --generate without a setting is [], and left out None.
        if getattr(args, name) not in (None, []) or (name == "generate" and args.generate == []):
            raise ConfigError(f"--{name} does not go with --retrieval or --sts. Leave it out.")
    pairs: dict[str, float] = {}
    suite = _suite(args) if args.retrieval else None
    if args.sts:
        *texts, column = args.columns or ("sentence1", "sentence2", "score")
        pairs = of_similarity(args.run_folder, args.sts, texts, column, pooling_of(args))
    if suite is None:
        return _show_scores(pairs, args.scores)
    only = suite.only
    if only is not None and only.reranked is None:
        return _show_scores({**only.size, **only.scores, **pairs}, args.scores)
    _write_scores({**(suite if only is None else only).tree(), **pairs}, args.scores)
    suite.show()
    _print_scores(pairs)
    suite.check()
    return EXIT_DONE


def _suite(args: argparse.Namespace) -> Suite:
    from trainer.inference.retrieval.suite import Evaluator
    from trainer.training.retrieval.measures import MEASURES

    top = 100 if args.rerank_top is None else args.rerank_top
    if top < 1:
        raise ConfigError(f"--rerank-top must be at least 1, not {top}")
    evaluator = Evaluator(
        args.run_folder, pooling_of(args), args.measures or MEASURES, args.rerank, top
    )
    return evaluator(args.retrieval, args.split or "test")


def _step(said: str | None, experiment: Experiment) -> Step:
    """Checks --step; None is the newest checkpoint."""
    if said is None or said.isdecimal():
        return None if said is None else int(said)
    if said != "best":
        raise ConfigError(f"--step is {said}. Use the number of a step, or best.")
    from trainer.checkpoint.meta import best_step
    from trainer.training.compose import checkpoint_folder

    if best_step(checkpoint_folder(experiment)) is None:
        raise ConfigError(
            f"{experiment.output} was trained without training.best; name a step by its number"
        )
    return "best"


def _show_scores(
    scores: Mapping[str, float], file: Path | None, classes: ClassReport | None = None
) -> int:
    if not environment.launcher_rank():
        _write_scores(
            {**scores, **({} if classes is None else {"per_class": classes.tree()})}, file
        )
        _print_scores(scores)
        if classes is not None:
            from samestep.terminal import Console
            from trainer.inference.class_tables import tables

            # After the scores and a blank line, where programs that read them may stop.
            console = Console()
            for table in tables(classes):
                console.print()
                console.print(table)
    return EXIT_DONE


def _write_scores(scores: Tree, file: Path | None) -> None:
    if file is not None:
        from samestep.storage import write_text

        write_text(file, json.dumps(scores) + "\n")


def _print_scores(scores: Mapping[str, float]) -> None:
    for name, value in scores.items():
        sys.stdout.write(f"{name:12} {value if isinstance(value, int) else f'{value:.6g}'}\n")
