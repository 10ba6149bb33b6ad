"""`samestep generate`, `features`, `neighbors`, `label` and `fill`: uses of a trained model.

`samestep --help` imports this module, so each command imports its modules when it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from samestep.command import Commands, add_command
from samestep.errors import EXIT_DONE, ConfigError

_CHECKPOINT = (
    "a run (its newest checkpoint), RUN/best, or the folder or address of a step; or a Hugging "
    "Face folder or hf://NAME"
)

_GENERATION = {  # options of `samestep generate`: the settings of trainer.generation.config.Config
    "max_new_tokens": "maximum number of tokens (default: 128)",
    "min_new_tokens": "minimum number of tokens (default: 0)",
    "beams": "number of beams (default: 1, greedy decoding)",
    "length_penalty": "beam search: above 1 favors longer texts, below 1 shorter ones (default: 1)",
    "early_stopping": "beam search: true, false or never (default: false)",
    "temperature": "sampling temperature (default: 1)",
    "top_k": "sample from the K most likely tokens (default: all)",
    "top_p": "sample from the most likely tokens with this total probability (default: 1)",
    "seed": "seed of sampling (default: 0)",
    "batch_size": "number of texts generated together (default: 32)",
}


def _utf8(texts: Sequence[str], name: str) -> Sequence[str]:
    """Returns arguments as they are; rejects other bytes, of which Python makes surrogates.

    Raises:
        ConfigError: an argument is not UTF-8.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{name}: {text!r} is not UTF-8. Convert it, as with iconv."
            ) from error
    return texts


def register_generate(commands: Commands) -> None:
    """Adds `samestep generate`."""
    parser = add_command(
        commands,
        "generate",
        _generate,
        "generate texts: translate, summarize, or continue a prompt",
        "examples:\n"
        '  samestep generate runs/t5 --prefix "translate English to German: " --beams 4 \\\n'
        "    --input test.en --output translations.jsonl\n"
        '  samestep generate hf://gpt2 "Once upon a" --sample',
        "Generate texts: translate, summarize, or continue a prompt. Prints a line for each text.",
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help=_CHECKPOINT)
    add("text", nargs="*", help="texts (default: the lines of standard input)")
    add("--input", metavar="FILE", help='.txt or .jsonl ({"source": TEXT}), also compressed')
    add("--output", metavar="FILE", help="a new JSON Lines file with the source and text of each")
    add("--prefix", default="", help="prepended to each text, such as the name of a task for T5")
    add("--sample", action="store_true", help="sample instead of maximizing")
    # Options that are left out do not exist in `args`, so the settings' own defaults apply.
    for name, text in _GENERATION.items():
        add(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, metavar="X", help=text)


def _generate(args: argparse.Namespace) -> int:
    import yaml

    from samestep.config import decode
    from trainer.generation.config import Config
    from trainer.inference import generate
    from trainer.inference.hidden_states import read_texts

    # YAML turns "4", "true" and "never" into the types of the settings, as in a file.
    settings = {
        name: yaml.safe_load(getattr(args, name)) for name in _GENERATION if hasattr(args, name)
    }
    config: Config = decode(Config, {"sample": args.sample, **settings})
    if args.text and args.input:
        raise ConfigError(f"texts and --input {args.input} are both given; leave out one of them")
    # All texts of a file are read before the model is loaded: a bad line is found at once.
    texts = None
    if args.text:
        texts = list(generate.checked(args.text, "the texts given"))
    elif args.input:
        texts = list(read_texts(args.input, default="source", blank=True))
    (prefix,) = _utf8([args.prefix], "--prefix")
    generator = generate.TextGenerator(args.checkpoint, config, prefix)
    generate.write(generator, texts, args.output, config.batch_size)
    return EXIT_DONE


def register_features(commands: Commands) -> None:
    """Adds `samestep features`."""
    parser = add_command(
        commands,
        "features",
        _features,
        "write a frozen model's hidden states of texts as an array",
        "Rows are in the order of the texts. Special tokens that the model reads around a text\n"
        "count as its tokens. Several layers without --mix add a dimension: texts x layers x "
        "width.\n\n"
        "examples:\n"
        "  samestep features runs/bert_base reviews.txt --output reviews.npy\n"
        "  samestep features hf://google-bert/bert-base-uncased reviews.jsonl.zst \\\n"
        "    --field review --layers=-4,-3,-2,-1 --mix concat --pool none --output tokens.npy",
        "Write a frozen model's hidden states of texts as an array, float32 in NumPy's format.",
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help=_CHECKPOINT)
    add("file", metavar="FILE", help="texts, one a line, or .jsonl; also compressed")
    add("--output", required=True, metavar="FILE.npy", help="a new file")
    add("--field", metavar="NAME", help=".jsonl: key of the text (default: text)")
    add(
        "--layers",
        metavar="N[,N]",
        help="layers from 1, or from the last with -1, -2, ...; 0 is the embeddings; all includes "
        "0 (default: -1). Write --layers=-2,-1 when a list begins with a minus",
    )
    add(
        "--attentions",
        action="store_true",
        help="write the attention of each layer (default: all) and head instead, float32 "
        "[texts, layers, heads, S, S], and a heat map of the first texts to FILE.html; print how "
        "much goes to neighbors, special tokens and the same token elsewhere",
    )
    add("--mix", choices=("mean", "concat"), help="combine the vectors of several layers into one")
    add(
        "--pool",
        choices=("mean", "first", "last", "max", "weighted", "none"),
        help="combine the vectors of a text's tokens into one: their mean, the first ([CLS]), the "
        "last, the maximum, or a mean weighted by position, which counts token i i times; none "
        "keeps every token, all texts end to end, and writes where each text begins to "
        "FILE.offsets.npy (default: mean; a folder of sentence-transformers pools, normalizes and "
        "truncates as it says)",
    )
    add(
        "--batch-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="tokens computed at a time (default: 8192)",
    )


def _features(args: argparse.Namespace) -> int:
    from trainer.inference import attentions, features

    if args.batch_tokens < 1:
        raise ConfigError(f"--batch-tokens must be at least 1, not {args.batch_tokens}")
    if args.attentions:
        if args.mix or args.pool:
            raise ConfigError(
                "--attentions cannot be combined with --mix or --pool. Leave them out."
            )
        layers = args.layers or "all"
        attentions.run(
            args.checkpoint, args.file, args.field, Path(args.output), layers, args.batch_tokens
        )
        return EXIT_DONE

    features.run(
        args.checkpoint,
        args.file,
        args.field,
        Path(args.output),
        layers=args.layers or "-1",
        mix=args.mix,
        pool=args.pool,
        batch_tokens=args.batch_tokens,
    )
    return EXIT_DONE


def register_neighbors(commands: Commands) -> None:
    """Adds `samestep neighbors`."""
    parser = add_command(
        commands,
        "neighbors",
        _neighbors,
        "show the nearest neighbors of a word, alone and in its context",
        "Static neighbors are rows of the token embeddings. Contextual neighbors are words in\n"
        "texts, represented by the mean hidden state of their tokens: a word with several senses\n"
        "has different neighbors in each. Word vectors have static neighbors only.\n\n"
        "examples:\n"
        "  samestep neighbors vectors/skipgram bank\n"
        "  samestep neighbors runs/bert_base bank --vectors vectors/skipgram --in "
        '"they sat on the bank of the river" --corpus sentences.txt\n'
        "  samestep neighbors runs/bert_base bank --in "
        '"the bank of the river" "the bank lends money" "a river shore"',
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help=f"{_CHECKPOINT}; or a folder of `samestep vectors`")
    add("word", metavar="WORD", help="a word, or several consecutive words")
    add(
        "--in",
        dest="context",
        nargs="+",
        metavar="TEXT",
        help="required with a model: a text with the word; without --corpus, further texts to "
        "compare with",
    )
    add(
        "--vectors",
        metavar="FOLDER",
        help="also show the neighbors in this folder of `samestep vectors`",
    )
    add(
        "--corpus",
        metavar="FILE",
        help="texts to compare with, one a line, or .jsonl; also compressed",
    )
    add("--field", metavar="NAME", help=".jsonl: key of the text (default: text)")
    add(
        "--layer",
        type=int,
        metavar="N",
        help="layer of the contextual vectors, from 1, or from the last with -1, -2, ...; "
        "0 is the embeddings (default: -1)",
    )
    add(
        "--top",
        type=int,
        default=10,
        metavar="K",
        help="number of neighbors of each kind (default: 10)",
    )


def _neighbors(args: argparse.Namespace) -> int:
    from trainer.inference import neighbors
    from trainer.vectors.folder import is_folder

    if args.top < 1:
        raise ConfigError(f"--top must be at least 1, not {args.top}")
    if is_folder(args.checkpoint):
        for name in ("in", "corpus", "field", "layer", "vectors"):
            if getattr(args, "context" if name == "in" else name) is not None:
                raise ConfigError(
                    f"--{name} is given, and the word vectors of {args.checkpoint} know no "
                    f"context; leave it out, or name a model"
                )
        neighbors.show_static(args.checkpoint, args.word, args.top)
        return EXIT_DONE
    if args.context is None:
        raise ConfigError(
            f"{args.checkpoint} is not a folder of word vectors, so a context is needed; add --in "
            f"with a text that has the word {args.word!r}"
        )
    if args.field is not None and args.corpus is None:
        raise ConfigError(f"--field {args.field} needs --corpus; leave it out")
    (word,) = _utf8([args.word], "WORD")
    neighbors.show(
        args.checkpoint,
        word,
        _utf8(args.context, "--in"),
        args.corpus,
        args.field,
        -1 if args.layer is None else args.layer,
        args.top,
        args.vectors,
    )
    return EXIT_DONE


def register_label(commands: Commands) -> None:
    """Adds `samestep label`."""
    parser = add_command(
        commands,
        "label",
        _label,
        "label rows with the predictions of a fine-tuned model, for a student to learn from",
        "Each row is written with all its columns. The label column holds the probability of each\n"
        "class, or the predicted number. If it is stopped, the same command resumes.\n\n"
        "examples:\n"
        "  samestep label runs/sst2 reviews.jsonl.zst --output labeled.jsonl.zst\n"
        "  samestep label runs/mnli 'pairs/*.parquet' --texts premise hypothesis \\\n"
        "    --output labeled.jsonl.zst\n"
        "  samestep label runs/reranker rows.jsonl --passages --output scored.jsonl.zst",
    )
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="TEACHER",
        help="a run of objective classification, regression or ranking, or a step of it, its "
        "folder or address; a Hugging Face folder or hf://NAME",
    )
    add(
        "file",
        metavar="FILE",
        help="rows: .jsonl, .json, .csv, .tsv or .parquet, also compressed; a path, a pattern or "
        "an address",
    )
    add(
        "--output",
        required=True,
        metavar="FILE",
        help="a new file: .jsonl, .jsonl.gz or .jsonl.zst",
    )
    add(
        "--texts",
        nargs="+",
        metavar="TEXT",
        help="columns, or templates of columns (default: as in the teacher's data)",
    )
    help_ = (
        "score the query beside each passage: of columns query, positive and negatives, or --texts"
    )
    add("--passages", action="store_true", help=help_)
    add("--column", help="the label column (default: as in the teacher's data)")
    on_error = "stop at a row without these texts, or skip it (default: stop)"
    add("--on-error", choices=("stop", "skip"), default="stop", help=on_error)
    precision = "precision of matrix products (default: fp32)"
    add("--precision", choices=("fp32", "bf16"), default="fp32", help=precision)
    add(
        "--batch-tokens",
        type=int,
        default=16384,
        metavar="N",
        help="tokens computed at a time (default: 16384)",
    )


def _label(args: argparse.Namespace) -> int:
    from trainer.inference import label

    if args.batch_tokens < 1:
        raise ConfigError(f"--batch-tokens must be at least 1, not {args.batch_tokens}")
    label.run(
        args.checkpoint,
        args.file,
        Path(args.output),
        columns=label.Columns(tuple(args.texts or ()), args.column, args.passages),
        skip=args.on_error == "skip",
        precision=args.precision,
        batch_tokens=args.batch_tokens,
    )
    return EXIT_DONE


def register_augment(commands: Commands) -> None:
    """Adds `samestep augment`."""
    parser = add_command(
        commands,
        "augment",
        _augment,
        "copy rows with some words replaced, for a student to learn from (TinyBERT)",
        "A masked language model proposes words for the place of each word. Each row is written\n"
        "with all its columns, then its copies. If it is stopped, the same command resumes.\n\n"
        "example:\n"
        "  samestep augment runs/bert_base sst2/train.jsonl.zst --texts sentence --copies 20 \\\n"
        "    --output augmented.jsonl.zst",
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help=f"{_CHECKPOINT}, of a masked language model")
    add(
        "file",
        metavar="FILE",
        help="rows: .jsonl, .json, .csv, .tsv or .parquet, also compressed; a path, a pattern or "
        "an address",
    )
    add(
        "--output",
        required=True,
        metavar="FILE",
        help="a new file: .jsonl, .jsonl.gz or .jsonl.zst",
    )
    add("--texts", nargs="+", required=True, metavar="COLUMN", help="columns with the texts")
    add("--copies", type=int, default=20, metavar="N", help="copies of each row (default: 20)")
    add(
        "--probability",
        type=float,
        default=0.4,
        metavar="P",
        help="probability that a word is replaced in a copy (default: 0.4)",
    )
    add(
        "--candidates",
        type=int,
        default=15,
        metavar="K",
        help="words to choose from, the most likely ones (default: 15)",
    )
    add("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")
    add(
        "--batch-tokens",
        type=int,
        default=16384,
        metavar="N",
        help="tokens computed at a time (default: 16384)",
    )


def _augment(args: argparse.Namespace) -> int:
    from trainer.inference import augment

    if args.batch_tokens < 1:
        raise ConfigError(f"--batch-tokens must be at least 1, not {args.batch_tokens}")
    settings = augment.Settings(args.copies, args.probability, args.candidates, args.seed)
    augment.run(
        args.checkpoint,
        args.file,
        Path(args.output),
        tuple(args.texts),
        settings,
        args.batch_tokens,
    )
    return EXIT_DONE


def register_fill(commands: Commands) -> None:
    """Adds `samestep fill`."""
    parser = add_command(
        commands,
        "fill",
        _fill,
        "predict the masked words of a text",
        'examples:\n  samestep fill runs/bert_mini "the man went to the [MASK]"\n'
        '  samestep fill runs/gpt "the keys to the door [MASK] here" --candidates is are\n'
        "  samestep fill runs/bert_mini --probes probes.jsonl\n\n"
        "A line of probes.jsonl:\n"
        '  {"text": "the keys to the door [MASK] here.", "candidates": ["is", "are"], '
        '"label": "are"}',
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help=_CHECKPOINT)
    add("text", nargs="*", help="texts with [MASK] (or <mask>) in them")
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "--candidates",
        nargs="+",
        metavar="WORD",
        help="score only these words; one mask per text; left-to-right models allowed",
    )
    given.add_argument(
        "--probes",
        metavar="FILE",
        help="count how often the right word scores highest: JSON Lines with text, candidates, "
        "label and perhaps group",
    )
    add("--scores", metavar="FILE", help="with --probes: write the accuracies as JSON")
    add("--predictions", metavar="FILE", help="with --probes: write each prediction as JSON Lines")
    add(
        "--top",
        type=int,
        metavar="K",
        help="number of predictions for each mask (default: 5); not with --candidates or --probes",
    )


def _fill(args: argparse.Namespace) -> int:
    from trainer.inference.candidates import fill_candidates, run_probes
    from trainer.inference.fill import fill

    if bool(args.text) == (args.probes is not None):
        raise ConfigError("Give either texts or --probes FILE.")
    if args.probes is None and (args.scores or args.predictions):
        raise ConfigError(
            "--scores and --predictions need --probes FILE. Add it, or leave them out."
        )
    if args.top is not None and (args.candidates or args.probes is not None):
        raise ConfigError(
            f"--top {args.top} has no effect with --candidates or --probes. Leave it out."
        )
    texts = _utf8(args.text, "the texts")
    if args.probes is not None:
        run_probes(args.checkpoint, args.probes, args.scores, args.predictions)
    elif args.candidates:
        fill_candidates(args.checkpoint, texts, _utf8(args.candidates, "--candidates"))
    else:
        fill(args.checkpoint, texts, 5 if args.top is None else args.top)
    return EXIT_DONE
