"""Greedy decoding and beam search of T5 beside `transformers`' generate(), from the same weights on
the same sources.

    python -m benchmarks.generation

T5-mini (v1.1, 4 + 4 layers of 256) with random weights in fp32 on the CPU: sources of 16 to 128
tokens, 32 new ones for each. No text ends before, so that both do the same work; that they are
equal is checked first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.models import import_transformers
from benchmarks.pairing import Comparison, Contender, arguments, compare, publish
from benchmarks.span_corruption import VOCABULARY
from benchmarks.step_t5 import MINI
from trainer.generation import Config, Generator
from trainer.models.codecs import codec_of

NEW_TOKENS = 32


def measure(beams: int, size: int, repeats: int) -> Comparison:
    """Both on a batch of `size` sources."""
    transformers = import_transformers()

    torch.manual_seed(0)
    reference: Any = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**codec_of(MINI).to_huggingface())
    )
    reference.eval()
    model = MINI.build()
    model.load_state_dict(codec_of(MINI).import_tensors(reference.state_dict()))
    random = np.random.default_rng(0)
    sources = [
        random.integers(3, VOCABULARY.size, length)
        for length in np.linspace(16, 128, size).astype(int)
    ]
    tokens = pad_sequence([torch.from_numpy(source) for source in sources], batch_first=True)
    lists = [source.tolist() for source in sources]
    penalty: Any = {"length_penalty": 0.6} if beams > 1 else {}  # it is of beam search
    generate = Generator(
        model,
        VOCABULARY,
        Config(NEW_TOKENS, NEW_TOKENS - 1, beams=beams, batch_size=size, **penalty),
    )

    def theirs() -> list[list[int]]:
        generated = reference.generate(
            input_ids=tokens,
            attention_mask=(tokens > 0).long(),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS - 1,
            num_beams=beams,
            do_sample=False,
            **penalty,
        )
        found: list[list[int]] = generated[:, 1:].tolist()
        return found

    equal = sum(a == b for a, b in zip(generate(lists), theirs(), strict=True))
    contenders = [
        Contender("samestep", lambda: NEW_TOKENS * len(generate(lists))),
        Contender("transformers", lambda: NEW_TOKENS * len(theirs())),
    ]
    title = f"Generation with T5-mini, batch {size}, beams {beams}, {equal} texts equal"
    return compare(
        f"{title}, threads: {torch.get_num_threads()}", "tokens", contenders, repeats, warm=False
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--batch", type=int, default=32, help="sources (default: 32)")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (default: 1)")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    publish([measure(beams, options.batch, options.repeats) for beams in (1, 4)], options.json)


if __name__ == "__main__":
    main()
