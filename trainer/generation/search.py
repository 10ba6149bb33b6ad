"""Greedy decoding, sampling and beam search, step by step; finished texts leave the batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.generation.config import Config
from trainer.generation.generates import Generates
from trainer.generation.sampling import sample
from trainer.models.cache import Cache


def one_by_one(
    model: Generates,
    logits: Tensor,
    cache: Cache,
    end: int,
    config: Config,
    uniform: Tensor | None,
) -> Tensor:
    """Takes the most likely token at each step, or samples one.

    Args:
        model: its `start` has returned the logits and the cache.
        logits: [B, V] of the first tokens.
        end: the token that ends a text.
        uniform: fp64 [B, max_new_tokens] in [0, 1), for sampling; None takes the most likely token.

    Returns:
        int64 [B, max_new_tokens], padded with `end`.
    """
    shape = (len(logits), config.max_new_tokens)
    texts = logits.new_full(shape, end, dtype=torch.int64)
    # The rows of `texts` that are unfinished, in the order of the cache. Example: if texts 0 and 2
    # of 4 have ended, rows is 1 3, and the cache has two rows.
    rows = torch.arange(len(logits), device=logits.device)
    for place in range(config.max_new_tokens):
        scores = logits.float()
        if place < config.min_new_tokens:
            scores[:, end] = float("-inf")
        if uniform is None:
            tokens = scores.argmax(-1)
        else:
            tokens = sample(scores, uniform[rows, place], config)
        texts[rows, place] = tokens
        unfinished = (tokens != end).nonzero()[:, 0]
        if not len(unfinished):
            break
        if len(unfinished) < len(rows):
            cache.select(unfinished)
            rows, tokens = rows[unfinished], tokens[unfinished]
        if place + 1 < config.max_new_tokens:
            logits = model.step(tokens, cache)[:, : logits.shape[1]]
    return texts


class _Beams(NamedTuple):
    """N texts of each source, the best first.

    Attributes:
        tokens: int64 [B, N, max_new_tokens], padded with the end token.
        scores: fp32 [B, N].
    """

    tokens: Tensor
    scores: Tensor

    def of_sources(self, sources: Tensor) -> _Beams:
        """The texts of some sources, int64 [B']."""
        return _Beams(self.tokens[sources], self.scores[sources])

    def best(self, count: int) -> tuple[_Beams, Tensor]:
        """The `count` texts with the highest scores, and their indices, int64 [B, count]."""
        scores, places = self.scores.topk(count)
        return _Beams(_gather(self.tokens, places), scores), places


def _gather(tokens: Tensor, places: Tensor) -> Tensor:
    """[B, N, L] and int64 [B, M] -> [B, M, L]."""
    return tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[2]))


def beam_search(model: Generates, logits: Tensor, cache: Cache, end: int, config: Config) -> Tensor:
    """Continues the `config.beams` best unfinished texts of each source; returns the best text.

    As in `transformers`: a text may end only among the first `beams` candidates, and
    `config.early_stopping` says when a source is done. Arguments and result as for `one_by_one`.
    """
    beams, longest = config.beams, config.max_new_tokens
    vocabulary = logits.shape[1]
    texts = logits.new_full((len(logits), longest), end, dtype=torch.int64)
    rows = torch.arange(len(logits), device=logits.device)
    # At first there is one empty text, so that the candidates are different tokens. No text has
    # ended yet: the finished ones have a score that any other exceeds.
    running = _Beams(texts[:, None], logits.new_zeros((len(logits), 1), dtype=torch.float32))
    none = running.scores.expand(-1, beams) - torch.inf
    finished = _Beams(texts[:, None].expand(-1, beams, -1), none)
    for length in range(1, longest + 1):
        forbidden = end if length <= config.min_new_tokens else None
        # At most `beams` of twice as many candidates end here, as each running text can end in
        # one way only. So there are always enough left to continue.
        candidates, parents = _extend(running, logits.float(), length, 2 * beams, forbidden)
        ends = (candidates.tokens[:, :, length - 1] == end) | (length == longest)
        scores = candidates.scores.where(ends, -torch.inf)[:, :beams]
        scores = scores / length**config.length_penalty
        tokens = torch.cat([finished.tokens, candidates.tokens[:, :beams]], 1)
        finished, _ = _Beams(tokens, torch.cat([finished.scores, scores], 1)).best(beams)
        texts[rows] = finished.tokens[:, 0]

        unended = candidates.scores.masked_fill(ends, -torch.inf)
        running, places = _Beams(candidates.tokens, unended).best(beams)
        parents = parents.gather(1, places)
        undone = _can_improve(running, finished, length, config).nonzero()[:, 0]
        if not len(undone) or length == longest:
            break
        sources: Tensor | slice = slice(None)
        if len(undone) < len(rows):
            rows, sources, parents = rows[undone], undone, parents[undone]
            running, finished = running.of_sources(undone), finished.of_sources(undone)
        # Each new text needs the keys and values of the text that it extends.
        cache.select(parents.flatten(), sources)
        last = running.tokens[:, :, length - 1].flatten()
        logits = model.step(last, cache)[:, :vocabulary]
    return texts


def _extend(
    running: _Beams, logits: Tensor, length: int, count: int, forbidden: int | None
) -> tuple[_Beams, Tensor]:
    """Extends the texts by one token.

    Args:
        running: N texts of each source.
        logits: fp32 [B * N, V] of the next tokens.
        length: of the new texts.
        count: number of new texts to keep of each source.
        forbidden: a token that must not be the next.

    Returns:
        The most likely new texts, and the row of `logits` that each comes from, int64 [B, count].
    """
    highest = logits.amax(-1, keepdim=True)
    # Less than e^-80 adds nothing to a sum of at least 1, and on CPUs denormal numbers take ten
    # times as long.
    exponentials = (logits - highest).clamp_(min=-80).exp_()
    log_z = highest + exponentials.sum(-1, keepdim=True).log()
    if forbidden is not None:
        logits[:, forbidden] = -torch.inf
    # The best of a source are among the best of each of its rows: N * count candidates are scored
    # instead of N * V.
    best_logits, tokens = logits.topk(count)
    sources, rows = running.scores.shape
    log_probabilities = (best_logits - log_z).view(sources, rows, count)
    scores = log_probabilities + running.scores[..., None]
    best, places = scores.flatten(1).topk(count)
    # Example: with count 4, place 6 is the third candidate of row 1 of its source.
    row = places // count
    texts = _gather(running.tokens, row)
    texts[:, :, length - 1] = tokens.view(sources, -1).gather(1, places)
    first_row = rows * torch.arange(sources, device=row.device)[:, None]
    return _Beams(texts, best), row + first_row


def _can_improve(running: _Beams, finished: _Beams, length: int, config: Config) -> Tensor:
    """Whether a running text may still become one of its source's best finished ones: bool [B]."""
    worst = finished.scores[:, -1]
    if config.early_stopping is True:
        return worst == -torch.inf
    # With a positive penalty, a negative log-probability is best divided by the largest length.
    if config.early_stopping == "never" and config.length_penalty > 0:
        length = config.max_new_tokens
    divisor: float = length**config.length_penalty
    return running.scores[:, 0] / divisor > worst
