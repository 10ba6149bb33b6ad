"""`samestep neighbors`: nearest neighbors of a word in embedding space, alone and in context."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from samestep.errors import ConfigError
from samestep.terminal import Console
from trainer.inference.hidden_states import TextEncoder, read_texts
from trainer.models.text_inputs import batches
from trainer.vectors.corpus import MARKS, WORD
from trainer.vectors.folder import WordVectors, nearest

Int64: TypeAlias = npt.NDArray[np.int64]

_TEXTS_AT_A_TIME = 1024
_BATCH_TOKENS = 8192
_CONTEXT = 36  # characters of a sentence shown on either side of the word


def show(
    checkpoint: str,
    word: str,
    context: Sequence[str],
    corpus: str | None,
    field: str | None,
    layer: int,
    top: int,
    vectors: str | None = None,
) -> None:
    """Prints the `top` static and contextual neighbors of a word.

    Args:
        checkpoint: see `trainer.training.weights.loading.load_weights`.
        word: a word, or several consecutive words.
        context: texts; the first one contains the word.
        corpus: a file of texts to compare with; None compares with the texts of `context`.
        field: the key of the text in a `.jsonl` corpus; None is "text".
        layer: of the contextual vectors, from 0 (the embeddings); -1 is the last one.
        top: number of neighbors of each kind.
        vectors: a folder of word vectors, for a separate list; None for none.

    Raises:
        ConfigError: the word is not in the first text, or there is nothing to compare it with.
        DataError: there are no such vectors.
    """
    # What can be wrong in the arguments comes before the model is loaded.
    place = find(word, context[0])
    texts = iter(context) if corpus is None else read_texts(corpus, field)
    loaded = None if vectors is None else WordVectors.load(vectors)
    among_words = [] if loaded is None else of_word(loaded, word, top)
    encoder = TextEncoder(checkpoint)
    layer = encoder.layer(layer, "--layer")
    query = _query(encoder, context[0], place, layer)
    console = Console(highlight=False)
    if loaded is not None:
        _print_of_word(console, loaded, word, among_words)
    spelled = " ".join(map(encoder.tokenizer.token, query.tokens))
    console.print(Text(f"{word} alone, tokenized as {spelled}"))
    console.print(_static_table(_named(encoder, static(encoder, query.tokens, top))))
    console.print(Text(f"{word} in context, layer {layer} of {encoder.layers}"))
    console.print(_contextual_table(contextual(encoder, query, texts, layer, top)))


def show_static(vectors: str, word: str, top: int) -> None:
    """Prints the `top` neighbors of a word in a folder of word vectors.

    Raises:
        ConfigError: the word has no vector.
        DataError: the folder is damaged.
    """
    loaded = WordVectors.load(vectors)
    _print_of_word(Console(highlight=False), loaded, word, of_word(loaded, word, top))


def of_word(vectors: WordVectors, word: str, top: int) -> list[tuple[float, str]]:
    """Returns (cosine, word) of the nearest words by their vectors, the word itself excluded.

    Raises:
        ConfigError: the word has no vector.
    """
    return vectors.nearest(vectors.find(word), top)


def _print_of_word(
    console: Console, vectors: WordVectors, word: str, found: Sequence[tuple[float, str]]
) -> None:
    method = vectors.description["settings"]["method"]
    console.print(Text(f"{word} alone, in the {method} vectors of {vectors.folder}"))
    console.print(_static_table(found, "word" if vectors.tokens is None else "token"))


def find(word: str, text: str) -> tuple[int, int]:
    """Returns the first occurrence (begin, end) of a word, in the same case where there is one.

    Raises:
        ConfigError: the word is not in the text.
    """
    # Not \b, which would not match a word that begins or ends with punctuation, as "C++".
    pattern = rf"(?<![\w{MARKS}]){re.escape(word)}(?![\w{MARKS}])"
    found = re.search(pattern, text) or re.search(pattern, text, re.IGNORECASE)
    if not word.strip() or found is None:
        raise ConfigError(f"the word {word!r} is not in {text!r}; give --in a text that has it")
    return found.span()


class Query(NamedTuple):
    """The word to find neighbors of.

    Attributes:
        text: its context.
        begin, end: its characters in `text`.
        tokens: its tokens.
        vector: fp32 [D] on the CPU, the mean of their hidden states, with L2 norm 1.
    """

    text: str
    begin: int
    end: int
    tokens: list[int]
    vector: Tensor


def _query(encoder: TextEncoder, text: str, place: tuple[int, int], layer: int) -> Query:
    """Encodes the word at characters `place` of a text.

    Raises:
        ConfigError: the word has no token, or the text is truncated before its end.
    """
    ((tokens, spans),) = encoder.tokenizer.encode_aligned([text])
    of_word = _tokens_of(place, spans)
    begin, end = place
    word = text[begin:end]
    if not len(of_word):
        raise ConfigError(f"the tokenizer has no token for {word!r}; choose another word")
    if of_word[-1] >= encoder.longest:
        raise ConfigError(
            f"{word!r} ends at token {of_word[-1] + 1} and the model reads {encoder.longest}; "
            "shorten the text before it"
        )
    _, states = encoder([encoder.prepare(tokens)], [layer])
    vector = states[layer][0, encoder.first + of_word].mean(0).cpu()
    return Query(text, begin, end, tokens[of_word].tolist(), vector / vector.norm())


def static(encoder: TextEncoder, tokens: list[int], top: int) -> list[tuple[float, int]]:
    """Returns (cosine, token) of the nearest tokens to the mean embedding of some.

    The tokens themselves and special tokens are excluded.
    """
    vocabulary = encoder.tokenizer.vocabulary
    # Special tokens are near to each other and to every rare word, and say nothing.
    excluded = [*tokens, *vocabulary.special, *vocabulary.sentinels]
    return nearest(encoder.table, tokens, excluded, top)


class Neighbor(NamedTuple):
    """A word in a text: its characters [begin, end), and its cosine to the query."""

    cosine: float
    text: str
    begin: int
    end: int


def contextual(
    encoder: TextEncoder, query: Query, texts: Iterator[str], layer: int, top: int
) -> list[Neighbor]:
    """Returns the words nearest to the query, nearest first. Repeated texts count once.

    Raises:
        ConfigError: the texts contain no other word.
    """
    # By place, as a text may come again in a later block.
    best: dict[tuple[str, int], Neighbor] = {}
    truncated = count = 0
    while read := list(islice(texts, _TEXTS_AT_A_TIME)):
        # A set would not keep the order, and the first of equal cosines should stay the first.
        block = list(dict.fromkeys(read))
        encoded = encoder.tokenizer.encode_aligned(block)
        count += len(block)
        truncated += sum(len(tokens) > encoder.longest for tokens, _ in encoded)
        prepared = [encoder.prepare(tokens) for tokens, _ in encoded]
        lengths = np.array(list(map(len, prepared)))
        for numbers in batches(lengths, _BATCH_TOKENS):
            _, states = encoder([prepared[number] for number in numbers], [layer])
            for number, hidden in zip(numbers, states[layer].cpu(), strict=True):
                words = _words(encoder, query, block[number], encoded[number][1], hidden)
                best |= {(word.text, word.begin): word for word in words}
        # Only the best are kept, so memory does not grow with the corpus.
        nearest = sorted(best.values(), key=lambda word: -word.cosine)[:top]
        best = {(word.text, word.begin): word for word in nearest}
    encoder.warn_of_truncation(truncated, count)
    if not best:
        raise ConfigError(
            "there is no other word to compare with; give more texts to --in, or use --corpus"
        )
    return list(best.values())


def _words(
    encoder: TextEncoder, query: Query, text: str, spans: Int64, hidden: Tensor
) -> list[Neighbor]:
    """The words of a text, except the query's own word.

    Args:
        spans: characters of the text's tokens, int64 [T, 2].
        hidden: hidden states of its sequence, fp32 [S, D].
    """
    places: list[tuple[int, int]] = []
    vectors: list[Tensor] = []
    for word in WORD.finditer(text):
        begin, end = word.span()
        is_query = text == query.text and begin < query.end and end > query.begin
        tokens = _tokens_of((begin, end), spans[: encoder.longest])
        if not is_query and len(tokens):  # a word that was truncated has no tokens
            places.append((begin, end))
            vectors.append(hidden[encoder.first + tokens].mean(0))
    if not places:
        return []
    cosines = torch.nn.functional.cosine_similarity(torch.stack(vectors), query.vector[None])
    return [
        Neighbor(cosine, text, begin, end)
        for cosine, (begin, end) in zip(cosines.tolist(), places, strict=True)
    ]


def _tokens_of(word: tuple[int, int], spans: Int64) -> Int64:
    """Indices of the tokens that share a character with a word.

    For example, with tokens at [0, 3), [3, 4), [4, 6) and [6, 9), the word at [4, 9) has 2 and 3.

    Args:
        word: its characters, [begin, end).
        spans: characters of the tokens, int64 [T, 2]; begin == end for a token of white space.
    """
    begin, end = spans.T
    return np.flatnonzero((begin < word[1]) & (end > word[0]) & (begin < end))


def _named(encoder: TextEncoder, found: Sequence[tuple[float, int]]) -> list[tuple[float, str]]:
    tokenizer = encoder.tokenizer
    return [
        (cosine, tokenizer.decode([token]).strip() or tokenizer.token(token))
        for cosine, token in found
    ]


def _static_table(neighbors: Sequence[tuple[float, str]], kind: str = "token") -> Table:
    table = Table("cosine", kind)
    for cosine, name in neighbors:
        table.add_row(f"{cosine:.3f}", Text(name))
    return table


def _contextual_table(neighbors: Sequence[Neighbor]) -> Table:
    table = Table("cosine", "word", "text")
    for cosine, text, begin, end in neighbors:
        # Line breaks would tear the row; they count as characters of the context like spaces.
        before = text[max(0, begin - _CONTEXT) : begin].replace("\n", " ")
        after = text[end : end + _CONTEXT].replace("\n", " ")
        before = f"…{before}" if begin > _CONTEXT else before
        after = f"{after}…" if len(text) - end > _CONTEXT else after
        word = text[begin:end]
        line = Text.assemble(before, (f"[{word}]", "bold"), after)
        table.add_row(f"{cosine:.3f}", Text(word), line)
    return table
