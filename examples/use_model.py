"""Uses a trained model: fills masks, and compares texts by their hidden states.

    python examples/use_model.py runs/bert_mini "return a list of [MASK] in the directory."

The model is a run, its export (`samestep export RUN DIR`), or hf://NAME.
"""

from __future__ import annotations

import sys

import torch

import samestep


def main(arguments: list[str] | None = None) -> int:
    path, *texts = sys.argv[1:] if arguments is None else arguments
    trained = samestep.load_model(path)
    for text in texts:
        for candidates in trained.fill(text, top=3):
            words = [f"{each.token} ({each.probability:.3f})" for each in candidates]
            print(f"{text}: {', '.join(words)}")  # noqa: T201

    # One tensor [S, D] for each text; the mean over its positions represents the text.
    states = trained.encode(texts, layer=-1)
    vectors = torch.stack([each.mean(0) for each in states])
    similarity = torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
    print(f"similarity: {similarity.round(decimals=3).tolist()}")  # noqa: T201

    # `model` is a torch.nn.Module, and `tokenizer` encodes and decodes.
    parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    ids = trained.tokenizer.encode_batch(["a list of names"])[0]
    print(f"{parameters} parameters; {trained.tokenizer.decode(ids)}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
