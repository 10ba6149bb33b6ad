"""`samestep data build`: turns raw text into a dataset folder of shards, in parallel.

A build can be resumed, and the result is the same every time. One coordinator reads the source in
order and splits it into units (`units`); worker processes turn each unit into its shards and store
its outcome in `DIR/.build`. A build that was stopped, at any moment and by anything, resumes with
the units that have no outcome of the same input and settings. The manifest collects the outcomes
and is written last.

Several builds can also share the units, on one machine or many (`slices`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_pipeline import dedup
from data_pipeline.building import duplicates, example_counts, pool, special_names
from data_pipeline.building.config import Config
from data_pipeline.building.progress import Meter
from data_pipeline.building.slices import Claim, Slice
from data_pipeline.building.units import (
    LEFT_OUT,
    Outcome,
    Unit,
    UnitWriter,
    cut,
    first_rows,
    limited,
    outcome_path,
    texts_path,
)
from data_pipeline.building.verify import small_files, verify
from data_pipeline.format.manifest import (
    FORMAT,
    MANIFEST,
    SPLIT_UP,
    Manifest,
    ShardInfo,
    token_dtype,
)
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.label_counts import log_counts
from data_pipeline.sources import INVALID, UTF8, PairSource, Source, TaskSource, fault
from data_pipeline.sources.encodings import normalized
from data_pipeline.tokenizers.sentences import splitter_version
from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.config import Tree, renamed, to_tree
from samestep.errors import ConfigError, DataError
from samestep.storage import atomic_write, shown

if TYPE_CHECKING:
    from data_pipeline.building import passages

logger = logging.getLogger(__name__)

_MANY_UNKNOWN = 1e-3  # fraction of tokens; usual text has far fewer
_SHARD_NAME = re.compile(r"(train|heldout|passages)-\d{6,}\.tar")


def build(config: Config, force: bool = False, part: Slice | None = None) -> Manifest | None:
    """Builds a dataset, or resumes a build that was stopped.

    Args:
        config: what to build.
        force: replace a finished dataset of other settings.
        part: the slice to build; None builds all. The slice that finds the units of all others
            finished completes the dataset.

    Returns:
        The manifest, also if the dataset was finished before; None if other slices still have units
        to build.

    Raises:
        ConfigError: the source has no files.
        DataError: a record is bad and `on_error` is "stop"; the folder is used by something else or
            cannot be written; another process builds the same slice; or the finished dataset is
            damaged.
    """
    return _Build(config, part).run(force)


def check(config: Config) -> None:
    """Rejects what `build` would reject before it reads any text.

    Raises:
        ConfigError: the source has no files.
        DataError: there is no tokenizer.
    """
    _Build(config, None)


class _Build:
    """One build: its inputs, its folder and its counts."""

    def __init__(self, config: Config, part: Slice | None) -> None:
        self.config = config
        self.part = part
        self.folder = Path(config.output)
        tokenizer = Tokenizer.load(config.tokenizer.path)
        self.tokenizer = tokenizer.with_content(config.content_tokens)
        self.source: Source = config.source.build()
        self.settings: Tree = {
            "heldout_fraction": config.heldout_fraction,
            "shard_bytes": config.shard_bytes,
        }
        # Optional settings are left out, so the digests of datasets without them never change.
        if config.limit_bytes is not None:
            self.settings["limit"] = config.limit_bytes
        if config.rows is not None:
            if self.source.first_heldout is None:
                raise ConfigError(
                    f"rows is {config.rows}, and source.heldout is not set. Name held-out files or "
                    "a held-out split, so that held-out rows do not change with rows."
                )
            self.settings["rows"] = config.rows
        if isinstance(self.source, PairSource):
            self.settings["target_file"] = self.source.target_file
        if isinstance(self.source, TaskSource):
            self.settings["task"] = {"target": self.source.kind, "labels": list(self.source.labels)}
        if config.sentences is not None:
            if isinstance(self.source, (PairSource, TaskSource)):
                raise ConfigError(
                    f"sentences is {config.sentences}, but pairs and rows of a task have none. "
                    "Leave it out."
                )
            self.settings["sentences"] = splitter_version(config.sentences)
        if config.dedup is not None:
            self._check_dedup()
            self.settings["dedup"] = config.dedup.settings()
        self.test = None if config.decontaminate is None else config.decontaminate.build()
        if config.decontaminate is not None and self.test is not None:
            ngram = {"ngram": config.decontaminate.ngram, "shortest": config.decontaminate.shortest}
            self.settings["decontaminate"] = ngram | self.test.settings()
        # Without the signatures in addresses: the next signature names the same text, and datasets
        # are given to others.
        self.files = tuple(map(shown, self.source.files))
        self.source_tree: Tree = to_tree(config)["source"]
        for name in self.source_tree:
            if name.endswith("paths") or name in ("heldout", "passages"):
                self.source_tree[name] = list(map(shown, self.source_tree[name]))
        # Left out if they are not used, as in builds from before they existed.
        if not self.source_tree.get("header", True):
            del self.source_tree["header"]
        if encoding := self.source_tree.pop("encoding", None):
            encoding = normalized(encoding)
            self.source_tree |= {} if encoding == UTF8 else {"encoding": encoding}
        # With the names of settings in digests, so that unfinished builds can resume.
        original = renamed.original({"settings": self.settings})["settings"]
        recipe = [FORMAT, self.tokenizer.fingerprint, self.source_tree, original]
        self.digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
        self.left_out: list[frozenset[int]] = []  # records that repeat others, by unit
        self.units: list[str] = []  # digest of each unit, also of other slices
        self.unknown = 0
        self.special_names: Counter[str] = Counter()
        self.passages: passages.Numbers | None = None  # of retrieval, once they are known
        self.writer: type[UnitWriter] = UnitWriter
        self.examples: defaultdict[str, list[dict[str, int]]] = defaultdict(list)
        self.rejected: list[tuple[int, tuple[int, int, str]]] = []  # unit, its first bad record

    def run(self, force: bool) -> Manifest | None:
        is_finished = (self.folder / MANIFEST).exists() and not (self.folder / ".build").exists()
        if is_finished and not force:
            return self._finished_before()
        before = _cpu_seconds()
        with Claim(self.folder, self.part) as claim:
            with claim.door():
                alone = claim.enter()
                # Another build may have finished while this one waited, or was killed before it
                # tidied up. The folder is listed because a network file system may remember that a
                # single name was missing, but asks its server for a list.
                if not force and MANIFEST in os.listdir(self.folder):
                    found = self._finished_before()
                    if alone:
                        self._tidy(found)
                    return found
                if alone:
                    (self.folder / MANIFEST).unlink(missing_ok=True)
                    self.tokenizer.save(self.folder / "tokenizer")
                claim.stay(self.digest, alone)
            if self.config.dedup is not None:
                self._find_duplicates(self.config.dedup)
            if self.settings.get("task", {}).get("target") == "retrieval":
                self._number_passages()
            meter = self._build_units()
            with claim.door():
                if self.part is not None and not self._is_last(self.part, claim.end()):
                    return None
                built = self._collect()
                # Before the manifest, with which the dataset is finished.
                example_counts.save(self.folder, built, self.examples)
                built.save(self.folder)
                self._tidy(built)
        self._report(built, meter, _cpu_seconds() - before)
        # The units of other slices were built elsewhere, and this build has checked their sizes
        # only.
        if self.part is not None and (problems := verify(self.folder)):
            raise DataError(
                f"{self.folder} is damaged ({len(problems)} problems): {problems[0]}. Build it "
                "again with --force."
            )
        return built

    def _finished_before(self) -> Manifest:
        found = Manifest.load(self.folder)
        same = (found.tokenizer_fingerprint, found.source, found.settings, found.files)
        if same != (self.tokenizer.fingerprint, self.source_tree, self.settings, self.files):
            raise DataError(
                f"{self.folder} holds a finished dataset that was built from another source, "
                "tokenizer or settings. Choose another folder with output=DIR, or replace it with "
                "--force."
            )
        logger.info(
            "%s is built already. If the source files have changed, build it again with --force.",
            self.folder,
        )
        return found

    def _check_dedup(self) -> None:
        """Rejects what cannot be compared."""
        if isinstance(self.source, TaskSource):
            raise ConfigError(
                "dedup is for documents and pairs, and the source has the rows of a task. Leave it "
                "out."
            )
        if self.part is not None:
            raise ConfigError(
                f"--slice {self.part} builds a part of the documents, and dedup compares all of "
                "them. Build without --slice, or leave dedup out."
            )

    def _find_duplicates(self, config: dedup.Config) -> None:
        workers = self.config.workers or _cores()
        found = duplicates.find(
            self._all_units(), self.folder, self.source, config, workers, self.test
        )
        self.left_out = found.records
        with atomic_write(self.folder / "duplicates.jsonl") as file:
            for again, line, earlier, earlier_line in found.pairs.tolist():
                entry = {
                    "file": self.files[again],
                    "line": line,
                    "repeats": {"file": self.files[earlier], "line": earlier_line},
                }
                file.write(json.dumps(entry).encode() + b"\n")

    def _number_passages(self) -> None:
        from data_pipeline.building import passages

        workers = self.config.workers or _cores()
        units, source = self._all_units(), self.source
        self.passages = passages.number(units, self.folder, source, workers, self.test)
        self.writer = passages.RetrievalWriter

    def _all_units(self) -> Iterator[Unit]:
        records = self.source.records()
        if self.config.rows is not None and self.source.first_heldout is not None:
            records = first_rows(records, self.config.rows, self.source.first_heldout)
        records = limited(records, self.config.limit_bytes)
        return cut(itertools.chain(self.source.passages(), records), self.config.shard_bytes)

    def _build_units(self) -> Meter:
        """Builds every missing unit of this build; returns the counts."""
        settings = (self.config.heldout_fraction, self.digest, self.config.sentences, self.test)
        start = partial(self.writer, self.folder, self.source, *settings)
        workers = self.config.workers or _cores()
        title = "building" if self.part is None else f"building slice {self.part}"
        try:
            with (
                Meter(title) as meter,
                closing(pool.process(self._missing_units(meter), start, workers)) as results,
            ):
                for unit, outcome in results:
                    self._note_rejected(unit.index, outcome)
                    meter.advance(unit.share, unit.size, outcome.documents_in)
        except KeyboardInterrupt:
            logger.warning("stopped; finished shards are kept. Run the same command to resume.")
            raise
        self._stop_if_rejected()
        if self.part is not None and self.part.index > len(self.units):
            logger.info("slice %s is empty: there are %d units only", self.part, len(self.units))
        return meter

    def _missing_units(self, meter: Meter) -> Iterator[Unit]:
        for unit in self._all_units():
            if self.left_out:
                unit = unit.without(self.left_out[unit.index])
            if self.passages is not None:
                unit = self.passages.before(unit)
            # Units before this one are still finished, so the first bad record of all is reported,
            # whichever worker found one first.
            if self.rejected:
                return
            self.units.append(unit.digest)
            if self.part is not None and not self.part.has(unit.index):
                meter.advance(unit.share, 0, len(unit.records))
            elif outcome := self._outcome(unit.index):
                meter.advance(unit.share, 0, outcome.documents_in)
            else:
                yield unit

    def _outcome(self, index: int) -> Outcome | None:
        """Reads the outcome of a unit; None unless it is up to date and its shards are complete."""
        outcome = Outcome.load(outcome_path(self.folder, index))
        if outcome is None or (outcome.build, outcome.digest) != (self.digest, self.units[index]):
            return None
        for shard in outcome.shards.values():
            path = self.folder / shard.name
            if not path.exists() or path.stat().st_size != shard.bytes:
                return None
        self._note_rejected(index, outcome)
        return outcome

    def _note_rejected(self, index: int, outcome: Outcome) -> None:
        wrong = [each for each in outcome.rejected if each[2] not in LEFT_OUT]
        if wrong and self.config.on_error == "stop":
            self.rejected.append((index, wrong[0]))

    def _stop_if_rejected(self) -> None:
        if self.rejected:
            raise rejection(self.source, *min(self.rejected)[1])

    def _is_last(self, part: Slice, alone: bool) -> bool:
        """Whether all units are finished and nobody else is at work, so that this slice merges.

        Raises:
            DataError: a unit of another slice has a bad record.
        """
        found = set(os.listdir(self.folder / ".build"))  # listed before any is opened, as in `run`
        # With others at work, names are enough: the last of them looks at the content.
        missing = sum(
            outcome_path(self.folder, index).name not in found
            or (alone and self._outcome(index) is None)
            for index in range(len(self.units))
        )
        if alone and not missing:
            self._stop_if_rejected()
            return True
        left = (
            f"{missing} of {len(self.units)} units are missing" if missing else "others are at work"
        )
        logger.info("slice %s of %s is done; %s. The last slice merges.", part, self.folder, left)
        return False

    def _collect(self) -> Manifest:
        """Makes the manifest from the outcomes, and lists the rejected records."""
        splits: dict[str, list[ShardInfo]] = {name: [] for name in self.writer.splits}
        reasons: Counter[str] = Counter()
        documents_in, first_rejected = 0, ""
        with atomic_write(self.folder / "rejected.jsonl") as file:
            for index in range(len(self.units)):
                outcome = Outcome.load(outcome_path(self.folder, index))
                assert outcome is not None
                documents_in += outcome.documents_in
                self.unknown += outcome.unknown
                self.special_names.update(outcome.special_names)
                for split, shard in outcome.shards.items():
                    splits[split].append(shard)
                    self.examples[split].append(outcome.examples.get(split, {}))
                for name, line, reason in outcome.rejected:
                    reasons[fault(reason)] += 1
                    first_rejected = first_rejected or f"{self.files[name]}:{line}: {reason}"
                    entry = {"file": self.files[name], "line": line, "reason": reason}
                    file.write(json.dumps(entry).encode() + b"\n")
        if not reasons:
            (self.folder / "rejected.jsonl").unlink()
        if self.config.dedup is None:  # an earlier build may have had it
            (self.folder / "duplicates.jsonl").unlink(missing_ok=True)
        counts = f"{documents_in} read, {reasons.total()} rejected"
        if reasons:
            counts += f" ({dict(reasons)}), the first at {first_rejected}"
        first_heldout = self.source.first_heldout
        if first_heldout is not None and not splits["heldout"]:
            raise DataError(
                f"no held-out row of the source is usable, from {self.files[first_heldout]} on: "
                f"{counts}. Correct source.heldout or leave it out, or raise limit."
            )
        # A source of held-out files alone is for evaluation.
        if first_heldout != 0 and not splits["train"]:
            fix = "Correct source or heldout_fraction"
            if len(splits["heldout"]) and documents_in == 1:
                fix = (
                    f"Its only document was held out, by heldout_fraction; lower it, or {SPLIT_UP}"
                )
            raise DataError(f"the source holds no document to train on: {counts}. {fix}.")
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
            duplicates=self._count_duplicates(),
            small_files=small_files(self.folder),
            scored=self.passages is not None and self.passages.scored,
        )

    def _count_duplicates(self) -> int | None:
        """Number of documents with the text of an earlier one; None if a unit has no hashes."""
        try:
            # An older version, whose build is resumed here, has stored none.
            texts = [
                np.load(texts_path(self.folder, index), allow_pickle=False)
                for index in range(len(self.units))
            ]
        except (OSError, ValueError, EOFError):
            return None
        return duplicates.count_repeated(texts)

    def _tidy(self, built: Manifest) -> None:
        """Removes the outcomes, and shards and temporary files left by stopped builds."""
        names = {shard.name for shard in built.shards}
        for path in self.folder.iterdir():
            is_old = _SHARD_NAME.fullmatch(path.name) and path.name not in names
            if is_old or path.name.endswith(".tmp"):
                path.unlink()
        # On NFS, the folder of a file that is still open cannot be removed: see `Claim.__exit__`.
        shutil.rmtree(self.folder / ".build", ignore_errors=True)

    def _report(self, built: Manifest, meter: Meter, cpu_seconds: float) -> None:
        documents = sum(
            shard.documents for name in ("train", "heldout") for shard in built.splits[name]
        )
        for reason, count in built.documents_rejected.items():
            level, what = logging.WARNING, "rejected"
            if reason in LEFT_OUT:
                level, what = logging.INFO, "left out"
            logger.log(level, "%s %d: %s (see %s/rejected.jsonl)", what, count, reason, self.folder)
        if built.duplicates:
            logger.info(
                f"{built.duplicates:,} documents have the text of another one; dedup=exact leaves "
                "these out, dedup=minhash also those with small changes"
            )
        tokens = sum(shard.tokens for shard in built.shards)
        if self.unknown > _MANY_UNKNOWN * tokens:
            logger.warning(
                f"{self.unknown / tokens:.2%} of the tokens stand for text that the tokenizer does "
                f"not know ({self.unknown:,}), and a model cannot learn it. Look at it with "
                "samestep data show, and use a tokenizer of similar text or, for SentencePiece, a "
                "higher tokenizer.character_coverage or byte_fallback."
            )
        special_names.warn(self.special_names, self.tokenizer)
        log_counts(Dataset(self.folder, built))
        if not built.splits["train"]:
            logger.warning("all rows are held out: this dataset is for evaluation only")
        if not built.splits["heldout"]:
            fix = "Raise heldout_fraction"
            if documents == 1:
                fix = f"The source has only one: to evaluate, {SPLIT_UP}"
            logger.warning("no document is held out for evaluation. %s.", fix)
        logger.info(
            f"built {self.folder}: {documents:,} documents, {tokens:,} tokens, "
            f"{len(built.shards)} shards in {meter.seconds:.1f} s, "
            f"{meter.megabytes / cpu_seconds:.2f} MB per CPU-second"
        )


def rejection(source: Source, file: int, line: int, reason: str) -> DataError:
    """Makes the error that names a record without a document."""
    fix = "Correct it"
    if reason == INVALID and not source.files[file].endswith(".parquet"):
        fix = "Set source.encoding to the file's, such as cp1252 or utf-16"
    elif reason.startswith("no column"):
        fix = "Name the file's column in the section source"
    return DataError(
        f"{shown(source.files[file])}:{line}: {reason}. {fix}, or count, list and leave out "
        "such documents with on_error=skip."
    )


def _cores() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _cpu_seconds() -> float:
    """CPU time, user and system, of this process and of its children that have ended."""
    return time.process_time() + sum(os.times()[2:4])
