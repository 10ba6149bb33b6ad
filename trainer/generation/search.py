"""How the tokens of a batch are found, step by step; texts that are finished leave the batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer.generation.config import Config
from trainer.generation.sampling import sample
from trainer.models import Generates
from trainer.models.cache import Cache


def one_by_one(
    model: Generates,
    logits: Tensor,
    cache: Cache,
    end: int,
    config: Config,
    uniform: Tensor | None = None,
) -> Tensor:
    """Takes the likeliest token after the other, or random ones.

    Args:
        model: whose `start` gave the logits and the cache.
        logits: [B, V] of the first tokens.
        cache: of the model.
        end: the token that ends a text.
        config: how tokens are chosen.
        uniform: fp64 [B, max_new_tokens] in [0, 1), for `sample`; None takes the
            likeliest.

    Returns:
        int64 [B, max_new_tokens], filled up with `end`.
    """
    texts = logits.new_full((len(logits), config.max_new_tokens), end, dtype=torch.int64)
    rows = torch.arange(len(logits), device=logits.device)
    for place in range(config.max_new_tokens):
        scores = logits.float()
        if place < config.min_new_tokens:
            scores[:, end] = float("-inf")
        tokens = (
            scores.argmax(-1) if uniform is None else sample(scores, uniform[rows, place], config)
        )
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
        tokens: int64 [B, N, max_new_tokens], filled up with the token that ends a text.
        scores: fp32 [B, N].
    """

    tokens: Tensor
    scores: Tensor

    def take(self, rows: Tensor) -> _Beams:
        """Those of some sources, int64 [B']."""
        return _Beams(self.tokens[rows], self.scores[rows])

    def best(self, count: int) -> _Beams:
        """So many of the highest scores."""
        scores, places = self.scores.topk(count)
        return _Beams(_gather(self.tokens, places), scores)


def _gather(tokens: Tensor, places: Tensor) -> Tensor:
    """[B, N, L] and int64 [B, M] -> [B, M, L]."""
    return tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[2]))


def beam_search(model: Generates, logits: Tensor, cache: Cache, end: int, config: Config) -> Tensor:
    """Goes on with the `config.beams` likeliest unfinished texts of each source, and returns the
    best finished one.

    As `transformers` has it: a text may finish among the first `beams` candidates only, and a
    source is done as `config.early_stopping` says. Arguments and result as of `one_by_one`.
    """
    beams, longest = config.beams, config.max_new_tokens
    texts = logits.new_full((len(logits), longest), end, dtype=torch.int64)
    rows = torch.arange(len(logits), device=logits.device)
    running = _Beams(texts[:, None], logits.new_zeros((len(logits), 1), dtype=torch.float32))
    finished = _Beams(
        texts[:, None].expand(-1, beams, -1), running.scores.expand(-1, beams) - torch.inf
    )
    for length in range(1, longest + 1):
        forbidden = end if length <= config.min_new_tokens else None
        candidates, parents = _extend(running, logits.float(), length, 2 * beams, forbidden)
        ends = (candidates.tokens[:, :, length - 1] == end) | (length == longest)
        scores = (
            candidates.scores.where(ends, -torch.inf)[:, :beams] / length**config.length_penalty
        )
        finished = _Beams(
            torch.cat([finished.tokens, candidates.tokens[:, :beams]], 1),
            torch.cat([finished.scores, scores], 1),
        ).best(beams)
        texts[rows] = finished.tokens[:, 0]
        # A running text ends in one way, so half of twice as many candidates as beams are left to
        # go on with.
        scores, places = candidates.scores.masked_fill(ends, -torch.inf).topk(beams)
        running = _Beams(_gather(candidates.tokens, places), scores)
        parents = parents.gather(1, places)
        undone = _can_improve(running, finished, length, config).nonzero()[:, 0]
        if not len(undone) or length == longest:
            break
        sources: Tensor | slice = slice(None)
        if len(undone) < len(rows):
            rows, sources, parents = rows[undone], undone, parents[undone]
            running, finished = running.take(undone), finished.take(undone)
        cache.select(parents.flatten(), sources)
        logits = model.step(running.tokens[:, :, length - 1].flatten(), cache)[:, : logits.shape[1]]
    return texts


def _extend(
    running: _Beams, logits: Tensor, length: int, count: int, forbidden: int | None
) -> tuple[_Beams, Tensor]:
    """The `count` likeliest texts of a token more for each source, and the row int64 [B, count]
    that each comes from.

    logits: fp32 [B * N, V]; length: of the new texts, in tokens; forbidden: a token that is not to
        be the next.
    """
    highest = logits.amax(-1, keepdim=True)
    # Less than e^-80 adds nothing to a sum of at least 1, and on CPUs denormal numbers take ten
    # times as long.
    total = highest + (logits - highest).clamp_(min=-80).exp_().sum(-1, keepdim=True).log()
    if forbidden is not None:
        logits[:, forbidden] = -torch.inf
    # Those of a source are among the likeliest of each of its rows, which takes less than to score
    # all.
    likeliest, tokens = logits.topk(count)
    sources, rows = running.scores.shape
    scores = (likeliest - total).view(sources, rows, count) + running.scores[..., None]
    best, places = scores.flatten(1).topk(count)
    beam = places // count
    texts = _gather(running.tokens, beam)
    texts[:, :, length - 1] = tokens.view(sources, -1).gather(1, places)
    return _Beams(texts, best), beam + rows * torch.arange(sources, device=beam.device)[:, None]


def _can_improve(running: _Beams, finished: _Beams, length: int, config: Config) -> Tensor:
    """Whether a running text may still become one of the best finished ones of its source.

    Bool [B].
    """
    worst = finished.scores[:, -1]
    if config.early_stopping is True:
        return worst == -torch.inf
    if config.early_stopping == "never" and config.length_penalty > 0:
        length = config.max_new_tokens
    divisor: float = length**config.length_penalty
    return running.scores[:, 0] / divisor > worst
