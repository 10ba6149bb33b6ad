"""`samestep fill`: the most likely tokens for the masks in a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.errors import ConfigError
from samestep.examples import Vocabulary
from samestep.terminal import Console
from trainer.models import Model
from trainer.models.inputs import Inputs
from trainer.training.weights.loading import Weights, load_weights


def fill(checkpoint: str, texts: Sequence[str], top: int) -> None:
    """Prints the `top` most likely tokens for each mask of each text.

    Raises:
        ConfigError: the model is no masked language model, or a text has no mask or is too long.
    """
    weights = load_masked_lm(checkpoint)
    tokenizer = weights.load_tokenizer()
    # On the CPU: one short text at a time is not worth moving a model to a device.
    model = weights.model(frozenset({"tokens"}))
    console = Console(highlight=False)
    for text in texts:
        masks = fill_masks(model, tokenizer, text, top)
        # Only a text with one mask can be shown with the mask filled in.
        headings = ["probability", "token", "text"][: 3 if len(masks) == 1 else 2]
        table = Table(*headings, title=Text(text, "table.title"), title_justify="left")
        for candidates in masks:
            for each in candidates:
                # As `Text`, since brackets in a string are markup.
                row = [Text(f"{each.probability:.3f}"), Text(each.token), Text(each.text)]
                table.add_row(*row[: len(headings)])
            table.add_section()
        console.print(table)


class Candidate(NamedTuple):
    """A token for a mask.

    Attributes:
        token: its text.
        probability: by the model.
        text: the whole text with the token in the place of its mask; empty with several masks, of
            which one filled in alone would still leave the others open.
    """

    token: str
    probability: float
    text: str


def fill_masks(model: Model, tokenizer: Tokenizer, text: str, top: int) -> list[list[Candidate]]:
    """Returns the `top` most likely tokens for each mask of a text, the most likely first.

    Args:
        model: a masked language model in eval mode; see `check_masked_lm`.

    Raises:
        ConfigError: the text has no mask or is too long, or `top` is no number of tokens.
    """
    size = tokenizer.vocabulary.size
    if not 1 <= top <= size:
        raise ConfigError(f"top is {top}, and the tokenizer has {size} tokens; use 1 to {size}")
    tokens, masked = encode_masked(tokenizer, text)
    if len(tokens) > model.max_sequence_length:
        raise ConfigError(
            f"the text has {len(tokens)} tokens and the model reads at most "
            f"{model.max_sequence_length}; shorten it"
        )
    found = []
    for distribution in _predict(model, tokens, masked, size):
        likely = distribution.topk(top)
        candidates = []
        for probability, token in zip(likely.values.tolist(), likely.indices.tolist(), strict=True):
            filled = ""
            if len(masked) == 1:
                tokens[masked[0]] = token
                filled = tokenizer.decode(tokens[1:-1])
            candidates.append(Candidate(tokenizer.decode([token]).strip(), probability, filled))
        found.append(candidates)
    return found


def load_masked_lm(checkpoint: str) -> Weights:
    """Opens the weights of a masked language model.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: the model is another one.
    """
    weights = load_weights(checkpoint)
    check_masked_lm(weights, checkpoint)
    return weights


def check_masked_lm(weights: Weights, checkpoint: str) -> None:
    """Rejects the weights of a model that fills no masks.

    Raises:
        ConfigError: the reason, and the command for such a model.
    """
    head = weights.config.head
    if head == "embedding":
        fix = f"train it first: samestep train with objective mlm and init_from={checkpoint}"
        # Without its head, a T5 has no decoder either.
        if weights.config.with_settings(head="language_model").encoder_decoder:
            fix = "use one that has it, as a BERT"
        raise ConfigError(
            f"{checkpoint} has no head, and fill needs one that predicts tokens; {fix}"
        )
    if head != "language_model":
        raise ConfigError(
            f"{checkpoint} has the head {head}, which predicts no tokens; use the model that it "
            "was fine-tuned from, or samestep evaluate for its own predictions"
        )
    if weights.config.causal or weights.config.encoder_decoder:
        raise ConfigError(
            f"{checkpoint} generates text from left to right and fills no masks; "
            "use samestep generate"
        )


@torch.no_grad()
def _predict(model: Model, tokens: list[int], masked: list[int], size: int) -> Tensor:
    """Probabilities [masks, size] of the vocabulary's tokens at the masked positions."""
    # One sequence without padding, so its segment is 1 everywhere.
    device = model.token_embeddings.device
    batch = torch.tensor([tokens], device=device)
    inputs = Inputs(
        tokens=batch,
        segments=torch.ones_like(batch),
        positions=torch.arange(batch.shape[1], device=device)[None],
        predicted=torch.tensor([masked], device=device),
    )
    logits: Tensor = model(inputs, frozenset({"tokens"}))["tokens"]
    # The model's table may have more rows than the tokenizer has tokens.
    return logits[0, :, :size].float().softmax(-1).cpu()


def masked_lm_tokens(vocabulary: Vocabulary) -> tuple[int, int, int]:
    """The ids of [CLS], [MASK] and [SEP].

    Raises:
        ConfigError: the tokenizer lacks one.
    """
    cls, mask, sep = vocabulary.cls, vocabulary.mask, vocabulary.sep
    if mask is None or cls is None or sep is None:
        raise ConfigError("the tokenizer has no mask token; use a BERT or RoBERTa model")
    return cls, mask, sep


def encode_masked(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """Tokens of a text between [CLS] and [SEP], and the positions of its masks."""
    # Both spellings are read.
    parts = text.replace("<mask>", "[MASK]").split("[MASK]")
    if len(parts) < 2:
        raise ConfigError(f"{text!r} has no mask; write [MASK] where a word is missing")
    return join_by_masks(tokenizer, parts)


def join_by_masks(tokenizer: Tokenizer, parts: Sequence[str]) -> tuple[list[int], list[int]]:
    """Like `encode_masked`, for the parts of a text before, between and after its masks."""
    cls, mask, sep = masked_lm_tokens(tokenizer.vocabulary)
    # The mask includes the space before it, as in RoBERTa's vocabulary.
    parts = [*(part.rstrip() for part in parts[:-1]), parts[-1]]
    tokens, masked = [cls], []
    # A mask goes between two parts, so before every part but the first.
    for number, ids in enumerate(tokenizer.encode_batch(parts)):
        if number:
            masked.append(len(tokens))
            tokens.append(mask)
        tokens.extend(ids.tolist())
    return [*tokens, sep], masked
