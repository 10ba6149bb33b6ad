"""Classifiers that encode the two texts of a pair apart: the baselines of GLUE and SuperGLUE.

Each text becomes a vector, the mean of its words' vectors (CBoW) or the maximum of the states of
LSTM layers in both directions (Wang et al. 2019, section 5.1). A text u, or a pair u and v, has the
features [u, v, |u - v|, u * v] for a layer with ReLU and a classifier. With attention, each word of
a pair also reads a mean of the other text's states, and another LSTM layer reads both (a BiDAF that
is simplified, as in the published code, jiant).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models.base import matrix_flops
from trainer.models.extras.head_lstm import HeadLstm
from trainer.models.layers.dropout import dropout, split_key

TextPooling: TypeAlias = Literal["max", "mean"]


@dataclass(frozen=True)
class Sentences:
    """How two texts are encoded apart and compared.

    Attributes:
        layers: number of LSTM layers in both directions; 0: none, as in CBoW.
        hidden_size: H, of each direction.
        attention: whether the words of a pair read the other text, with one more LSTM layer.
        pooling: what stands for a text: the maximum (`max`) or the mean (`mean`) of its words'.
        classifier_width: of the hidden layer of the classifier.
        dropout: rate of what is read, of each LSTM layer's output, and within the classifier.
    """

    layers: int = 2
    hidden_size: int = 1500
    attention: bool = False
    pooling: TextPooling = "max"
    classifier_width: int = 512
    dropout: float = 0.2

    def __post_init__(self) -> None:
        if self.layers < 0 or self.hidden_size < 1 or self.classifier_width < 1:
            raise ConfigError(
                f"layers is {self.layers}, hidden_size {self.hidden_size} and classifier_width "
                f"{self.classifier_width}. Use 0 or more layers, and widths of 1 or more."
            )
        if self.attention and not self.layers:
            raise ConfigError(
                "attention is true without LSTM layers. Set layers to 1 or more, or attention to "
                "false."
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}. Use a number in [0, 1).")


def number_texts(token_types: Tensor | None, segments: Tensor | None) -> Tensor:
    """The text of each position: 1, 2 in the second text of a pair, 0 for padding; int [B, S].

    Raises:
        ConfigError: the rows do not tell the texts apart.
    """
    if token_types is None:
        raise ConfigError(
            "model.sentences encodes two texts apart, and the rows of this tokenizer have no "
            "token types. Use a tokenizer made for BERT, and leave objective.reads out."
        )
    return token_types + 1 if segments is None else (token_types + 1) * (segments > 0)


def number_words(texts: Tensor) -> Tensor:
    """The same without special tokens: the first position, and the last one of each text."""
    # [CLS] a b [SEP] c [SEP] [PAD]
    #   1   1 1   1   2   2     0      texts
    #   0   1 1   0   2   0     0      words
    # The words' numbers are segments to the LSTM layers, so no state passes from text to text.
    is_last = F.pad(texts[:, 1:] != texts[:, :-1], (0, 1), value=True)
    is_first = torch.arange(texts.shape[1], device=texts.device) == 0
    return texts.masked_fill(is_last | is_first, 0)


class SentenceClassifier(nn.Module):
    """Scores texts and pairs by the vectors of their texts; see the module.

    Args:
        width: D, of what is read.
        classes: C.
    """

    def __init__(self, config: Sentences, width: int, classes: int) -> None:
        super().__init__()
        self.config = config
        inner = 2 * config.hidden_size if config.layers else width
        top = 1 if config.attention else 0
        rate = config.dropout
        # Without layers the vectors themselves are pooled, as in CBoW.
        self.lstm = HeadLstm(config.layers, width, rate, inner) if config.layers else None
        self.attended = HeadLstm(top, 2 * inner, rate, inner) if config.attention else None
        self.dense = nn.Linear(4 * inner, config.classifier_width)
        self.classifier = nn.Linear(config.classifier_width, classes)

    def flops(self, sequence_length: int) -> tuple[int, int]:
        """FLOPs for each position, and for each row: 6 per weight, 12 S D for attention."""
        layers = [each for each in (self.lstm, self.attended) if each is not None]
        across = 24 * sequence_length * self.config.hidden_size if self.config.attention else 0
        of_positions = sum(matrix_flops(each) for each in layers) + across
        return of_positions, matrix_flops(self.dense) + matrix_flops(self.classifier)

    def forward(self, hidden: Tensor, texts: Tensor, key: Tensor | None = None) -> Tensor:
        """[B, S, D] -> logits [B, C].

        Args:
            texts: int [B, S], see `number_texts`.
            key: int32 [B], of dropout; None: no dropout.
        """
        rate, words = self.config.dropout, number_words(texts)
        keys = (None,) * 5 if key is None else split_key(key, 5).unbind()
        is_pair = (words == 2).any(1, keepdim=True)
        hidden = dropout(hidden, rate, keys[0])
        if self.lstm is not None:
            hidden = self.lstm(hidden, words, keys[1])
        # A single text has no other to read: it keeps the states of the layers below.
        if self.attended is not None:
            both = torch.cat([hidden, attend_across(hidden, words)], -1)
            hidden = torch.where(is_pair[..., None], self.attended(both, words, keys[2]), hidden)
        first, second = (pool_text(hidden, words == text, self.config.pooling) for text in (1, 2))
        # Of a single text u the features are [u, 0, 0, 0], not a comparison with nothing.
        compared = torch.cat([second, (first - second).abs(), first * second], -1)
        features = torch.cat([first, compared * is_pair], -1)
        inner = F.relu(self.dense(dropout(features, rate, keys[3])))
        logits: Tensor = self.classifier(dropout(inner, rate, keys[4]))
        return logits


def attend_across(hidden: Tensor, words: Tensor) -> Tensor:
    """For each word, a mean of the other text's states by dot products; 0 for all other positions.

    Args:
        hidden: [B, S, D].
        words: int [B, S], see `number_words`.
    """
    of_query, of_key = words[:, :, None], words[:, None]
    is_other = (of_query != of_key) & (of_query > 0) & (of_key > 0)
    # A position that may read nothing has equal shares of all, which the mask then removes.
    scores = hidden @ hidden.transpose(1, 2)
    shares = scores.float().masked_fill(~is_other, torch.finfo(torch.float32).min).softmax(-1)
    return (shares * is_other).to(hidden.dtype) @ hidden


def pool_text(hidden: Tensor, is_word: Tensor, pooling: TextPooling) -> Tensor:
    """The maximum or mean of a text's words, [B, S, D] -> [B, D]; 0 for a text without words."""
    is_word = is_word[..., None]
    if pooling == "mean":
        total = hidden.masked_fill(~is_word, 0.0).sum(1)
        return total / is_word.sum(1).clamp(min=1).to(total.dtype)
    # Padding must not win against negative states.
    highest = hidden.masked_fill(~is_word, float("-inf")).amax(1)
    return torch.where(is_word.any(1), highest, 0.0)
