"""A trained model and its tokenizer in one's own program: predicts, fills masks, encodes texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.errors import ConfigError
from trainer.inference.fill import Candidate, check_masked_lm, fill_masks
from trainer.inference.hidden_states import TextEncoder
from trainer.inference.predict import Prediction, Predictor, Text
from trainer.models import Model
from trainer.models.text_inputs import batches
from trainer.training.weights.loading import load_weights


class TrainedModel:
    """A model and its tokenizer, on the best device available.

    Attributes:
        path: where it was loaded from.
        step: of the checkpoint; None for a Hugging Face model.
        tokenizer: text to ids and back.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._weights = load_weights(path)
        self._encoder = TextEncoder(self._weights)
        self._predictor: Predictor | None = None
        self.step = self._weights.step
        self.tokenizer: Tokenizer = self._encoder.tokenizer

    @property
    def model(self) -> Model:
        """The `torch.nn.Module`, in eval mode."""
        return self._encoder.model

    def fill(self, text: str, top: int = 5) -> list[list[Candidate]]:
        """Returns the `top` most likely tokens for each mask ([MASK] or <mask>) of a text.

        Raises:
            ConfigError: it is no masked language model, or the text has no mask or is too long.
        """
        check_masked_lm(self._weights, self.path)
        return fill_masks(self.model, self.tokenizer, text, top)

    def predict(self, texts: Sequence[Text], batch_tokens: int = 8192) -> list[Prediction]:
        """Returns the prediction of a fine-tuned model for each of the texts, in their order.

        Rows are read as in training: truncated, or cut into windows; and computed in batches of
        similar length.

        Args:
            texts: for classes and numbers, texts, or tuples of texts such as pairs; for tags, texts
                or lists of words; for answers, pairs of a question and a text.
            batch_tokens: positions computed at a time, padding included.

        Returns:
            A `ClassPrediction`, `NumberPrediction`, `TagsPrediction` or `AnswerPrediction` for each
            text.

        Raises:
            ConfigError: the model has no head for a task, or an entry holds no such text.
        """
        if self._predictor is None:
            self._predictor = Predictor(self._weights, self.path, self.model)
        return self._predictor(texts, batch_tokens)

    def encode(
        self, texts: Sequence[str], layer: int = -1, batch_tokens: int = 8192
    ) -> list[Tensor]:
        """Returns the hidden states of each text, special tokens included: fp32 [S, D] on the host.

        Texts that are too long for the model are truncated, with a warning.

        Args:
            layer: from 1, or from the last with -1, -2, ...; 0 is the embeddings.
            batch_tokens: positions computed at a time, padding included.

        Raises:
            ConfigError: the model has no such layer, or `texts` is a single text.
        """
        if isinstance(texts, str):
            raise ConfigError(f"texts is the single text {texts!r}; pass a list of texts")
        number = self._encoder.layer(layer, "layer")
        tokens = self.tokenizer.encode_batch(texts)
        longest = self._encoder.longest
        self._encoder.warn_of_truncation(sum(len(ids) > longest for ids in tokens), len(tokens))
        prepared = [self._encoder.prepare(ids) for ids in tokens]
        lengths = np.array([len(ids) for ids in prepared], dtype=np.int64)
        found: dict[int, Tensor] = {}
        for rows in batches(lengths, batch_tokens):
            _, states = self._encoder([prepared[row] for row in rows], {number})
            for row, state in zip(rows.tolist(), states[number].cpu(), strict=True):
                found[row] = state[: lengths[row]].clone()
        return [found[row] for row in range(len(prepared))]


def load_model(path: str | Path) -> TrainedModel:
    """Loads a trained model and its tokenizer.

    Args:
        path: a run (its newest checkpoint), RUN/best, a step's folder or address, or a Hugging
            Face folder, as `samestep export` writes; or hf://NAME.

    Raises:
        CheckpointError: none of these is there, or it is damaged.
        ConfigError: the model reads columns that only its objective makes.
    """
    return TrainedModel(str(path))
