"""The head of a language model and its loss: in chunks of positions, and on whole logits.

    python -m benchmarks.cross_entropy

Forward and backward pass of the output matrix and the cross-entropy, with the gradients of hidden
states, matrix and bias. Each peak of memory is that of a process of its own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.pairing import Comparison, Contender, arguments, compare, publish
from trainer.models.token_scores import Target, TokenScore, score_hidden, score_logits

VOCABULARIES = {"BERT": 30_522, "RoBERTa": 50_265}


def contenders(
    vocabulary: int, width: int, positions: int, precision: torch.dtype | None
) -> dict[str, Callable[[], float]]:
    """The same work in chunks, and on whole logits."""
    torch.manual_seed(0)
    hidden = torch.randn(1, positions, width, requires_grad=True)
    matrix = (torch.randn(vocabulary, width) * 0.02).requires_grad_()
    bias = torch.zeros(vocabulary, requires_grad=True)
    target = Target(torch.randint(0, vocabulary, (1, positions)), torch.ones(1, positions))

    def chunked() -> Tensor:
        return TokenScore.unpack(score_hidden(hidden, matrix, bias, target)).loss

    def whole() -> Tensor:
        return score_logits(F.linear(hidden, matrix, bias), target).loss

    def passes(loss: Callable[[], Tensor]) -> Callable[[], float]:
        def run() -> float:
            with torch.autocast("cpu", precision, enabled=precision is not None):
                total = loss() / positions
            total.backward()  # type: ignore[no-untyped-call]
            for leaf in (hidden, matrix, bias):
                leaf.grad = None
            return positions

        return run

    return {"in chunks": passes(chunked), "whole logits": passes(whole)}


def peak(name: str, *sizes: Any) -> float:
    """GB of memory that a contender takes beyond its inputs."""
    work = contenders(*sizes)[name]
    before = _peak_of_process()
    work()
    return _peak_of_process() - before


def _peak_of_process() -> float:
    # ru_maxrss would be at least that of the parent, which starts it.
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (highest,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(highest.split()[1]) * 1024 / 1e9


def measure(
    family: str, width: int, positions: int, precision: torch.dtype | None, repeats: int
) -> Comparison:
    """Measures all in turn, and then the memory of each."""
    vocabulary = VOCABULARIES[family]
    sizes = (vocabulary, width, positions, precision)
    works = contenders(*sizes)
    found = compare(
        f"{family}'s head ({vocabulary:,} tokens, width {width}) at {positions:,} positions, "
        f"{'fp32' if precision is None else 'bf16'}",
        "positions",
        [Contender(name, work) for name, work in works.items()],
        repeats,
    )
    for name in works:
        # A new process each: the peak of a process never falls.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            used = pool.apply(peak, (name, *sizes))
        found.notes[name] = f"{used:.2f} GB"
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--positions", type=int, default=8192, help="predicted (default: 8192)")
    parser.add_argument("--width", type=int, default=768, help="of hidden states (default: 768)")
    parser.add_argument("--bf16", action="store_true", help="under autocast in bf16")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # threads that wait would count as CPU time
    precision = torch.bfloat16 if args.bf16 else None
    publish(
        [
            measure(family, args.width, args.positions, precision, args.repeats)
            for family in VOCABULARIES
        ],
        args.json,
    )


if __name__ == "__main__":
    main()
