"""`samestep neighbours`: nearest neighbors of a word in embedding space, alone and in context."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from data_pipeline.format.shards import Tokens
from trainer.errors import ConfigError
from trainer.inference.hidden_states import TextEncoder, batches, read_texts

Int64: TypeAlias = npt.NDArray[np.int64]

_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
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
) -> None:
    """Prints the `top` static and contextual neighbors of a word.

    Args:
        checkpoint: see `trainer.training.weights.load_weights`.
        word: a word, or several consecutive words.
        context: texts; the first one contains the word.
        corpus: a file of texts to compare with; None compares with the texts of `context`.
        field: the key of the text in a `.jsonl` corpus; None is "text".
        layer: of the contextual vectors, from 0 (the embeddings); -1 is the last one.
        top: number of neighbors of each kind.

    Raises:
        ConfigError: the word is not in the first text, or there is nothing to compare it with.
    """
    place = find(word, context[0])
    texts = iter(context) if corpus is None else read_texts(corpus, field)
    encoder = TextEncoder(checkpoint)
    layer = encoder.layer(layer, "--layer")
    query = Query.of(encoder, context[0], place, layer)
    console = Console(highlight=False)
    spelled = " ".join(map(encoder.tokenizer.token, query.tokens))
    console.print(Text(f"{word} alone, tokenized as {spelled}"))
    console.print(_static_table(encoder, static(encoder, query.tokens, top)))
    console.print(Text(f"{word} in context, layer {layer} of {encoder.layers}"))
    console.print(_contextual_table(contextual(encoder, query, texts, layer, top)))


def find(word: str, text: str) -> tuple[int, int]:
    """Returns the first occurrence (begin, end) of a word, in the same case where there is one.

    Raises:
        ConfigError: the word is not in the text.
    """
    pattern = rf"(?<!\w){re.escape(word)}(?!\w)"
    found = re.search(pattern, text) or re.search(pattern, text, re.IGNORECASE)
    if not word.strip() or found is None:
        raise ConfigError(f"the word {word!r} is not in {text!r}; give --in a text that has it")
    return found.span()


@dataclass(frozen=True)
class Query:
    """The word whose neighbors are wanted.

    Attributes:
        text: its context.
        begin, end: its characters in `text`.
        tokens: its tokens.
        vector: fp32 [D], the mean of their hidden states, with L2 norm 1.
    """

    text: str
    begin: int
    end: int
    tokens: tuple[int, ...]
    vector: Tensor

    @classmethod
    def of(cls, encoder: TextEncoder, text: str, place: tuple[int, int], layer: int) -> Query:
        """Encodes the word at characters `place` of a text.

        Raises:
            ConfigError: the word has no token, or the text is truncated before its end.
        """
        ((tokens, spans),) = encoder.tokenizer.encode_aligned([text])
        of_word = np.flatnonzero(_word_of_token(spans, np.array([place])) == 0)
        word = text[slice(*place)]
        if not len(of_word):
            raise ConfigError(f"the tokenizer has no token for {word!r}; choose another word")
        if of_word[-1] >= encoder.longest:
            raise ConfigError(
                f"{word!r} ends at token {of_word[-1] + 1} and the model reads {encoder.longest}; "
                "shorten the text before it"
            )
        _, states = encoder([encoder.prepare(tokens)], [layer])
        vector = states[layer][0, encoder.first + of_word].mean(0)
        return cls(text, *place, tuple(tokens[of_word].tolist()), vector / vector.norm())


def static(encoder: TextEncoder, tokens: Sequence[int], top: int) -> list[tuple[float, int]]:
    """Returns (cosine, token) of the tokens whose embeddings are nearest to the mean of some.

    The tokens themselves and special tokens are excluded.
    """
    table = encoder.table
    unit = table / table.norm(dim=1, keepdim=True).clamp(min=torch.finfo(table.dtype).tiny)
    vector = table[list(tokens)].mean(0)
    cosines = unit @ (vector / vector.norm())
    vocabulary = encoder.tokenizer.vocabulary
    cosines[[*tokens, *vocabulary.special, *vocabulary.sentinels]] = -torch.inf
    found, ids = cosines.topk(min(top, len(cosines)))
    return [(c, i) for c, i in zip(found.tolist(), ids.tolist(), strict=True) if c > -torch.inf]


@dataclass(frozen=True)
class Neighbour:
    """A word in a text: its characters [begin, end), and its cosine to the query."""

    cosine: float
    text: str
    begin: int
    end: int


def contextual(
    encoder: TextEncoder, query: Query, texts: Iterator[str], layer: int, top: int
) -> list[Neighbour]:
    """Returns the words nearest to the query, nearest first. Repeated texts count once.

    Raises:
        ConfigError: the texts contain no other word.
    """
    best: dict[tuple[str, int], Neighbour] = {}
    truncated = count = 0
    while read := list(islice(texts, _TEXTS_AT_A_TIME)):
        block = list(dict.fromkeys(read))
        encoded = encoder.tokenizer.encode_aligned(block)
        count += len(block)
        truncated += sum(len(tokens) > encoder.longest for tokens, _ in encoded)
        sentences = [
            _Sentence.of(encoder, text, tokens, spans)
            for text, (tokens, spans) in zip(block, encoded, strict=True)
        ]
        lengths = np.array([len(sentence.tokens) for sentence in sentences])
        for numbers in batches(lengths, _BATCH_TOKENS):
            near = _nearest(encoder, query, [sentences[number] for number in numbers], layer, top)
            best |= {(each.text, each.begin): each for each in near}
        best = dict(sorted(best.items(), key=lambda item: -item[1].cosine)[:top])
    encoder.warn_of_truncation(truncated, count)
    if not best:
        raise ConfigError(
            "there is no other word to compare with; give more texts to --in, or use --corpus"
        )
    return list(best.values())


@dataclass(frozen=True)
class _Sentence:
    """A text as the model reads it.

    Attributes:
        words: int64 [W, 2], the characters [begin, end) of each word.
        word_of_token: int64 [T], the word of each token, or -1.
    """

    text: str
    tokens: Tokens
    words: Int64
    word_of_token: Int64

    @classmethod
    def of(cls, encoder: TextEncoder, text: str, tokens: Tokens, spans: Int64) -> _Sentence:
        spans_of_words = [match.span() for match in _WORD.finditer(text)]
        words = np.array(spans_of_words, dtype=np.int64).reshape(-1, 2)
        word_of_token = _word_of_token(spans, words)[: encoder.longest]
        return cls(text, encoder.prepare(tokens), words, word_of_token)


def _word_of_token(spans: Int64, words: Int64) -> Int64:
    """The word that each token overlaps, int64 [T], -1 for none.

    For example, with words at [0, 3) and [4, 9), tokens at [0, 3), [3, 4), [4, 6) and [6, 9) belong
    to words 0, -1, 1 and 1.

    Args:
        spans: characters of the tokens, int64 [T, 2].
        words: characters of the words, int64 [W, 2], in order.
    """
    begin, end = spans.T
    # The only candidate is the first word that ends after the token begins.
    candidate = np.searchsorted(words[:, 1], begin, side="right")
    behind_the_last = np.iinfo(np.int64).max
    candidate_begin = np.append(words[:, 0], behind_the_last)[candidate]
    return np.where((candidate_begin < end) & (begin < end), candidate, -1)


def _nearest(
    encoder: TextEncoder, query: Query, sentences: Sequence[_Sentence], layer: int, top: int
) -> list[Neighbour]:
    """The nearest words of a batch of sentences, except the query's own word."""
    # Words are numbered through the batch: sentences with 2 and 3 words have words 0-1 and 2-4.
    words_before = np.cumsum([0, *(len(sentence.words) for sentence in sentences)])
    words = np.concatenate([sentence.words for sentence in sentences])
    sentence_of_word = np.repeat(np.arange(len(sentences)), np.diff(words_before))

    # For each token of a word: its sentence, its position in the batch, and its word.
    counts = [len(sentence.word_of_token) for sentence in sentences]
    sentence = np.repeat(np.arange(len(sentences)), counts)
    position = encoder.first + np.concatenate([np.arange(count) for count in counts])
    word = np.concatenate([each.word_of_token for each in sentences])
    in_word = word >= 0
    sentence, position, word = sentence[in_word], position[in_word], word[in_word]
    word = word + words_before[sentence]

    in_query = np.array([each.text == query.text for each in sentences])[sentence_of_word]
    is_query = in_query & (words[:, 0] < query.end) & (words[:, 1] > query.begin)
    was_read = np.bincount(word, minlength=len(words)) > 0  # not behind the truncation
    usable = was_read & ~is_query
    if not usable.any():
        return []
    _, states = encoder([each.tokens for each in sentences], [layer])
    hidden = states[layer]
    sums = hidden.new_zeros(len(words), hidden.shape[2])
    sums.index_add_(0, torch.from_numpy(word).to(hidden.device), hidden[sentence, position])
    # The cosine of a sum is the cosine of the mean.
    cosines = torch.nn.functional.cosine_similarity(sums, query.vector[None]).cpu()
    cosines[torch.from_numpy(~usable)] = -torch.inf
    found, numbers = cosines.topk(min(top, int(usable.sum())))
    return [
        Neighbour(cosine, sentences[sentence_of_word[number]].text, *words[number].tolist())
        for cosine, number in zip(found.tolist(), numbers.tolist(), strict=True)
    ]


def _static_table(encoder: TextEncoder, neighbours: Sequence[tuple[float, int]]) -> Table:
    tokenizer = encoder.tokenizer
    table = Table("cosine", "token")
    for cosine, token in neighbours:
        name = tokenizer.decode([token]).strip() or tokenizer.token(token)
        table.add_row(f"{cosine:.3f}", Text(name))
    return table


def _contextual_table(neighbours: Sequence[Neighbour]) -> Table:
    table = Table("cosine", "word", "text")
    for each in neighbours:
        word = each.text[each.begin : each.end]
        before, after = each.text[: each.begin], each.text[each.end :]
        if len(before) > _CONTEXT:
            before = f"…{before[-_CONTEXT:]}"
        if len(after) > _CONTEXT:
            after = f"{after[:_CONTEXT]}…"
        marked = (f"[{word}]", "bold")
        text = Text.assemble(" ".join(before.splitlines()), marked, " ".join(after.splitlines()))
        table.add_row(f"{each.cosine:.3f}", Text(word), text)
    return table
