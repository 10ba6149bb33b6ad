"""`samestep data tokenizer`: trains a tokenizer on the text that a dataset is to be built from."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.building.build import rejection
from data_pipeline.building.config import Config
from data_pipeline.building.progress import Meter
from data_pipeline.building.units import hashed_share, limited
from data_pipeline.sources import BadRecord, Source
from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.errors import DataError
from samestep.storage.urls import is_hub_path

logger = logging.getLogger(__name__)


def train_tokenizer(config: Config, force: bool = False) -> Tokenizer:
    """Trains the tokenizer of a dataset on its source, and saves it.

    Raises:
        DataError: one exists already and `force` is false; or a record is bad and `on_error` is
            "stop".
    """
    folder = Path(config.tokenizer.path)
    if is_hub_path(config.tokenizer.path):
        raise DataError(
            f"tokenizer.path {config.tokenizer.path} is trained already. Continue with: samestep "
            "data build CONFIG"
        )
    if not force and folder.exists() and any(folder.iterdir()):
        raise DataError(
            f"{folder} exists already, and datasets may have been built with it. Choose another "
            "tokenizer.path, or replace it with --force."
        )
    with Meter("reading") as meter:
        tokenizer = config.tokenizer.train(_texts(config, meter))
    tokenizer.save(folder)
    size = tokenizer.vocabulary.size
    if size < config.tokenizer.vocab_size:
        logger.warning("the text gives only %d of %d tokens", size, config.tokenizer.vocab_size)
    logger.info("trained %s: %d tokens in %.1f s", folder, size, meter.seconds)
    return tokenizer


def _texts(config: Config, meter: Meter) -> Iterator[str]:
    source: Source = config.source.build()
    sample = config.tokenizer.sample
    read = 0.0
    records = itertools.chain(source.passages(), source.records())
    for record in limited(records, config.limit_bytes):
        meter.advance(record.read - read, len(record.data), 1)
        read = record.read
        try:
            text = source.parse(record)
        except BadRecord as error:
            if config.on_error == "stop":
                raise rejection(source, record.file, record.line, str(error)) from None
            continue
        # By hash, so that the sample depends on the texts alone, not on their order.
        if sample == 1 or hashed_share(text, "sample") < sample:
            yield text
