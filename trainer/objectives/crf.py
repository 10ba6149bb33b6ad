"""Linear-chain conditional random fields: a score for each sequence of tags (Lafferty et al. 2001).

Of n words with emissions e (a score for each word and tag) and transitions a, the tags y have the
score

    s(y) = a[C, y_1] + sum_t e[t, y_t] + sum_{t > 1} a[y_{t-1}, y_t] + a[y_n, C]

where row C of the transitions is the start, and column C the end. The probability of y is
exp(s(y)) divided by the sum of exp(s) over all C^n sequences, which the forward algorithm adds up
word by word. For named entities, it learns that I-PER does not follow B-LOC (Lample et al. 2016,
section 2.2).

The words of B rows are [B, T]: the first n of a row, then unused ones.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_likelihood(emissions: Tensor, tags: Tensor, used: Tensor, transitions: Tensor) -> Tensor:
    """The log-probability of the tags of each row, [B]; 0 for a row without words.

    Args:
        emissions: float32 [B, T, C].
        tags: int64 [B, T], in [0, C).
        used: bool [B, T].
        transitions: float32 [C + 1, C + 1].
    """
    found = _score(emissions, tags, used, transitions) - _log_partition(
        emissions, used, transitions
    )
    return torch.where(used[:, 0], found, 0.0)


def _score(emissions: Tensor, tags: Tensor, used: Tensor, transitions: Tensor) -> Tensor:
    """s(y) of each row: [B]."""
    classes = emissions.shape[-1]
    emitted = (emissions.gather(-1, tags[..., None])[..., 0] * used).sum(1)
    between = (transitions[tags[:, :-1], tags[:, 1:]] * used[:, 1:]).sum(1)
    last = tags.gather(1, (used.sum(1, keepdim=True) - 1).clamp(min=0))[:, 0]
    return emitted + between + transitions[classes, tags[:, 0]] + transitions[last, classes]


def _log_partition(emissions: Tensor, used: Tensor, transitions: Tensor) -> Tensor:
    """log sum_y exp(s(y)) of each row, [B], by the forward algorithm."""
    classes = emissions.shape[-1]
    inner = transitions[:classes, :classes]
    # Row b, tag c: the log of the sum over all sequences that end with c at the current word.
    ending = transitions[classes, :classes] + emissions[:, 0]
    for word in range(1, emissions.shape[1]):
        later = (ending[:, :, None] + inner).logsumexp(1) + emissions[:, word]
        ending = torch.where(used[:, word, None], later, ending)
    return (ending + transitions[:classes, classes]).logsumexp(1)


@torch.no_grad()
def best_tags(emissions: Tensor, used: Tensor, transitions: Tensor) -> Tensor:
    """The tags with the highest score (Viterbi's algorithm): int64 [B, T], arguments as above."""
    classes = emissions.shape[-1]
    inner = transitions[:classes, :classes]
    best = transitions[classes, :classes] + emissions[:, 0]
    before = []  # for each later word and tag, the best tag of the word before
    for word in range(1, emissions.shape[1]):
        score, source = (best[:, :, None] + inner).max(1)
        is_used = used[:, word, None]
        best = torch.where(is_used, score + emissions[:, word], best)
        # The path through an unused word stays where it is, so it ends at the last used one.
        before.append(torch.where(is_used, source, torch.arange(classes, device=source.device)))
    tags = [(best + transitions[:classes, classes]).argmax(1)]
    for source in reversed(before):
        tags.append(source.gather(1, tags[-1][:, None])[:, 0])
    return torch.stack(tags[::-1], 1)
