"""Tables whose rows become text pairs by templates: tasks as T5 reads them, text to text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from data_pipeline.sources import PairSource
from data_pipeline.sources.columns import check_labels, index_of, row_of
from data_pipeline.sources.table import TableSource
from data_pipeline.sources.templates import TemplateConfig, columns_of, value_of, write


@dataclass(frozen=True, kw_only=True)
class Config(TemplateConfig):
    """Where the rows are, and how sources and targets are made of their columns.

    Attributes:
        source: the source: a template, as "mnli hypothesis: {hypothesis} premise: {premise}", or a
            column, in whose name dots reach into nested objects.
        target: the target, in the same way; with `labels`, the column of the class: one of them,
            or, if no label is a number, its index among them.
        labels: all possible targets. A generated text that is none of them is a wrong answer.
        prefix: prepended to each source, as "translate English to German: ".
    """

    source: str = "source"
    target: str = "target"
    labels: tuple[str, ...] = ()
    prefix: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        columns_of((self.source, self.target))
        if self.labels:
            check_labels(self.labels)

    def at(self, paths: tuple[str, ...]) -> Config:
        """Returns the settings for pairs of the same format in other files."""
        # Without these, the pairs would come with the ones of the run's own dataset.
        return replace(self, paths=paths, heldout=(), dataset=None)

    def build(self) -> TablePairs:
        """Finds the files."""
        return TablePairs(**self.find(), prefix=self.prefix, config=self)


@dataclass(frozen=True)
class TablePairs(TableSource, PairSource):
    """Makes a source and a target of each row."""

    config: Config

    @property
    def columns(self) -> tuple[str, ...]:
        return columns_of((self.config.source, self.config.target))

    @property
    def numbered(self) -> Mapping[str, tuple[str, ...]]:
        config = self.config
        if not config.labels or config.target in config.words:  # words names values of the column
            return {}
        return {config.target: config.labels}

    def decode_pair(self, data: bytes) -> tuple[str, str]:
        config, row = self.config, row_of(data)
        source = write(row, config.source, config.words)
        if not config.labels:
            return source, write(row, config.target, config.words)
        # The name of the label is the target, whether the row gives its name or its index.
        label = value_of(row, config.target, config.words)
        return source, config.labels[index_of(label, config.labels, config.target)]
