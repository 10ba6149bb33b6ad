"""The settings of `samestep vectors`, and the defaults of each method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from samestep.errors import ConfigError

Method: TypeAlias = Literal["skipgram", "cbow", "glove", "ppmi"]
Units: TypeAlias = Literal["words", "tokens"]

METHODS: tuple[Method, ...] = get_args(Method)
UNITS: tuple[Units, ...] = get_args(Units)
WIDEST_WINDOW = 20
"""Counts are integers of 64 bits; wider windows could overflow them (see `cooccurrence`)."""

# The defaults of word2vec.c and of Stanford's GloVe. CBOW takes a higher rate, as the gradient of a
# mean is shared by all words of a window.
DEFAULTS: dict[Method, dict[str, float]] = {
    "skipgram": {"epochs": 5, "rate": 0.025, "negatives": 5, "subsample": 1e-3},
    "cbow": {"epochs": 5, "rate": 0.05, "negatives": 5, "subsample": 1e-3},
    "glove": {"epochs": 25, "rate": 0.05, "x_max": 100.0},
    "ppmi": {},
}
"""The settings that only some methods have."""


@dataclass(frozen=True)
class Settings:
    """Settings of a dataset's word vectors.

    Settings that a method does not have are 0.

    Attributes:
        method: skip-gram or CBOW with negative sampling, GloVe, or the SVD of a PPMI matrix.
        dimensions: D, of each vector.
        window: number of words on each side that count as the context.
        units: that get a vector: words, or the tokens of the dataset's tokenizer.
        min_count: less frequent words are left out, as if they were not in the text.
        seed: of all random choices.
        epochs: passes over the text, or over the counts of GloVe.
        rate: learning rate; word2vec's falls linearly to a ten-thousandth of it.
        negatives: random words for each predicted one.
        subsample: words of a higher relative frequency are skipped at random; 0 skips none.
        batch_size: predictions, or counts of GloVe, that are computed with the same vectors.
        x_max: pairs with this count or more have weight 1 in GloVe's cost.
    """

    method: Method
    dimensions: int = 100
    window: int = 5
    units: Units = "words"
    min_count: int = 5
    seed: int = 0
    epochs: int = 0
    rate: float = 0.0
    negatives: int = 0
    subsample: float = 0.0
    batch_size: int = 1024
    x_max: float = 0.0

    @classmethod
    def of(cls, method: Method, given: dict[str, int | float | str | None]) -> Settings:
        """Fills up with the defaults of the method; None stands for a setting that is not given.

        Raises:
            ConfigError: the method has no such setting, or a value is out of range.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        own = DEFAULTS[method]
        for name in sorted({name for all_ in DEFAULTS.values() for name in all_} - own.keys()):
            if name in chosen:
                having = [other for other in METHODS if name in DEFAULTS[other]]
                raise ConfigError(
                    f"{_option(name)} is {chosen[name]}, and --method {method} has no such "
                    f"setting. Leave it out, or use --method {' or '.join(having)}."
                )
        return cls(method, **{**own, **chosen})  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        least = {"dimensions": 1, "window": 1, "min_count": 1, "seed": 0, "batch_size": 1}
        if "epochs" in (own := DEFAULTS[self.method]):
            least["epochs"] = 1
        if "negatives" in own:
            least["negatives"] = 1
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(
                    f"{_option(name)} must be at least {bound}, not {getattr(self, name)}"
                )
        if self.window > WIDEST_WINDOW:
            raise ConfigError(f"--window must be at most {WIDEST_WINDOW}, not {self.window}")
        for name in {"rate", "x_max"} & own.keys():
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{_option(name)} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.subsample <= 1:
            raise ConfigError(f"--subsample must be in [0, 1], not {self.subsample}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
