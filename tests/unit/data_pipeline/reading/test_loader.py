"""The loader gives the same global batches whoever asks, feeds every token once an epoch, and can
go on anywhere.
"""

import hashlib
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.reading import batches, packed_shard
from data_pipeline.reading import loader as loader_module
from data_pipeline.reading import packed_split as dataset_module
from data_pipeline.reading.batches import Plan
from data_pipeline.reading.config import Config
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.loader import StreamingLoader
from data_pipeline.reading.packed_shard import PackedShard
from data_pipeline.reading.packed_split import PackedSplit
from samestep.errors import ConfigError, DataError
from samestep.examples import Batch, Examples, PackSpec
from tests.unit.data_pipeline.conftest import WriteDataset
from tests.unit.data_pipeline.loaders import (
    Rows,
    assert_same,
    global_batches,
    join,
    lay_out,
    make_loader,
    valid_rows,
)
from trainer.strategies import Replica


@pytest.mark.parametrize("packing", ["concat", "best_fit", "padded"])
@pytest.mark.parametrize(
    ("count", "threads", "micro_batch_size"),
    [(2, 0, 1), (3, 1, 4), (4, 4, 8), (5, 2, 3), (24, 1, 1)],
)
def test_global_batches_are_the_same_at_any_world_size(
    write_dataset, packing, count, threads, micro_batch_size
) -> None:
    folder = write_dataset()
    alone = global_batches(folder, 6, packing=packing)
    shared = global_batches(
        folder, 6, count, packing=packing, threads=threads, micro_batch_size=micro_batch_size
    )
    assert_same(alone, shared)
    assert all(len(batch["tokens"]) == 24 for batch in shared)


@pytest.mark.parametrize("positions", [1, 300, 2**10, 2**18])
@pytest.mark.parametrize("threads", [0, 2])
def test_how_many_rows_are_made_together_changes_nothing(
    write_dataset, monkeypatch, positions, threads
) -> None:
    folder = write_dataset()
    expected = global_batches(folder, 20, micro_batch_size=24)
    monkeypatch.setattr(batches, "_BLOCK_POSITIONS", positions)
    loader = make_loader(folder, threads=threads)
    taken = [valid_rows(next(loader)) for _ in range(13)]
    assert loader.state_dict()["example"] == 13 * 24  # what was taken, not what was made
    again = make_loader(folder, threads=threads)
    again.load_state_dict(loader.state_dict())
    assert_same(expected, taken + [valid_rows(next(again)) for _ in range(7)])
    first, second = (
        list(make_loader(folder, split="heldout", finite=True, threads=t)) for t in (0, threads)
    )
    assert_same([valid_rows(step) for step in first], [valid_rows(step) for step in second])


@pytest.mark.parametrize("packing", ["concat", "best_fit", "padded"])
def test_every_token_is_fed_once_an_epoch(write_dataset, packing) -> None:
    folder = write_dataset()
    loader = make_loader(
        folder, packing=packing, global_batch_size=8, lanes=8
    )  # a step is one turn of all lanes
    tokens = sum(shard.tokens for shard in Dataset.open(folder).shards("train"))
    epochs: dict[int, list[torch.Tensor]] = {}
    while (rows := valid_rows(next(loader)))["epoch"].min() < 2:
        for epoch in rows["epoch"].unique().tolist():
            epochs.setdefault(epoch, []).append(rows["tokens"][rows["epoch"] == epoch])
    for epoch in (0, 1):
        fed = torch.cat(epochs[epoch])
        assert sorted(fed[fed > 0].tolist()) == list(range(1, tokens + 1))


def test_the_digest_of_a_row_is_of_its_target_too(write_dataset) -> None:
    folder = write_dataset()

    def with_targets(offset: int) -> Callable[[Examples, int], Batch]:
        def collate(examples: Examples, length: int) -> Batch:
            target = np.arange(len(examples.key) * 4).reshape(-1, 4)
            target[:, 2] += offset * (examples.key == examples.key[0])
            return {**lay_out(examples, length), "target_tokens": target}

        return collate

    (rows,), (same,), (other,) = (
        global_batches(folder, 1, collate=with_targets(offset), micro_batch_size=24)
        for offset in (0, 0, 1)
    )
    assert torch.equal(rows["digest"], same["digest"])
    assert (rows["digest"] != other["digest"]).sum() == 1


def test_the_digest_of_a_row_tells_every_single_token_apart(write_dataset) -> None:
    folder = write_dataset()

    def altered(examples: Examples, sequence_length: int) -> Batch:
        batch = lay_out(examples, sequence_length)
        batch["tokens"][0, 1] += 1
        return batch

    (rows,) = global_batches(folder, 1, micro_batch_size=24)
    (other,) = global_batches(folder, 1, micro_batch_size=24, collate=altered)
    assert (rows["digest"] != other["digest"]).tolist() == [True] + [False] * 23
    assert len(rows["digest"].unique()) == 24


def test_keys_differ_between_epochs_and_dropout_between_all_rows(write_dataset) -> None:
    loader = make_loader(write_dataset(shards=1, documents=20), global_batch_size=64)
    rows = valid_rows(next(loader))
    assert rows["epoch"].max() >= 1
    assert len(rows["key"].unique()) == len(rows["dropout_key"].unique()) == 64
    assert len(rows["example"].unique()) < 64


def test_all_rows_of_a_step_have_its_key(write_dataset) -> None:
    """On all replicas, those of padding too; the next step has another."""
    folder, keys = write_dataset(), []
    for index in range(3):
        loader = make_loader(folder, index, 3, global_batch_size=10)
        keys.append([torch.cat([part["step_key"] for part in next(loader)]) for _ in range(5)])
    of_steps = [torch.cat(parts).unique() for parts in zip(*keys, strict=True)]
    assert all(len(key) == 1 for key in of_steps)
    assert len(torch.cat(of_steps).unique()) == 5
    (other,) = global_batches(folder, 1, seed=8, global_batch_size=10)
    assert other["step_key"][0] != of_steps[0]


def test_golden_batch(write_dataset) -> None:
    """If this fails, runs see other data than before: raise PACKING_VERSION or ORDER_VERSION.

    Note in CHANGELOG.md.
    """
    digest = hashlib.sha256()
    for packing in ("concat", "best_fit", "padded"):
        for rows in global_batches(write_dataset(name=packing), 3, packing=packing):
            for name in ("tokens", "key", "dropout_key", "example", "epoch"):
                digest.update(rows[name].numpy().astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == "1d29c64a46aa7450"


@pytest.mark.parametrize("threads", [0, 3])
def test_continues_after_what_was_taken_at_another_world_size(write_dataset, threads) -> None:
    folder = write_dataset()
    whole = global_batches(folder, 9)
    with make_loader(folder, threads=threads, prefetch=4) as loader:
        for _ in range(4):
            next(loader)
        state = loader.state_dict()
    assert state["example"] == 4 * 24
    assert_same(whole[4:], global_batches(folder, 5, count=3, state=state, threads=threads))


def test_can_be_set_back_while_batches_are_made_ahead(write_dataset) -> None:
    with make_loader(write_dataset(), threads=2) as loader:
        first, state = next(loader), loader.state_dict()
        second = next(loader)
        next(loader)
        loader.load_state_dict(state)
        assert_same([valid_rows(second)], [valid_rows(next(loader))])
        assert not torch.equal(first[0]["tokens"], second[0]["tokens"])


@pytest.mark.parametrize("threads", [0, 2])
def test_a_step_that_failed_is_made_again(
    write_dataset: WriteDataset, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    folder = write_dataset()
    failures = [DataError("the store does not answer"), KeyboardInterrupt()]
    make = StreamingLoader._make

    def fail_at_times(loader: StreamingLoader, plan: Plan) -> Any:
        if plan.starts[0] > 24 * 2 and failures:
            raise failures.pop()
        return make(loader, plan)

    expected = global_batches(folder, 8)
    monkeypatch.setattr(StreamingLoader, "_make", fail_at_times)
    found: list[Rows] = []
    with make_loader(folder, threads=threads) as loader:
        while len(found) < 8:
            example = loader.state_dict()["example"]
            with suppress(DataError, KeyboardInterrupt):
                found.append(valid_rows(next(loader)))
                example += 24
            assert loader.state_dict()["example"] == example
    assert not failures
    assert_same(expected, found)


def test_batch_size_may_change_and_no_example_is_lost(write_dataset) -> None:
    folder = write_dataset()
    with make_loader(folder) as loader:
        before = [valid_rows(next(loader)) for _ in range(3)]
        state = loader.state_dict()
    after = global_batches(folder, 2, count=2, state=state, global_batch_size=10)
    whole = global_batches(folder, 1, global_batch_size=3 * 24 + 2 * 10)
    seen = torch.cat([rows["dropout_key"] for rows in (*before, *after)])
    assert sorted(seen.tolist()) == sorted(whole[0]["dropout_key"].tolist())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("seed", {"seed": 8}),
        ("lanes", {"lanes": 4}),
        ("window", {"window": 2}),
        ("packing", {"packing": "padded"}),
        ("packing", {"pack_spec": PackSpec(16, 1, 1)}),
    ],
)
def test_another_order_is_not_continued(write_dataset, name, changes) -> None:
    folder = write_dataset()
    state = make_loader(folder).state_dict()
    with pytest.raises(DataError, match=f"its {name} is .*start a new run"):
        make_loader(folder, **changes).load_state_dict(state)


def test_an_order_of_another_version_is_not_continued(write_dataset, monkeypatch) -> None:
    folder = write_dataset()
    state = make_loader(folder).state_dict()
    monkeypatch.setattr(loader_module, "ORDER_VERSION", 99)
    with pytest.raises(
        DataError,
        match=r"its order is 1, but this run's is 99. To continue, use the program's version",
    ):
        make_loader(folder).load_state_dict(state)


def test_another_dataset_is_not_continued(write_dataset) -> None:
    loader = make_loader(write_dataset(name="one"))
    next(loader)
    state = loader.state_dict()
    with pytest.raises(
        DataError,
        match=r"mixture changes from a dataset of digest .*two 1 .* set data.on_change=accept",
    ):
        make_loader(write_dataset(name="two", shards=5)).load_state_dict(state)


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_shapes_are_static_and_padding_rows_are_valid_examples(write_dataset, count) -> None:
    folder = write_dataset()
    for index in range(count):
        with make_loader(folder, index, count, micro_batch_size=4) as loader:
            for _ in range(4):
                step = next(loader)
                assert len(step) == loader.micro_batches == math.ceil(math.ceil(24 / count) / 4)
                rows = math.ceil(
                    math.ceil(24 / count) / loader.micro_batches
                )  # at most 4, and none too many
                for micro_batch in step:
                    assert {tuple(value.shape) for value in micro_batch.values()} == {
                        (rows,),
                        (rows, 32),
                    }
                    assert (micro_batch["tokens"].sum(dim=1) > 0).all()
                    assert torch.equal(micro_batch["weight"], (micro_batch["example"] >= 0).float())


@pytest.mark.parametrize(
    ("count", "micro_batch_size", "shape"), [(8, 16, (1, 3)), (1, 16, (2, 12)), (5, 3, (2, 3))]
)
def test_no_more_rows_are_computed_than_the_largest_share_needs(
    write_dataset, count, micro_batch_size, shape
) -> None:
    loader = make_loader(write_dataset(), 0, count, micro_batch_size=micro_batch_size)
    step = next(loader)
    assert (len(step), len(step[0]["example"])) == shape


@pytest.mark.parametrize("size", [24, 22])
@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
def test_units_have_the_same_rows_on_any_number_of_replicas(write_dataset, count, size) -> None:
    """Padding rows included; there may be more replicas than units."""
    folder, sizes = write_dataset(), {"micro_batch_size": 4, "global_batch_size": size}
    expected = next(make_loader(folder, units=True, **sizes))
    assert len(expected) == 6
    found = []
    for index in range(count):
        step = next(make_loader(folder, index, count, units=True, **sizes))
        assert len(step) == -(-6 // count)
        found += step
    for unit, same in zip(found, expected, strict=False):
        assert all(torch.equal(unit[name], same[name]) for name in unit if name != "dropout_key")
        valid = same["example"] >= 0
        assert torch.equal(unit["dropout_key"][valid], same["dropout_key"][valid])
    assert not any(unit["weight"].any() for unit in found[6:])


def test_a_replica_of_several_devices_makes_rows_for_each(write_dataset) -> None:
    """24 examples on 2 replicas of 5 devices.

    At most 3 rows a device, and so two micro-batches of 2 rows a device.
    """
    replica = Replica(0, 2, devices=5)
    step = next(make_loader(write_dataset(), micro_batch_size=2, replica=replica))
    assert (len(step), len(step[0]["example"])) == (2, 10)
    assert torch.cat([part["weight"] for part in step]).sum() == 12
    with pytest.raises(
        ConfigError, match="global_batch_size 24 is less than the 26 data-parallel devices"
    ):
        make_loader(write_dataset(), replica=Replica(0, 2, devices=13))


def test_evaluation_is_one_pass_in_fixed_order_with_the_same_keys_each_time(write_dataset) -> None:
    folder = write_dataset(heldout=3)
    loader = make_loader(folder, split="heldout", finite=True, threads=1)
    passes = [[valid_rows(step) for step in loader] for _ in range(2)]
    assert_same(*passes)
    examples = torch.cat([rows["example"] for rows in passes[0]])
    assert sorted(examples.tolist()) == list(range(loader.examples))
    with make_loader(folder, split="heldout", finite=True, seed=8) as other:
        assert valid_rows(next(other))["example"].tolist() == examples[:24].tolist()
    assert loader.examples % 24 != 0
    for count in (2, 5):
        replicas = [
            [
                valid_rows(step)
                for step in make_loader(folder, index, count, split="heldout", finite=True)
            ]
            for index in range(count)
        ]
        assert_same([join(parts) for parts in zip(*replicas, strict=True)], passes[0])


def test_a_replica_without_rows_in_the_last_batch_gets_only_padding(write_dataset) -> None:
    folder = write_dataset(heldout=1, documents=8)
    loader = make_loader(folder, split="heldout", finite=True)
    batch_size = loader.examples - 1  # the last batch has one row
    loaders = [
        make_loader(folder, i, 3, split="heldout", finite=True, global_batch_size=batch_size)
        for i in range(3)
    ]
    last = [list(loader)[-1] for loader in loaders]
    assert sorted(len(valid_rows(step)["example"]) for step in last) == [0, 0, 1]
    assert all(
        (micro_batch["tokens"].sum(dim=1) > 0).all() for step in last for micro_batch in step
    )


def test_a_small_cache_of_shards_changes_nothing(write_dataset, monkeypatch) -> None:
    folder = write_dataset(shards=9)
    expected = global_batches(folder, 5)
    monkeypatch.setattr(dataset_module, "max_open_shards", lambda: 2)
    loader = make_loader(folder, threads=3)
    assert_same(expected, [valid_rows(next(loader)) for _ in range(5)])
    assert len(loader._packed._splits[0]._open) <= 2


def test_plans_take_a_bounded_memory_and_none_is_added_up_again(write_dataset, monkeypatch) -> None:
    folder = write_dataset(shards=9)
    expected = global_batches(folder, 5)
    asked = 0

    def count_bytes(shard: PackedShard) -> int:
        nonlocal asked
        asked += 1
        return 2**29 - 1 + len(shard.start)  # three of them fit

    monkeypatch.setattr(PackedShard, "bytes", property(count_bytes))
    opened = []
    pack = PackedSplit._pack
    monkeypatch.setattr(PackedSplit, "_pack", lambda *a: opened.append(a) or pack(*a))
    loader = make_loader(folder, threads=3)
    assert_same(expected, [valid_rows(next(loader)) for _ in range(5)])
    loader.close()
    assert len(loader._packed._splits[0]._open) == 3
    assert len(opened) < asked <= 2 * len(opened), "once when it is opened, once when closed"


def test_counts_are_cached_and_a_damaged_or_impossible_cache_does_no_harm(write_dataset) -> None:
    folder = write_dataset()
    expected = global_batches(folder, 2)
    (cached,) = (folder / ".cache").glob("*.counts")
    assert_same(expected, global_batches(folder, 2))
    global_batches(folder, 1, seed=8)  # counts do not depend on the seed
    assert list(cached.parent.glob("*.counts")) == [cached]
    content = cached.read_bytes()
    for damaged in (b"", content[:-8], content[:40] + b"\x01" + content[41:]):
        cached.write_bytes(damaged)
        assert_same(expected, global_batches(folder, 2))
        assert cached.read_bytes() == content
    shutil.rmtree(cached.parent)
    cached.parent.write_text("the folder cannot be made")
    assert_same(expected, global_batches(folder, 2))


def test_opening_a_dataset_looks_at_no_shard_by_itself(write_dataset, monkeypatch) -> None:
    few, many = write_dataset("few", shards=2), write_dataset("many", shards=40, documents=4)
    looked: list[Path] = []
    stat = Path.stat

    def recorded(path: Path, **how: bool) -> os.stat_result:
        looked.append(path)
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", recorded)
    for folder in (few, many):
        looked.clear()
        Dataset.open(folder)
        assert [path for path in looked if path.suffix == ".tar"] == []


FEW_FILES = """
import resource, sys
sys.path[:0] = {path!r}
from data_pipeline.reading.packed_split import *
from samestep.errors import DataError
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
dataset = Dataset.open({folder!r})
kept = []
try:
    for _ in range(4):
        kept.append(PackedSplit(dataset, "train", PackSpec(32, 1, 1), "concat", 0))
        for shard in range(40 if {read} else 0):
            kept[-1].read(Location(*np.array([[0], [shard], [0]])), np.ones(1, np.float32))
    print(len(kept), max_open_shards(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "read", "output"),
    [
        (64, 1000, True, "4 333 1000"),  # as many files as the system allows
        (64, 64, False, "4 21 64"),  # counting keeps none of 40 shards open
        (
            64,
            64,
            True,
            "too many files are open (the limit of this process is 64). Raise it with ulimit -n",
        ),
    ],
)
def test_the_limit_of_open_files_is_raised_or_named(
    write_dataset, soft, hard, read, output
) -> None:
    folder = write_dataset(shards=40, documents=4)
    program = FEW_FILES.format(path=sys.path, folder=str(folder), soft=soft, hard=hard, read=read)
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert output in found.stdout, found.stderr


def test_more_shards_at_a_time_than_may_be_open_are_refused(write_dataset, monkeypatch) -> None:
    folder = write_dataset(shards=40, documents=20)
    monkeypatch.setattr(packed_shard, "max_open_shards", lambda: 16)
    with pytest.raises(
        ConfigError, match=r"data.lanes 8 and data.window 4 need 40 open .* can open 16"
    ):
        make_loader(folder)
    make_loader(folder, 1, 4)  # a quarter of the lanes
    make_loader(folder, split="heldout", finite=True)


def test_errors_of_threads_reach_the_training_thread(write_dataset) -> None:
    def collate(examples: Examples, sequence_length: int) -> Batch:
        raise ZeroDivisionError("from the objective")

    with make_loader(write_dataset(), threads=2, collate=collate) as loader:
        with pytest.raises(ZeroDivisionError, match="from the objective"):
            next(loader)
        assert loader.state_dict()["example"] == 0


def test_close_ends_the_threads_at_once(write_dataset) -> None:
    def collate(examples: Examples, sequence_length: int) -> Batch:
        time.sleep(0.1)
        return lay_out(examples, sequence_length)

    loader = make_loader(
        write_dataset(), threads=2, prefetch=50, micro_batch_size=24, collate=collate
    )
    next(loader)
    begin = time.monotonic()
    loader.close()
    assert time.monotonic() - begin < 2  # 50 steps take 2.5 s in two threads
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


@pytest.mark.long
def test_an_unclosed_loader_does_not_hold_up_a_failing_process(write_dataset) -> None:
    program = f"""
import sys
sys.path[:0] = {sys.path!r}
from data_pipeline.reading.config import *
from data_pipeline.reading.loader import *
class Alone: index, count, devices = 0, 1, 1
loader = StreamingLoader(Dataset.open({str(write_dataset())!r}), Config(path=""), SplitOrder(seed=0),
    BatchLayout(64, 64, Alone()), pack_spec=PackSpec(32, 1, 1),
    collate=lambda e, s: {{"tokens": np.ones((len(e.key), s), np.int32)}})
next(loader)
raise SystemExit(3)
"""  # noqa: E501
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 3


def test_a_batch_smaller_than_the_replicas_is_refused(write_dataset) -> None:
    with pytest.raises(
        ConfigError, match=r"global_batch_size 24 is less than the 25 .* Use at least 25"
    ):
        make_loader(write_dataset(), 0, 25)


def test_an_empty_split_is_refused(write_dataset) -> None:
    with pytest.raises(DataError, match=r"heldout split .* is empty. Raise heldout_fraction"):
        make_loader(write_dataset(heldout=0), split="heldout", finite=True)


def test_a_split_without_tokens_is_refused(write_dataset) -> None:
    with pytest.raises(DataError, match=r"train split .* has no tokens"):
        make_loader(write_dataset(shards=2, documents=3, longest=0))


def test_a_missing_or_cut_shard_is_refused_at_once(write_dataset) -> None:
    folder = write_dataset()
    shard = folder / "train-000003.tar"
    content = shard.read_bytes()
    shard.write_bytes(content[:-512])
    with pytest.raises(
        DataError,
        match=f"train-000003.tar has {len(content) - 512} of {len(content)}",
    ):
        Dataset.open(folder)
    shard.unlink()
    with pytest.raises(DataError, match=r"train-000003.tar is missing.*samestep data verify"):
        Dataset.open(folder)


@pytest.mark.parametrize(
    ("name", "value"), [("lanes", 0), ("window", 0), ("threads", -1), ("prefetch", 0)]
)
def test_impossible_settings_are_refused(name, value) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*Use . or more"):
        Config(path="x", **{name: value})


@pytest.mark.parametrize("epochs", [0.01, 0.5, 0.99, 1000.5])
def test_going_on_reads_only_the_shards_of_the_next_batch(write_dataset, epochs) -> None:
    folder = write_dataset(shards=20, documents=60)
    with make_loader(
        folder, global_batch_size=8
    ) as loader:  # the first loader counts the examples of all shards
        state = {**loader.state_dict(), "example": int(epochs * loader.examples)}
    loader = make_loader(folder, global_batch_size=8)
    loader.load_state_dict(state)
    next(loader)
    assert 1 <= len(loader._packed._splits[0]._open) <= 8
