"""Scores of given words for the mask in a text: cloze probes of a language model's knowledge.

A masked language model scores a word by its probability at the mask. A word of n tokens has n masks
in its place, and the product of their probabilities. A left-to-right model scores the whole text
with the word in it, and one of both directions adds the scores of both. Words of other numbers of
tokens are compared all the same, although longer ones tend to score lower.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NotRequired, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table
from rich.text import Text
from torch.nn.utils.rnn import pad_sequence

from samestep.config import recipes
from samestep.errors import ConfigError, DataError
from samestep.storage import write_text
from samestep.stored_json import JsonError, parse_json
from samestep.terminal import Console
from trainer.accelerators.detect import for_any_shapes
from trainer.inference.fill import masked_lm_tokens
from trainer.models.text_inputs import batches, padded_inputs, special_tokens
from trainer.training.weights.loading import Weights, load_weights

Floats: TypeAlias = npt.NDArray[np.float64]

_BATCH_TOKENS = 2048
_BATCH_LOGITS = 2**26
"""The most scores that are computed at once, 256 MiB: of 2,048 positions with 32,768 tokens."""
_BY_TEXT = frozenset({"next_tokens", "previous_tokens"})
"""Outputs of models that score a text token by token."""


@dataclass(frozen=True)
class Cloze:
    """A text with one mask, and words for it.

    Attributes:
        text: with [MASK] or <mask> where a word is missing.
        candidates: the words.
        label: the right one, if it is known.
        group: for scores of some rows apart from others; empty: none.
    """

    text: str
    candidates: tuple[str, ...]
    label: str | None = None
    group: str = ""

    def __post_init__(self) -> None:
        if self.text.replace("<mask>", "[MASK]").count("[MASK]") != 1:
            raise ConfigError(
                f"{self.text!r} must have one mask for candidates; write [MASK] where the word is "
                "missing"
            )
        words = [word.strip() for word in self.candidates]
        if len(set(words)) < max(2, len(words)) or not all(words):
            raise ConfigError(f"candidates are {list(self.candidates)}; name at least 2, each once")
        if self.label is not None and self.label not in self.candidates:
            raise ConfigError(
                f"label is {self.label!r}, which is not among the candidates "
                f"{', '.join(self.candidates)}. Add it, or correct the label."
            )

    @property
    def parts(self) -> tuple[str, str]:
        """The text before and after the mask."""
        before, after = self.text.replace("<mask>", "[MASK]").split("[MASK]")
        return before, after

    def filled(self, word: str) -> str:
        """The text with a word in the place of its mask."""
        before, after = self.parts
        return f"{before}{word}{after}"


class _Row(TypedDict):
    text: str
    candidates: list[str | int | float]
    label: str
    group: NotRequired[str | None]


def read_probes(path: str | Path) -> list[Cloze]:
    """Reads JSON Lines with text, candidates, label and, if they have one, group.

    Args:
        path: of a file, or of one that comes with samestep, as recipes/studies/probes/cloze.jsonl.

    Raises:
        DataError: the file cannot be read, or a line is no probe.
    """
    found = []
    try:
        lines = recipes.locate(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeError) as error:
        raise DataError(
            f"cannot read the probes in {path}: {error}. Name a file of JSON Lines in UTF-8."
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, _Row)
            candidates = tuple(str(word) for word in row["candidates"])
            probe = Cloze(row["text"], candidates, row["label"], row.get("group") or "")
        except ConfigError as error:
            raise DataError(f"{path}:{number}: {error}") from error
        except JsonError as error:
            raise DataError(
                f"{path}:{number}: is not a probe ({error}); write "
                '{"text": "the dogs [MASK] old", "candidates": ["is", "are"], "label": "are"}'
            ) from error
        found.append(probe)
    if not found:
        raise DataError(f"{path} has no probes. Write one to a line (see samestep fill --help).")
    return found


class _Sequence(NamedTuple):
    """A sequence to compute for a probe, and the tokens to score in it.

    Attributes:
        tokens: ids, special tokens included.
        probe: its number.
        at: positions that are read.
        labels: by number of a candidate, its token at each of these.
    """

    tokens: list[int]
    probe: int
    at: list[int]
    labels: dict[int, list[int]]


class CandidateScorer:
    """Scores candidates by a trained language model, on the best device available.

    Raises:
        ConfigError: the model scores no words in a text.
    """

    def __init__(self, weights: Weights) -> None:
        self._model = weights.model()
        self._tokenizer = weights.load_tokenizer()
        offers, vocabulary = self._model.offers, self._tokenizer.vocabulary
        self._fills_masks = "tokens" in offers
        self._outputs = frozenset({"tokens"}) if self._fills_masks else offers & _BY_TEXT
        if not self._outputs or weights.config.head != "language_model":
            raise ConfigError(
                f"the model of {weights.folder} does not score words in a text. Use a masked or a "
                "left-to-right language model."
            )
        self._mask = masked_lm_tokens(vocabulary)[1] if self._fills_masks else None
        self._unknown = frozenset(vocabulary.special)
        self._before, self._after = special_tokens(weights.config, vocabulary)
        self._batch_tokens = max(1, min(_BATCH_TOKENS, _BATCH_LOGITS // vocabulary.size))
        self._device = for_any_shapes().device
        self._model.to(self._device)

    @torch.no_grad()
    def __call__(self, probes: Sequence[Cloze]) -> list[Floats]:
        """The logarithm of each candidate's score, float64 [candidates], for each probe.

        Raises:
            ConfigError: a text is too long, two candidates are the same to the tokenizer, or it
                does not know one.
        """
        scores = [np.zeros(len(probe.candidates)) for probe in probes]
        make = self._masked if self._fills_masks else self._whole
        sequences = [each for number, probe in enumerate(probes) for each in make(number, probe)]
        lengths = np.array([len(each.tokens) for each in sequences], dtype=np.int64)
        most = self._model.max_sequence_length
        if lengths.max() > most:
            longest = probes[sequences[lengths.argmax()].probe].text
            raise ConfigError(
                f"{longest!r} has {lengths.max()} tokens and the model reads at most {most}; "
                "shorten it"
            )
        for rows in batches(lengths, self._batch_tokens):
            chosen = [sequences[row] for row in rows]
            places = [(each.probe, candidate) for each in chosen for candidate in each.labels]
            for (probe, candidate), score in zip(places, self._scores(chosen), strict=True):
                scores[probe][candidate] = score
        return scores

    def _masked(self, number: int, probe: Cloze) -> list[_Sequence]:
        """A sequence for each number of masks that the candidates need."""
        before, after = probe.parts
        # A word begins with the space before it, as in RoBERTa's vocabulary.
        space = " " if before != before.rstrip() else ""
        texts = [before.rstrip(), after, *(space + word for word in probe.candidates)]
        left, right, *words = [ids.tolist() for ids in self._tokenizer.encode_batch(texts)]
        for word, ids in zip(probe.candidates, words, strict=True):
            self._check_known(probe, word, ids)
        _check_words(probe, words)
        assert self._mask is not None, "the model fills masks"
        found: dict[int, _Sequence] = {}
        for candidate, word in enumerate(words):
            # Candidates of equally many tokens are read from one sequence with as many masks.
            count = len(word)
            if count not in found:
                begin = len(self._before) + len(left)
                tokens = [*self._before, *left, *[self._mask] * count, *right, *self._after]
                found[count] = _Sequence(tokens, number, list(range(begin, begin + count)), {})
            found[count].labels[candidate] = word
        return list(found.values())

    def _whole(self, number: int, probe: Cloze) -> list[_Sequence]:
        """A sequence for each candidate: the text with it."""
        texts = [probe.filled(word) for word in probe.candidates]
        found = []
        encoded = []
        begin = len(probe.parts[0])
        aligned = self._tokenizer.encode_aligned(texts)
        for word, (ids, spans) in zip(probe.candidates, aligned, strict=True):
            encoded.append(ids.tolist())
            # A token may join the word and what is beside it, so the word is not encoded alone.
            of_word = (spans[:, 0] < begin + len(word)) & (spans[:, 1] > begin)
            self._check_known(probe, word, ids[of_word].tolist())
        _check_words(probe, encoded)
        for candidate, ids in enumerate(encoded):
            tokens = [*self._before, *ids, *self._after]
            # Position i predicts token i + 1.
            at, labels = list(range(len(tokens) - 1)), tokens[1:]
            if len(self._outputs) == 2:  # the second half is read backward
                at, labels = at + at, labels + tokens[:-1]
            found.append(_Sequence(tokens, number, at, {candidate: labels}))
        return found

    def _check_known(self, probe: Cloze, word: str, ids: Sequence[int]) -> None:
        """Rejects a candidate that is [UNK] to the tokenizer: its score would be [UNK]'s.

        Args:
            ids: tokens of the candidate.
        """
        # No text has another special token.
        if not self._unknown.isdisjoint(ids):
            raise ConfigError(
                f"the tokenizer does not know the candidate {word!r} for {probe.text!r}; use "
                "words that it knows"
            )

    def _scores(self, sequences: Sequence[_Sequence]) -> list[float]:
        """The score of each candidate of each sequence, in order."""
        inputs = padded_inputs([np.array(each.tokens) for each in sequences], self._device)
        if self._fills_masks:
            read_at = [torch.tensor(each.at) for each in sequences]
            predicted = pad_sequence(read_at, batch_first=True).to(self._device)
            inputs = replace(inputs, predicted=predicted)
        outputs = self._model(inputs, self._outputs)
        # Sorted: next tokens come before previous ones, as `_whole` lists them.
        # The model's table may have more rows than the tokenizer has tokens.
        size = self._tokenizer.vocabulary.size
        logits = [outputs[name][..., :size].float() for name in sorted(self._outputs)]
        totals = [part.logsumexp(-1) for part in logits]
        found = []
        for row, each in enumerate(sequences):
            count = len(each.at) // len(logits)
            read = torch.arange(count, device=self._device)
            for labels in each.labels.values():
                chosen = torch.tensor(labels, device=self._device).view(len(logits), count)
                score = torch.zeros((), dtype=torch.float64, device=self._device)
                for part, total, own in zip(logits, totals, chosen, strict=True):
                    # fp64: a long text adds up hundreds of logarithms.
                    score += (part[row, read, own] - total[row, :count]).double().sum()
                found.append(score)
        scores: list[float] = torch.stack(found).tolist()
        return scores


def _check_words(probe: Cloze, encoded: Sequence[list[int]]) -> None:
    """Rejects candidates that a tokenizer does not tell apart, or has no token for."""
    texts = [tuple(ids) for ids in encoded]
    if not all(texts) or len(set(texts)) < len(texts):
        raise ConfigError(
            f"the tokenizer does not tell the candidates {', '.join(probe.candidates)} apart; use "
            "words that it knows"
        )


def fill_candidates(checkpoint: str, texts: Sequence[str], candidates: Sequence[str]) -> None:
    """Prints the probability of each candidate, among them, for the mask of each text.

    Raises:
        ConfigError: the model scores no words, or a text does not have one mask.
    """
    probes = [Cloze(text, tuple(candidates)) for text in texts]
    console = Console(highlight=False)
    scorer = CandidateScorer(load_weights(checkpoint))
    for probe, scores in zip(probes, scorer(probes), strict=True):
        # As `Text`, since brackets in a string are markup.
        title = Text(probe.text, "table.title")
        table = Table("share", "log p", "text", title=title, title_justify="left")
        for candidate in np.argsort(-scores, kind="stable").tolist():
            share = _shares(scores)[candidate]
            filled = probe.filled(probe.candidates[candidate])
            table.add_row(f"{share:.3f}", f"{scores[candidate]:.2f}", Text(filled))
        console.print(table)


def run_probes(
    checkpoint: str, file: str, scores: str | None = None, predictions: str | None = None
) -> None:
    """Prints how often the right candidate scores highest, over all probes and by group.

    Args:
        file: JSON Lines, see `read_probes`.
        scores: JSON file for the accuracies.
        predictions: JSON Lines file for the prediction of each probe.

    Raises:
        ConfigError: the model scores no words, or a text is too long.
        DataError: the file has no probes, or a line is none.
    """
    probes = read_probes(file)
    found = CandidateScorer(load_weights(checkpoint))(probes)
    is_right, rows = [], []
    for probe, values in zip(probes, found, strict=True):
        prediction = probe.candidates[int(values.argmax())]
        is_right.append(prediction == probe.label)
        shares = dict(zip(probe.candidates, _shares(values).tolist(), strict=True))
        row = {"label": probe.label, "prediction": prediction, "probabilities": shares}
        rows.append({"text": probe.text, "group": probe.group, **row})
    groups: dict[str, list[bool]] = {}
    for probe, right in zip(probes, is_right, strict=True):
        if probe.group:
            groups.setdefault(probe.group, []).append(right)
    table = Table("group", "probes", "right, %")
    for name, own in [*groups.items(), ("all", is_right)]:
        table.add_row(Text(name), f"{len(own):,}", f"{100 * np.mean(own):.1f}")
    Console(highlight=False).print(table)
    if scores is not None:
        accuracies = {"accuracy": float(np.mean(is_right))}
        accuracies |= {f"accuracy.{name}": float(np.mean(own)) for name, own in groups.items()}
        write_text(Path(scores), json.dumps(accuracies, indent=1) + "\n")
    if predictions is not None:
        write_text(Path(predictions), "".join(json.dumps(row) + "\n" for row in rows))


def _shares(scores: Floats) -> Floats:
    """Scores as shares of their sum, from their logarithms."""
    # Shifted by the largest, as exp of a long text's score would be 0.
    powers = np.exp(scores - scores.max())
    shares: Floats = powers / powers.sum()
    return shares
