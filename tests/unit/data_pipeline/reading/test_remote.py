"""A dataset on an object store trains as its local copy does, within a small cache, and says what
is wrong with it.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest

from data_pipeline.building.push import push
from data_pipeline.format.manifest import Manifest
from data_pipeline.order.example_order import Order, share
from data_pipeline.order.mixture import MixedOrder, Schedule
from data_pipeline.order.sources import Source
from data_pipeline.reading import batches, prefetch
from data_pipeline.reading.batches import BatchLayout
from data_pipeline.reading.cache import ShardCache, locked
from data_pipeline.reading.config import Config
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.loader import SplitOrder, StreamingLoader
from data_pipeline.reading.packed_split import PackedSplit
from data_pipeline.reading.prefetch import Prefetcher
from data_pipeline.reading.remote import RemoteDataset
from data_pipeline.tokenizers.settings import SAVED_FILES
from samestep.errors import ConfigError, DataError
from samestep.examples import Batch, Examples, PackSpec
from samestep.storage import objects
from tests.faulty_proxy import FaultyProxy
from tests.waiting import until
from trainer.strategies import Replica

SHARDS, BATCH = 12, 12
WORKING_SET = 5  # shards: two lanes with windows of one shard, which overlap two or three


def lay_out(examples: Examples, sequence_length: int) -> Batch:
    tokens = np.zeros((len(examples.key), sequence_length), dtype=np.int64)
    np.add.at(tokens[:, 0], np.repeat(examples.row, examples.length), examples.tokens)
    return {"tokens": tokens}


ALONE = Replica(0, 1)


def make_loader(
    path: object | None, cache: Path | None, replica: Replica = ALONE, **changes: Any
) -> StreamingLoader:
    settings: dict[str, Any] = {"lanes": 2, "window": 1, "threads": 0, **changes}
    path = None if path is None else str(path)
    config = Config(
        path=path, sequence_length=32, cache=None if cache is None else str(cache), **settings
    )
    return StreamingLoader(
        config.open(),
        config,
        SplitOrder(seed=3),
        BatchLayout(BATCH, 4, replica),
        pack_spec=PackSpec(32, 1, 1),
        collate=lay_out,
    )


def digests(loader: StreamingLoader, steps: int) -> list[int]:
    with loader:
        return [sum(int(batch["digest"].sum()) for batch in next(loader)) for _ in range(steps)]


def shards_in(cache: Path) -> set[str]:
    return {path.stem for path in (cache / "shards").glob("*.tar")}


def sizes(folder: Path) -> dict[int, int]:
    """Bytes of each file, whatever it is called while it is looked at."""
    found = {}
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            stat = path.stat()
            found[stat.st_ino] = stat.st_size
    return found


wait_for = partial(until, seconds=20)


def write(write_dataset_to: Any, folder: Path) -> Path:
    write_dataset_to(folder, shards=SHARDS, documents=20)
    (folder / "tokenizer").mkdir()
    for name in SAVED_FILES[:3]:
        (folder / "tokenizer" / name).write_text("{}")
    return folder


@pytest.fixture
def dataset(write_dataset_to: Any, tmp_path: Path) -> Path:
    return write(write_dataset_to, tmp_path / "dataset")


def largest(dataset: Path, count: int) -> int:
    """Bytes of the largest training shards."""
    return sum(sorted(shard.bytes for shard in Manifest.load(dataset).splits["train"])[-count:])


@pytest.fixture(scope="module")
def remote(write_dataset_to: Any, s3_server: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where a copy of the dataset is that all tests share, with its examples counted."""
    folder = write(write_dataset_to, tmp_path_factory.mktemp("remote") / "dataset")
    make_loader(folder, None).close()
    url = f"s3://bucket/{folder.parent.name}-{os.getpid()}"
    push(folder, url)
    return url


@pytest.fixture
def own_remote(dataset: Path, s3_folder: str) -> str:
    """Where a copy is that the test may harm."""
    push(dataset, s3_folder)
    return s3_folder


def test_batches_are_those_of_the_local_folder_with_a_cold_and_a_warm_cache(
    dataset: Path, remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for replica in (Replica(0, 1), Replica(0, 2), Replica(1, 2)):
        expected = digests(make_loader(dataset, None, replica), 20)
        assert digests(make_loader(remote, tmp_path / "cache", replica, threads=2), 20) == expected
    monkeypatch.delattr(objects, "download")
    assert digests(make_loader(remote, tmp_path / "cache"), 20) == digests(
        make_loader(dataset, None), 20
    )


def requests_of_a_start(proxy: FaultyProxy, url: str, cache: Path) -> int:
    proxy.behave()
    ShardCache.open_folder(str(cache)).prepare()
    dataset = Dataset.open(url, ShardCache.open_folder(str(cache)))
    assert len(PackedSplit(dataset, "train", PackSpec(128, 1, 1), "concat", seed=3).counts) > 0
    return len(proxy.requests)


@pytest.mark.long
def test_requests_of_a_start_do_not_depend_on_the_number_of_shards(
    write_dataset_to: Any, faulty_s3: FaultyProxy, s3_folder: str, tmp_path: Path
) -> None:
    """With the counts of a build; without them, each shard's lengths are requested."""
    found = {}
    for shards in (3, 24):
        folder = write_dataset_to(tmp_path / str(shards), shards=shards, documents=3)
        (folder / "tokenizer").mkdir()
        for name in SAVED_FILES[:3]:
            (folder / "tokenizer" / name).write_text("{}")
        push(folder, plain := f"{s3_folder}/plain-{shards}")
        PackedSplit(Dataset.open(folder), "train", PackSpec(128, 1, 1), "concat", seed=3)
        push(folder, counted := f"{s3_folder}/counted-{shards}")
        for name, url in (("plain", plain), ("counted", counted)):
            found[name, shards] = requests_of_a_start(
                faulty_s3, url, tmp_path / f"{name}-{shards}.cache"
            )
    assert found["counted", 3] == found["counted", 24] < 16
    assert found["plain", 24] - found["plain", 3] >= 24 - 3


@pytest.mark.long
def test_a_mixture_of_a_remote_and_a_local_dataset_is_that_of_two_local_ones(
    write_dataset_to: Any,
    dataset: Path,
    remote: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "_BLOCK_POSITIONS", 1)
    other = Source(str(write_dataset_to(tmp_path / "other", shards=3)), 1)
    local = make_loader(None, None, sources=(Source(str(dataset), 3, "it"), other))
    expected = digests(local, steps := 2 * local.examples // BATCH)
    enough = largest(dataset, 2 * WORKING_SET + 1)
    mixed = (Source(remote, 3, "it"), other)
    with make_loader(
        None, tmp_path / "cache", sources=mixed, cache_size=f"{enough}B", threads=1
    ) as loader:
        assert digests(loader, steps) == expected
    assert 0 < sum(sizes(tmp_path / "cache" / "shards").values()) <= enough
    with pytest.raises(
        ConfigError, match=rf"data.cache_size.* read up to {WORKING_SET} shards"
    ):  # not the local ones
        make_loader(
            None,
            tmp_path / "cache",
            sources=mixed,
            cache_size=f"{largest(dataset, WORKING_SET) - 1}B",
        )


def test_examples_are_counted_without_a_download_of_any_shard(
    own_remote: str, remote: str, tmp_path: Path
) -> None:
    with (
        make_loader(own_remote, tmp_path / "cache") as loader,
        make_loader(remote, tmp_path / "other") as counted,
    ):
        assert not shards_in(tmp_path / "cache")
        assert loader.examples == counted.examples > 0


def test_counts_that_were_made_locally_are_pushed(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(objects, "read_range")
    make_loader(remote, tmp_path / "cache").close()


def test_a_cache_smaller_than_the_dataset_is_never_exceeded_and_changes_nothing(
    dataset: Path, remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        batches, "_BLOCK_POSITIONS", 1
    )  # what is read together is a small part of a window, as usual
    local = make_loader(dataset, None)
    steps = 2 * local.examples // BATCH
    expected = digests(local, steps)
    limit = largest(
        dataset, 2 * WORKING_SET + 1
    )  # at times those before and those after are in use
    cache = tmp_path / "cache"
    with make_loader(remote, cache, cache_size=f"{limit}B", threads=1) as loader:
        for digest in expected:
            assert sum(int(batch["digest"].sum()) for batch in next(loader)) == digest
            with locked(cache / "shards" / "room.lock"):
                assert sum(sizes(cache / "shards").values()) <= limit


def test_a_cache_that_is_smaller_than_the_working_set_is_refused(
    dataset: Path, remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enough = largest(dataset, WORKING_SET)
    refused = rf"takes {enough - 1:,} bytes \(limited by .* \(1\) read up to {WORKING_SET} .* {enough:,} byt"  # noqa: E501
    with pytest.raises(ConfigError, match=refused):
        make_loader(remote, tmp_path / "cache", cache_size=f"{enough - 1}B")
    make_loader(remote, tmp_path / "cache", cache_size=f"{enough}B").close()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # the processes of a node share the cache
    with pytest.raises(
        ConfigError, match=r"processes \(2\) .* Set data.cache_size to .*lower data.lanes"
    ):
        make_loader(remote, tmp_path / "cache", cache_size=f"{enough}B")


def test_shards_are_fetched_before_they_are_needed(
    dataset: Path, remote: str, tmp_path: Path
) -> None:
    with make_loader(remote, tmp_path / "cache") as loader:
        next(loader)
        order = Order(loader._packed.counts, seed=3, lanes=2, window=1)
        ahead = order.shards_ahead(0, BATCH, 0, 1)
        shards = Manifest.load(dataset).splits["train"]
        wait_for(
            lambda: (
                shards_in(tmp_path / "cache")
                == {shards[number].sha256 for number in ahead.tolist()}
            )
        )
    window, _ = order.ahead(np.arange(2), np.zeros(2, np.int64))
    assert set(ahead.tolist()) > set(window.tolist()), "also shards of the next window"


def test_shards_are_fetched_before_they_are_needed_though_excluded_examples_shift_the_batches(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_BLOCK_POSITIONS", 1)  # one step at a time
    expected: list[set[int]] = []
    expect = Prefetcher.expect

    def record(prefetcher: Prefetcher, shards: np.ndarray) -> None:
        expected.append(set(shards.tolist()))
        expect(prefetcher, shards)

    monkeypatch.setattr(Prefetcher, "expect", record)
    settings = {"lanes": 24, "exclude": ((0, 5),)}
    with make_loader(remote, tmp_path / "cache", Replica(2, 3), **settings) as loader:
        order = Order(loader._packed.counts, seed=3, lanes=24, window=1)
        numbers = [np.concatenate([each["number"] for each in next(loader)]) for _ in range(20)]
    read = [set(order.locate(each[each >= 0]).shard.tolist()) for each in numbers]
    assert all(now <= before for now, before in zip(read[1:], expected, strict=False))
    assert len(read) == len(expected)


@pytest.mark.parametrize("epochs", [0.99, 700.5])
def test_going_on_fetches_only_what_comes_next(remote: str, tmp_path: Path, epochs: float) -> None:
    with make_loader(remote, tmp_path / "cache", lanes=1) as loader:
        loader.load_state_dict({**loader.state_dict(), "example": int(epochs * loader.examples)})
        next(loader)
    assert len(shards_in(tmp_path / "cache")) <= WORKING_SET  # of the window and of the next one


@pytest.mark.long
def test_a_store_that_vanishes_is_an_error_of_the_data(
    dataset: Path, own_remote: str, tmp_path: Path
) -> None:
    size = f"{largest(dataset, WORKING_SET)}B"
    with make_loader(own_remote, tmp_path / "cache", threads=2, cache_size=size) as loader:
        next(loader)
        boto3.resource("s3").Bucket("bucket").objects.filter(
            Prefix=own_remote.removeprefix("s3://bucket/")
        ).delete()
        with pytest.raises(
            DataError, match=rf"{own_remote}/train-0000\d\d.tar: .*check the bucket and the name"
        ):
            _ = [next(loader) for _ in range(loader.examples // BATCH)]


def test_a_missing_and_a_replaced_shard_are_named_at_the_start(
    dataset: Path, own_remote: str, tmp_path: Path
) -> None:
    address = f"{own_remote}/train-000003.tar"
    objects.upload(dataset / "train-000004.tar", address)
    with pytest.raises(
        DataError, match=rf"{address} (differs from the shard in the manifest|is cut short)"
    ):
        make_loader(own_remote, tmp_path / "cache")
    objects.remove(address)
    with pytest.raises(DataError, match=rf"cannot read {address}"):
        make_loader(own_remote, tmp_path / "cache")


def test_a_wrong_address_is_named(remote: str, tmp_path: Path) -> None:
    for address in (f"{remote}/wrong", "s3://no-such-bucket/dataset"):
        with pytest.raises(
            DataError, match=rf"cannot read {address}/manifest.json.*samestep data push"
        ):
            make_loader(address, tmp_path / "cache")


def test_an_address_with_a_query_is_refused_without_its_secrets() -> None:
    with pytest.raises(
        ConfigError, match=r"https://host/dataset has a query \(\?\.\.\.\)"
    ) as caught:
        Config(path="https://host/dataset?signature=secret").open()
    assert "secret" not in str(caught.value)


def test_what_is_expected_is_kept_longer_than_what_is_not_any_more(
    dataset: Path, remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_TOUCH_SECONDS", 0.0)
    shards = Manifest.load(dataset).splits["train"]
    there = RemoteDataset(
        remote, ShardCache(tmp_path / "cache" / "shards", 3 * max(shard.bytes for shard in shards))
    )
    there.cache.prepare()
    names = [shard.sha256 for shard in shards]
    with closing(Prefetcher([(there, shard) for shard in shards], 1)) as prefetcher:
        prefetcher.expect(np.array([0, 1]))
        wait_for(lambda: shards_in(tmp_path / "cache") == set(names[:2]))
        there.open(shards[2]).close()
        prefetcher.expect(np.array([0, 1]))
        there.open(shards[3]).close()
    assert shards_in(tmp_path / "cache") == {names[0], names[1], names[3]}


def order_of(lanes: int, window: int, is_mixed: bool) -> Order | MixedOrder:
    counts = [7, 0, 30, 12, 5, 41, 3, 9, 22, 16, 1, 28]
    if not is_mixed:
        return Order(counts, seed=1, lanes=lanes, window=window)
    parts = {"a": counts[:5], "b": counts[5:]}
    schedule = Schedule.weighted([(0, {"a": 2, "b": 1})], {"a": "a", "b": "b"})
    orders = {k: Order(each, seed=1, lanes=lanes, window=window) for k, each in parts.items()}
    return MixedOrder(schedule, orders)


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize(("lanes", "size"), [(1, 2), (3, 6), (16, 32), (16, 8), (16, 12), (16, 24)])
@pytest.mark.parametrize("window", [1, 4])
def test_the_shards_ahead_are_those_that_batches_come_from(
    lanes: int, size: int, window: int, is_mixed: bool
) -> None:
    """Wherever the batches begin: after a part of the run with batches of another size, too."""
    order = order_of(lanes, window, is_mixed)
    for start in range(0, 3 * order.examples, 5 * lanes + 1):
        for index in range(2):
            ahead = order.shards_ahead(start, size, index, 2)
            for step in range(2):
                batch = order.batch(start + step * size, size)[share(size, index, 2)]
                assert set(order.locate(batch).shard.tolist()) <= set(ahead.tolist())


def test_nodes_that_start_together_do_no_harm_to_each_other(
    dataset: Path, remote: str, tmp_path: Path
) -> None:
    expected = digests(make_loader(dataset, None), 8)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda _: digests(make_loader(remote, tmp_path / "cache"), 8), range(4))
        assert list(found) == [expected] * 4


@pytest.mark.long
def test_many_loaders_of_one_cache_fetch_each_shard_once(
    dataset: Path, remote: str, faulty_s3: FaultyProxy, tmp_path: Path
) -> None:
    expected = digests(make_loader(dataset, None), 8)
    loaders = 64
    with ThreadPoolExecutor(loaders) as pool:
        found = pool.map(
            lambda _: digests(make_loader(remote, tmp_path / "cache"), 8), range(loaders)
        )
        assert list(found) == [expected] * loaders
    fetched = [each for each in faulty_s3.requests if each.startswith("GET") and ".tar" in each]
    assert len(fetched) == len(set(fetched)) == len(shards_in(tmp_path / "cache"))
