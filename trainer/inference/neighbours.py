"""`samestep neighbours`: which words a model takes for like a word, by themselves and where they stand."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.command import Commands, add_command
from trainer.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from data_pipeline.format.shards import Tokens
    from trainer.inference.hidden_states import TextEncoder

Int64: TypeAlias = npt.NDArray[np.int64]

_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
_READ = 1024  # texts of which the words are compared at a time
_CELLS = 8192  # of a batch
_SHOWN = 36  # characters of a sentence on either side of the word


def register(commands: Commands) -> None:
    """Adds `neighbours` to the `samestep` command."""
    parser = add_command(
        commands,
        "neighbours",
        _run,
        "show the nearest neighbours of a word, by itself and in its context",
        "Static neighbours are rows of the table of token embeddings. Contextual ones are words in texts, by the mean\n"
        "of the hidden states of their tokens: a word with several senses has others in each.\n\n"
        "examples:\n"
        '  samestep neighbours runs/bert_base bank --in "they sat on the bank of the river" --corpus sentences.txt\n'
        '  samestep neighbours runs/bert_base bank --in "the bank of the river" "the bank lends money" "a river shore"',
    )
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="a run or a step, its folder or address; a Hugging Face folder or hf://NAME",
    )
    parser.add_argument("word", metavar="WORD", help="a word, or several in a row")
    parser.add_argument(
        "--in",
        dest="context",
        nargs="+",
        required=True,
        metavar="TEXT",
        help="a text with the word, and more that it is compared with where there is no --corpus",
    )
    parser.add_argument(
        "--corpus",
        metavar="FILE",
        help="texts to compare with, one a line, or .jsonl; also .gz, .zst",
    )
    parser.add_argument(
        "--field", metavar="NAME", help="of .jsonl: the key of the text (default: text)"
    )
    parser.add_argument(
        "--layer",
        type=int,
        default=-1,
        metavar="N",
        help="of contextual vectors, from 1, or -1 and so on from the last; 0 is the embeddings (default: -1)",
    )
    parser.add_argument(
        "--top", type=int, default=10, metavar="K", help="neighbours of either kind (default: 10)"
    )


def _run(args: argparse.Namespace) -> int:
    from trainer.inference.hidden_states import TextEncoder, read_texts

    if args.top < 1:
        raise ConfigError(f"--top must be at least 1, not {args.top}")
    if args.field is not None and args.corpus is None:
        raise ConfigError(
            f"--field {args.field} is of the texts of --corpus, and there is none; leave it out"
        )
    place = find(args.word, args.context[0])
    corpus = iter(args.context) if args.corpus is None else read_texts(args.corpus, args.field)
    encoder = TextEncoder(args.checkpoint)
    layer = encoder.layer(args.layer, "--layer")
    query = Query.of(encoder, args.context[0], place, layer)
    console = Console(highlight=False)
    spelled = " ".join(map(encoder.tokenizer.token, query.pieces))
    console.print(Text(f"{args.word} by itself, as the model spells it: {spelled}"))
    console.print(_static_table(encoder, static(encoder, query.pieces, args.top)))
    console.print(Text(f"{args.word} where it stands, by layer {layer} of {encoder.layers}"))
    console.print(_contextual_table(contextual(encoder, query, corpus, layer, args.top)))
    return EXIT_DONE


def find(word: str, text: str) -> tuple[int, int]:
    """The first place (begin, end) of a word in a text, in the same letters if possible, else in others' case.

    Raises:
        ConfigError: the word is not in the text.
    """
    pattern = rf"(?<!\w){re.escape(word)}(?!\w)"
    found = re.search(pattern, text) or re.search(pattern, text, re.IGNORECASE)
    if not word.strip() or found is None:
        raise ConfigError(
            f"the word {word!r} is not in the text {text!r}; give a text with it to --in"
        )
    return found.span()


@dataclass(frozen=True)
class Query:
    """The word whose neighbours are looked for.

    Attributes:
        text: in which it stands.
        begin, end: its characters.
        pieces: its tokens.
        vector: fp32 [D], the mean of their hidden states, of length 1.
    """

    text: str
    begin: int
    end: int
    pieces: tuple[int, ...]
    vector: Tensor

    @classmethod
    def of(cls, encoder: TextEncoder, text: str, place: tuple[int, int], layer: int) -> Query:
        """The query for a word at a `place` of a text.

        Raises:
            ConfigError: the text is cut before the word, which has no token.
        """
        ((tokens, spans),) = encoder.tokenizer.encode_aligned([text])
        cells = np.flatnonzero(_words_of(spans, np.array([place])) == 0)
        word = text[slice(*place)]
        if not len(cells):
            raise ConfigError(f"the tokenizer has no token for {word!r}; choose another word")
        if cells[-1] >= encoder.longest:
            raise ConfigError(
                f"{word!r} ends with token {cells[-1] + 1} of the text, of which the model reads {encoder.longest}; "
                "shorten the text before it"
            )
        _, states = encoder([encoder.prepare(tokens)], [layer])
        vector = states[layer][0, encoder.first + cells].mean(0)
        return cls(text, *place, tuple(tokens[cells].tolist()), vector / vector.norm())


def static(encoder: TextEncoder, pieces: Sequence[int], top: int) -> list[tuple[float, int]]:
    """The cosines and ids of the tokens nearest to the mean of some, without these and special ones."""
    import torch

    table = encoder.table
    unit = table / table.norm(dim=1, keepdim=True).clamp(min=torch.finfo(table.dtype).tiny)
    vector = table[list(pieces)].mean(0)
    cosines = unit @ (vector / vector.norm())
    vocabulary = encoder.tokenizer.vocabulary
    cosines[[*pieces, *vocabulary.special, *vocabulary.sentinels]] = -torch.inf
    found, ids = cosines.topk(min(top, len(cosines)))
    return [(c, i) for c, i in zip(found.tolist(), ids.tolist(), strict=True) if c > -torch.inf]


@dataclass(frozen=True)
class Neighbour:
    """A word in a text, and how near it is."""

    cosine: float
    text: str
    begin: int
    end: int


def contextual(
    encoder: TextEncoder, query: Query, texts: Iterator[str], layer: int, top: int
) -> list[Neighbour]:
    """The words of texts nearest to the query, the nearest first; a text that comes again counts once."""
    from trainer.inference.hidden_states import batches

    best: dict[tuple[str, int], Neighbour] = {}
    cut = count = 0
    while read := list(islice(texts, _READ)):
        block = list(dict.fromkeys(read))
        encoded = encoder.tokenizer.encode_aligned(block)
        count += len(block)
        cut += sum(len(tokens) > encoder.longest for tokens, _ in encoded)
        sentences = [
            _Sentence.of(encoder, text, *found) for text, found in zip(block, encoded, strict=True)
        ]
        for numbers in batches(np.array([len(sentence.tokens) for sentence in sentences]), _CELLS):
            near = _nearest(encoder, query, [sentences[number] for number in numbers], layer, top)
            best |= {(each.text, each.begin): each for each in near}
        best = dict(sorted(best.items(), key=lambda item: -item[1].cosine)[:top])
    encoder.warn_of_cut(cut, count)
    if not best:
        raise ConfigError(
            "there is no other word to compare with; give more texts to --in, or a file to --corpus"
        )
    return list(best.values())


@dataclass(frozen=True)
class _Sentence:
    """A text as the model reads it, with its words: int64 [W, 2], characters; and that of each token, or -1."""

    text: str
    tokens: Tokens
    words: Int64
    word_of: Int64

    @classmethod
    def of(cls, encoder: TextEncoder, text: str, tokens: Tokens, spans: Int64) -> _Sentence:
        words = np.array([match.span() for match in _WORD.finditer(text)], dtype=np.int64).reshape(
            -1, 2
        )
        return cls(text, encoder.prepare(tokens), words, _words_of(spans, words)[: encoder.longest])


def _words_of(spans: Int64, words: Int64) -> Int64:
    """Which word each token is of: its characters int64 [T, 2], those of words [W, 2] -> int64 [T], -1 for none."""
    begin, end = spans.T
    word = np.searchsorted(
        words[:, 1], begin, side="right"
    )  # the first that ends behind the token's begin
    word_begin = np.append(words[:, 0], np.iinfo(np.int64).max)[word]
    return np.where((word_begin < end) & (begin < end), word, -1)


def _nearest(
    encoder: TextEncoder, query: Query, sentences: Sequence[_Sentence], layer: int, top: int
) -> list[Neighbour]:
    """The nearest words of a batch, but for the query's own."""
    import torch

    first = np.cumsum(
        [0, *(len(sentence.words) for sentence in sentences)]
    )  # words are counted through the batch
    row = np.repeat(np.arange(len(sentences)), [len(sentence.word_of) for sentence in sentences])
    cell = np.concatenate(
        [encoder.first + np.arange(len(sentence.word_of)) for sentence in sentences]
    )
    word = np.concatenate([sentence.word_of for sentence in sentences])
    row, cell, word = row[word >= 0], cell[word >= 0], word[word >= 0]
    word = word + first[row]
    words = np.concatenate([sentence.words for sentence in sentences])
    sentence_of = np.repeat(np.arange(len(sentences)), np.diff(first))
    own = np.array([sentence.text == query.text for sentence in sentences])[sentence_of]
    usable = ~(own & (words[:, 0] < query.end) & (words[:, 1] > query.begin))
    usable &= np.bincount(word, minlength=len(words)) > 0  # others lie behind the cut
    if not usable.any():
        return []
    _, states = encoder([sentence.tokens for sentence in sentences], [layer])
    hidden = states[layer]
    sums = hidden.new_zeros(len(words), hidden.shape[2])
    sums.index_add_(0, torch.from_numpy(word).to(hidden.device), hidden[row, cell])
    cosines = torch.nn.functional.cosine_similarity(
        sums, query.vector[None]
    ).cpu()  # as of the mean
    cosines[torch.from_numpy(~usable)] = -torch.inf
    found, numbers = cosines.topk(min(top, int(usable.sum())))
    return [
        Neighbour(cosine, sentences[sentence_of[number]].text, *words[number].tolist())
        for cosine, number in zip(found.tolist(), numbers.tolist(), strict=True)
    ]


def _static_table(encoder: TextEncoder, neighbours: Sequence[tuple[float, int]]) -> Table:
    tokenizer, table = encoder.tokenizer, Table("cosine", "token")
    for cosine, token in neighbours:
        table.add_row(
            f"{cosine:.3f}", Text(tokenizer.decode([token]).strip() or tokenizer.token(token))
        )
    return table


def _contextual_table(neighbours: Sequence[Neighbour]) -> Table:
    table = Table("cosine", "word", "text")
    for each in neighbours:
        word = each.text[each.begin : each.end]
        before, after = each.text[: each.begin], each.text[each.end :]
        before = before if len(before) <= _SHOWN else f"…{before[-_SHOWN:]}"
        after = after if len(after) <= _SHOWN else f"{after[:_SHOWN]}…"
        text = Text.assemble(
            " ".join(before.splitlines()), (f"[{word}]", "bold"), " ".join(after.splitlines())
        )
        table.add_row(f"{each.cosine:.3f}", Text(word), text)
    return table
