"""`samestep data build`: raw text to a dataset folder of shards, in parallel, resumable and the
same every time.

One coordinator reads the source in order and cuts it into units (`units`); worker processes turn
each unit into its shards and leave its outcome in `DIR/.build`. A build that was stopped, at any
moment and by anything, goes on with the units that have no outcome of the same input and settings.
The manifest gathers the outcomes and is written last.

The units may also be shared out among several builds at once, on one machine or many (`slices`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from data_pipeline.building import pool
from data_pipeline.building.progress import Meter
from data_pipeline.building.slices import Claim, Slice
from data_pipeline.building.units import Outcome, Unit, UnitWriter, cut, limited, outcome_path
from data_pipeline.building.verify import verify
from data_pipeline.format.manifest import FORMAT, MANIFEST, Manifest, ShardInfo, token_dtype
from data_pipeline.sources import PairSource, Source, SourceConfig, TaskSource
from data_pipeline.tokenizers.sentences import Splitter, splitter_version
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer.config import Kinds, Tree, renamed, to_tree
from trainer.config.sizes import parse_size
from trainer.errors import ConfigError, DataError
from trainer.storage import atomic_write, shown

logger = logging.getLogger(__name__)

_MANY_UNKNOWN = 1e-3  # a usual share is far less
_MOST_NAMED = 3  # files in a message
_SHARD_NAME = re.compile(r"(train|heldout)-\d{6,}\.tar")


@dataclass(frozen=True)
class Config:
    """A dataset: what it is made from, and how.

    Attributes:
        source: where the raw text comes from.
        tokenizer: the tokenizer, and how `samestep data tokenizer` trains it.
        output: the dataset's folder.
        heldout_fraction: share of the documents, chosen by the hash of their text, that is kept for
            evaluation; not used where the source names files for that.
        shard_bytes: raw text that goes into one shard, which is also the unit of work.
        limit: how much of the source is read, decompressed, such as "1GB": its first documents;
            None means all of it.
        sentences: how documents are split into sentences, which `packing: pairs` needs: "rules"
            (marks and blank lines) or "lines" (each line is a sentence); None leaves boundaries
            out.
        workers: processes; None means one a core.
        on_error: what a record that holds no document does: "stop" the build, or be counted, listed
            and left out ("skip").
    """

    source: Annotated[SourceConfig, Kinds("data_pipeline.sources")]
    tokenizer: TokenizerConfig
    output: str
    heldout_fraction: float = 0.005
    shard_bytes: int = 2**25
    limit: str | None = None
    sentences: Splitter | None = None
    workers: int | None = None
    on_error: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        if not 0 <= self.heldout_fraction < 1:
            raise ConfigError(
                "heldout_fraction is a share of the documents in [0, 1), not "
                f"{self.heldout_fraction}"
            )
        if self.shard_bytes < 1:
            raise ConfigError(
                f"shard_bytes must be at least 1, not {self.shard_bytes}; the default is {2**25}"
            )
        if self.workers is not None and self.workers < 1:
            raise ConfigError(
                f"workers must be at least 1, not {self.workers}; leave it out for one a core"
            )
        _ = self.limit_bytes  # refuses what is no size

    @property
    def limit_bytes(self) -> int | None:
        """The limit in bytes."""
        return None if self.limit is None else parse_size(self.limit, "limit")


def build(config: Config, force: bool = False) -> Manifest:
    """Builds a dataset, or goes on with a build that was stopped.

    Args:
        config: what to build.
        force: whether a finished dataset of other settings may be replaced.

    Returns:
        The manifest, also where the finished dataset was there already.

    Raises:
        ConfigError: the source has no files.
        DataError: a record is bad and `on_error` is "stop", the folder is not free for this, or it
            cannot be written.
    """
    built = _Build(config).run(force)
    assert built is not None
    return built


def check(config: Config) -> None:
    """Refuses what `build` would before it reads any text.

    Raises:
        ConfigError: the source has no files.
        DataError: there is no tokenizer.
    """
    _Build(config)


def build_slice(config: Config, part: Slice) -> Manifest | None:
    """Builds a slice of a dataset.

    The one that finds the units of all others there makes the dataset of them.

    Returns:
        The manifest, also where the finished dataset was there already; None where others still
        have units to make.

    Raises:
        ConfigError: the source has no files.
        DataError: as `build`; or the same slice is being built by another process, or the finished
            dataset is damaged.
    """
    return _Build(config, part).run()


class _Build:
    """One build: what it makes, where, and what it has counted."""

    def __init__(self, config: Config, part: Slice | None = None) -> None:
        self.config = config
        self.part = part
        self.folder = Path(config.output)
        self.tokenizer = Tokenizer.load(config.tokenizer.path)
        self.source: Source = config.source.build()
        self.settings: Tree = {
            "heldout_fraction": config.heldout_fraction,
            "shard_bytes": config.shard_bytes,
        }
        if config.limit_bytes is not None:  # so that datasets built without one are what they were
            self.settings["limit"] = config.limit_bytes
        if config.sentences is not None:
            self.settings["sentences"] = splitter_version(config.sentences)
        if isinstance(self.source, PairSource):
            if config.sentences is not None:
                raise ConfigError(
                    f"sentences is {config.sentences}, and pairs of texts have none; leave it out"
                )
            self.settings["target_file"] = self.source.target_file
        if isinstance(self.source, TaskSource):
            if config.sentences is not None:
                raise ConfigError(
                    f"sentences is {config.sentences}, and rows of a task have none; leave it out"
                )
            self.settings["task"] = {"target": self.source.kind, "labels": list(self.source.labels)}
        # Not the signatures of addresses: datasets are passed on, and the next signature names the
        # same text.
        self.files = tuple(map(shown, self.source.files))
        self.source_tree: Tree = to_tree(config)["source"]
        for name in [
            name for name in self.source_tree if name.endswith("paths") or name == "heldout"
        ]:
            self.source_tree[name] = [shown(path) for path in self.source_tree[name]]
        recipe = [
            FORMAT,
            self.tokenizer.fingerprint,
            self.source_tree,
            _original_settings(self.settings),
        ]
        self.digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
        self.units: list[str] = []  # digest of each, of other slices too
        self.unknown = 0
        self.stopped_by: list[
            tuple[int, tuple[int, int, str]]
        ] = []  # unit, its first rejected record

    def run(self, force: bool = False) -> Manifest | None:
        if (
            not force
            and (self.folder / MANIFEST).exists()
            and not (self.folder / ".build").exists()
        ):
            return self._finished_already()
        before = _cpu_seconds()
        with Claim(self.folder, self.part) as claim:
            with claim.door():
                alone = claim.enter()
                # Finished while this one waited, or by one killed before all was tidy. Listed,
                # since a network file system asks its server for a list, and may remember of a
                # single name that it was missing.
                if not force and MANIFEST in os.listdir(self.folder):
                    found = self._finished_already()
                    if alone:
                        self._tidy(found)
                    return found
                if alone:
                    (self.folder / MANIFEST).unlink(missing_ok=True)
                    self.tokenizer.save(self.folder / "tokenizer")
                claim.stay(self.digest, alone)
            meter = self._make_units()
            with claim.door():
                if self.part is not None and not self._is_last(claim.end()):
                    return None
                built = self._gather()
                built.save(self.folder)
                self._tidy(built)
        self._report(built, meter, _cpu_seconds() - before)
        if self.part is not None and (problems := verify(self.folder)):
            raise DataError(
                f"{self.folder} is damaged ({len(problems)} problems): {problems[0]}; build it "
                "again with --force"
            )
        return built

    def _finished_already(self) -> Manifest:
        found = Manifest.load(self.folder)
        same = (found.tokenizer_fingerprint, found.source, found.settings, found.files)
        if same != (self.tokenizer.fingerprint, self.source_tree, self.settings, self.files):
            raise DataError(
                f"{self.folder} holds a finished dataset that was built from another source, "
                "tokenizer or settings; "
                f"choose another folder with output=DIR, or replace it with --force"
            )
        logger.info(
            "%s is built already; if the source files have changed, build it again with --force",
            self.folder,
        )
        return found

    def _make_units(self) -> Meter:
        """Makes every unit of this build that is not there yet; returns what was counted."""
        settings = (self.config.heldout_fraction, self.digest, self.config.sentences)
        start = partial(UnitWriter, self.folder, self.source, *settings)
        workers = self.config.workers or _cores()
        try:
            with (
                Meter("building" if self.part is None else f"building slice {self.part}") as meter,
                closing(pool.process(self._missing_units(meter), start, workers)) as results,
            ):
                for unit, outcome in results:
                    self._check(unit.index, outcome)
                    meter.advance(unit.share, unit.size, outcome.documents_in)
        except KeyboardInterrupt:
            logger.warning(
                "stopped; the shards finished so far are kept: run the same command again to go on"
            )
            raise
        self._stop_if_rejected()
        if self.part is not None and self.part.index > len(self.units):
            logger.info(
                "slice %s has nothing to make: the source gives %d units only",
                self.part,
                len(self.units),
            )
        return meter

    def _missing_units(self, meter: Meter) -> Iterator[Unit]:
        for unit in cut(
            limited(self.source.records(), self.config.limit_bytes), self.config.shard_bytes
        ):
            if (
                self.stopped_by
            ):  # units that came before are finished still: the first bad record of all is reported
                return
            self.units.append(unit.digest)
            if self.part is not None and not self.part.has(unit.index):
                meter.advance(unit.share, 0, len(unit.records))
            elif outcome := self._outcome(unit.index):
                self._check(unit.index, outcome)
                meter.advance(unit.share, 0, outcome.documents_in)
            else:
                yield unit

    def _outcome(self, index: int) -> Outcome | None:
        """The outcome on disk of a unit if it is what the unit would give now, and its shards are
        whole.
        """
        outcome = Outcome.load(outcome_path(self.folder, index))
        if outcome is None or (outcome.build, outcome.digest) != (self.digest, self.units[index]):
            return None
        paths = {self.folder / shard.name: shard.bytes for shard in outcome.shards.values()}
        return (
            outcome
            if all(path.exists() and path.stat().st_size == size for path, size in paths.items())
            else None
        )

    def _check(self, index: int, outcome: Outcome) -> None:
        if outcome.rejected and self.config.on_error == "stop":
            self.stopped_by.append((index, outcome.rejected[0]))

    def _stop_if_rejected(self) -> None:
        if self.stopped_by:
            raise rejection(self.source, *min(self.stopped_by)[1])

    def _is_last(self, alone: bool) -> bool:
        """Whether this slice finds all units there and nobody else at work, and so merges.

        If not, says why.

        Raises:
            DataError: a unit of another slice has a bad record.
        """
        there = set(os.listdir(self.folder / ".build"))  # before any is opened, as in `run`
        missing = 0
        for index in range(len(self.units)):
            if outcome_path(self.folder, index).name not in there:
                missing += 1
            elif (
                alone
            ):  # else others may wait at the door meanwhile, and the last of them looks closely
                if outcome := self._outcome(index):
                    self._check(index, outcome)
                else:
                    missing += 1
        if alone and not missing:
            self._stop_if_rejected()
            return True
        left = (
            f"others still have to make {missing} of {len(self.units)} units"
            if missing
            else "others are at work still"
        )
        logger.info(
            "slice %s of %s is done: %s, and the last one merges", self.part, self.folder, left
        )
        return False

    def _gather(self) -> Manifest:
        """Makes the manifest of the outcomes, and lists what was rejected."""
        splits: dict[str, list[ShardInfo]] = {"train": [], "heldout": []}
        reasons: Counter[str] = Counter()
        documents_in = 0
        with atomic_write(self.folder / "rejected.jsonl") as file:
            for index in range(len(self.units)):
                outcome = Outcome.load(outcome_path(self.folder, index))
                assert outcome is not None
                documents_in += outcome.documents_in
                self.unknown += outcome.unknown
                for split, shard in outcome.shards.items():
                    splits[split].append(shard)
                for name, line, reason in outcome.rejected:
                    reasons[reason] += 1
                    entry = {"file": self.files[name], "line": line, "reason": reason}
                    file.write(json.dumps(entry).encode() + b"\n")
        if not reasons:
            (self.folder / "rejected.jsonl").unlink()
        first_heldout = (
            self.source.first_heldout if isinstance(self.source, (TaskSource, PairSource)) else None
        )
        counts = f"{documents_in} read, {reasons.total()} rejected ({dict(reasons)})"
        if first_heldout is not None and not splits["heldout"]:
            limit = (
                "" if self.config.limit is None else f", raise limit, which is {self.config.limit},"
            )
            names = ", ".join(self.files[first_heldout : first_heldout + _MOST_NAMED])
            raise DataError(
                "the source's files of held-out rows give none: "
                f"{names}{' ...' * (len(self.files) > _MOST_NAMED)} "
                f"({counts}); correct them{limit} or leave them out"
            )
        if not splits["train"] and first_heldout != 0:  # unless it was given nothing to train on
            raise DataError(
                f"the source holds no document to train on: {counts}; correct source or "
                "heldout_fraction"
            )
        vocab_size = self.tokenizer.vocabulary.size
        return Manifest(
            format=FORMAT,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            vocab_size=vocab_size,
            dtype=token_dtype(vocab_size).name,
            source=self.source_tree,
            files=self.files,
            documents_in=documents_in,
            documents_rejected=dict(reasons),
            splits={split: tuple(shards) for split, shards in splits.items()},
            settings=self.settings,
        )

    def _tidy(self, built: Manifest) -> None:
        """Removes the outcomes, and shards and temporary files that stopped builds of other
        settings or input left.
        """
        names = {shard.name for shard in built.shards}
        for path in self.folder.iterdir():
            if path.name.endswith(".tmp") or (
                _SHARD_NAME.fullmatch(path.name) and path.name not in names
            ):
                path.unlink()
        shutil.rmtree(self.folder / ".build", ignore_errors=True)  # of NFS, for one: see Claim

    def _report(self, built: Manifest, meter: Meter, cpu_seconds: float) -> None:
        for reason, count in built.documents_rejected.items():
            logger.warning(
                "rejected %d: %s (each listed in %s/rejected.jsonl)", count, reason, self.folder
            )
        tokens = sum(shard.tokens for shard in built.shards)
        if self.unknown > _MANY_UNKNOWN * tokens:
            logger.warning(
                "%.2f %% of the tokens stand for text that the tokenizer does not know (%s): a "
                "model cannot learn it; "
                "look with samestep data show, and use a tokenizer of text like this, or for one "
                "of SentencePiece "
                "a larger tokenizer.character_coverage or byte_fallback",
                100 * self.unknown / tokens,
                f"{self.unknown:,}",
            )
        if not built.splits["train"]:
            logger.warning("all rows are held out: this dataset is for evaluation only")
        if not built.splits["heldout"]:
            logger.warning(
                "no document is held out for evaluation; raise heldout_fraction to have some"
            )
        logger.info(
            "built %s: %s documents, %s tokens, %d shards in %.1f s, %.2f MB per CPU-second",
            self.folder,
            f"{sum(shard.documents for shard in built.shards):,}",
            f"{tokens:,}",
            len(built.shards),
            meter.seconds,
            meter.megabytes / cpu_seconds,
        )


def _original_settings(settings: Tree) -> Tree:
    """The settings with their original names, so that builds from before a renaming can resume."""
    original: Tree = renamed.original({"settings": settings})["settings"]
    return original


def rejection(source: Source, file: int, line: int, reason: str) -> DataError:
    """The error that names a record which holds no document."""
    return DataError(
        f"{shown(source.files[file])}:{line}: {reason}; correct it, or leave such documents out "
        "with on_error=skip, "
        f"which counts and lists them"
    )


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
