"""A corrupt shard is passed over by name.

By all replicas from the same example on, and nothing else is.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.format.manifest import Manifest
from data_pipeline.reading.batches import BatchLayout
from data_pipeline.reading.cache import ShardCache
from data_pipeline.reading.config import Config
from data_pipeline.reading.corruption import CorruptShards
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.loader import SplitOrder, StreamingLoader
from data_pipeline.reading.packed_split import PackedSplit
from data_pipeline.tokenizers.settings import SAVED_FILES
from samestep.errors import DataError
from tests.unit.data_pipeline.conftest import WriteDataset
from tests.unit.data_pipeline.loaders import (
    SPEC,
    Replica,
    Rows,
    assert_same,
    join,
    lay_out,
    valid_rows,
)
from tests.web import WebServer

STEPS = 24
SHARD = 2


def damage(folder: Path, shard: int = SHARD) -> None:
    path = folder / f"train-{shard:06d}.tar"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class Meeting:
    """Replicas in threads of this process."""

    def __init__(self, count: int) -> None:
        self._count, self._changed = count, threading.Condition()
        self._numbers: dict[int, list[int]] = {}

    def announce(self, block: int, number: int) -> None:
        with self._changed:
            self._numbers.setdefault(block, []).append(number)
            self._changed.notify_all()

    def largest(self, block: int) -> int:
        with self._changed:
            told = self._numbers.setdefault(block, [])
            assert self._changed.wait_for(lambda: len(told) == self._count, 20)
            return max(told)


def take(
    folders: Sequence[Path | str],
    steps: int,
    state: dict[str, Any] | None = None,
    cache: ShardCache | None = None,
    threads: int = 0,
    **changes: Any,
) -> tuple[list[Rows], dict[str, Any]]:
    """The global batches of replicas of which each has the dataset in a folder of its own, and
    their state after.
    """
    meeting = Meeting(len(folders))
    settings = Config(
        path="", sequence_length=32, lanes=8, window=1, threads=threads, on_corrupt="skip"
    )
    settings = replace(settings, **changes)

    def run(index: int) -> tuple[list[Rows], dict[str, Any]]:
        with StreamingLoader(
            Dataset.open(folders[index], cache, whole=False),
            settings,
            SplitOrder(seed=7),
            BatchLayout(20, 4, Replica(index, len(folders))),
            pack_spec=SPEC,
            collate=lay_out,
            announcements=meeting,
        ) as loader:
            if state:
                loader.load_state_dict(state)
            return [valid_rows(next(loader)) for _ in range(steps)], loader.state_dict()

    with ThreadPoolExecutor(len(folders)) as pool:
        taken, states = zip(*pool.map(run, range(len(folders))), strict=True)
    assert all(each == states[0] for each in states)
    return [join(parts) for parts in zip(*taken, strict=True)], states[0]


@pytest.fixture
def sound(write_dataset: WriteDataset) -> Path:
    folder = write_dataset("sound")
    take([folder], 1)  # counts the examples
    return folder


@pytest.fixture
def corrupt(write_dataset: WriteDataset, sound: Path) -> Path:
    folder = write_dataset("corrupt")
    (folder / ".cache").mkdir()
    for counts in (sound / ".cache").iterdir():
        (folder / ".cache" / counts.name).write_bytes(counts.read_bytes())
    damage(folder)
    return folder


@pytest.mark.parametrize(("count", "threads"), [(1, 0), (1, 2), (3, 0), (2, 1)])
def test_rows_of_the_shard_carry_no_weight_and_all_others_are_as_they_were(
    sound: Path, corrupt: Path, count: int, threads: int
) -> None:
    expected, _ = take([sound], STEPS)
    batches, state = take([corrupt] * count, STEPS, threads=threads)
    ((digest, name, first),) = state["corrupt"]
    assert (digest, name) == (Manifest.load(sound).digest, f"train-{SHARD:06d}.tar")
    gone = 0
    for rows, whole in zip(batches, expected, strict=True):
        lost = rows["filled"] == 0
        gone += int(lost.sum())
        assert rows["number"].tolist() == whole["number"].tolist()
        assert rows["example"].tolist() == whole["example"].tolist()
        assert (rows["weight"][lost] == 0).all()
        assert (rows["digest"][lost] == 0).all()
        assert (rows["tokens"][lost].sum(1) > 0).all()
        for column in ("tokens", "weight", "digest", "key", "filled"):
            assert (rows[column][~lost] == whole[column][~lost]).all()
    ids = join(expected)["example"].numpy()
    start = np.cumsum([0, *PackedSplit(Dataset.open(sound), "train", SPEC, "concat", 7).counts])
    of_shard = (ids >= start[SHARD]) & (ids < start[SHARD + 1])
    assert gone == of_shard.sum() > 0
    assert first // 20 == np.flatnonzero(of_shard)[0] // 20


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_one_node_finds_all_pass_over(sound: Path, corrupt: Path, count: int) -> None:
    """The shard is damaged on one node only, and whose rows are of it depends on the number of
    replicas.
    """
    found = []
    for damaged in range(count):
        batches, state = take(
            [corrupt if index == damaged else sound for index in range(count)], STEPS
        )
        found += [
            name for _, name, _ in state["corrupt"]
        ]  # or this replica needs no example of the shard
        assert_same(batches, take([sound], STEPS, {**state, "example": 0})[0])
    assert set(found) == {f"train-{SHARD:06d}.tar"}


def test_a_run_goes_on_without_the_shard(sound: Path, corrupt: Path) -> None:
    expected, at_end = take([corrupt], STEPS)
    _, state = take([corrupt] * 2, 9)
    assert state["corrupt"] == at_end["corrupt"]
    assert_same(expected[9:], take([sound] * 3, STEPS - 9, state)[0])


def test_a_shard_that_stays_corrupt_on_a_server_is_passed_over(
    sound: Path, corrupt: Path, tmp_path: Path
) -> None:
    expected, at_end = take([corrupt], STEPS)
    (corrupt / "tokenizer").mkdir()
    for name in SAVED_FILES[:3]:
        (corrupt / "tokenizer" / name).write_text("{}")
    with closing(WebServer(corrupt)) as web:
        cache = ShardCache(tmp_path / "cache" / "shards", 10**9)
        batches, state = take([web.url], STEPS, cache=cache, threads=1)
        assert web.contents[f"train-{SHARD:06d}.tar"] > 1  # fetched again
    assert state["corrupt"] == at_end["corrupt"]
    assert_same(batches, expected)


def test_a_second_shard_and_excluded_examples(sound: Path, corrupt: Path) -> None:
    damage(corrupt, 4)
    batches, state = take([corrupt] * 2, STEPS, threads=1, exclude=((30, 50),))
    assert {name for _, name, _ in state["corrupt"]} == {"train-000002.tar", "train-000004.tar"}
    assert state == take([corrupt], STEPS, exclude=((30, 50),))[1]
    assert_same(batches, take([sound], STEPS, {**state, "example": 0})[0])


def test_a_shard_that_is_listed_twice_is_skipped_from_the_earlier_example_on() -> None:
    found = [("digest", "a", 100), ("digest", "a", 40)]
    skipped = CorruptShards([("digest", "a"), ("digest", "b")], found)
    examples = np.array([39, 40, 99, 100])
    assert skipped.has(examples, np.zeros(4, dtype=np.int64)).tolist() == [False, True, True, True]


def test_without_skip_it_stops_and_without_a_sound_shard_too(corrupt: Path) -> None:
    with pytest.raises(DataError, match=r"train-000002\.tar is truncated or damaged"):
        take([corrupt], STEPS, on_corrupt="stop")
    for shard in (0, 1, 3, 4, 5):
        damage(corrupt, shard)
    with pytest.raises(DataError, match="all 6 shards are corrupt"):
        take([corrupt], STEPS)


def test_a_shard_that_is_cut_short_is_passed_over_after_a_restart(sound: Path) -> None:
    path = sound / "train-000001.tar"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match="has 1000 of 10240 bytes"):
        Config(path=str(sound)).open()
    Config(path=str(sound), on_corrupt="skip").open()
    assert take([sound], STEPS)[1]["corrupt"][0][1] == path.name
    path.unlink()
    with pytest.raises(DataError, match="is missing"):
        Config(path=str(sound), on_corrupt="skip").open()
