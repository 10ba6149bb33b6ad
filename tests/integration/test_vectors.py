"""`samestep vectors`: the same bytes each time, also after kill -9; neighbors that make sense."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from data_pipeline.reading.dataset import Dataset
from samestep.errors import CheckpointError, DataError
from tests.integration.commands import Samestep, Start, losses
from tests.unit.vectors.corpora import write_dataset
from trainer.checkpoint.integrity import step_folder
from trainer.checkpoint.manager import Checkpointer
from trainer.checkpoint.meta import read_meta
from trainer.publish.step_zero import StepZero
from trainer.training.compose import build_trainer, open_checkpointer, open_strategy
from trainer.training.starting import load_experiment
from trainer.training.weights.loading import load_weights
from trainer.vectors import glove, word2vec, work
from trainer.vectors.folder import WordVectors, nearest

METHODS = ["skipgram", "cbow", "glove", "ppmi"]
TOPICS, WORDS_OF_TOPIC, COMMON = 5, 8, 6
FAST = {
    "skipgram": ("--epochs", 6, "--batch-size", 64),
    "cbow": ("--epochs", 15, "--batch-size", 64),
    "glove": ("--epochs", 30, "--batch-size", 64, "--x-max", 50),
    "ppmi": (),
}


def topical(sentences: int, shuffled: bool) -> list[str]:
    """Sentences that mix the words of one topic with common ones.

    Shuffled, the same words stand in random sentences.
    """
    generator = np.random.default_rng(0)
    texts = []
    for _ in range(sentences):
        topic = generator.integers(TOPICS)
        own = [f"t{topic}w{word}" for word in generator.integers(WORDS_OF_TOPIC, size=6)]
        common = [f"c{word}" for word in generator.integers(COMMON, size=3)]
        texts.append(generator.permutation(own + common).tolist())
    if shuffled:
        words = generator.permutation([word for text in texts for word in text]).tolist()
        texts = [words[9 * n : 9 * n + 9] for n in range(sentences)]
    return [" ".join(text) for text in texts]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    write_dataset(folder / "topics", topical(1500, shuffled=False))
    tokenizer = Dataset.open(folder / "topics").tokenizer
    write_dataset(folder / "shuffled", topical(1500, shuffled=True), tokenizer=tokenizer)
    return folder


def topic_share(folder: Path) -> float:
    """The share of the nearest 3 neighbors of the words of topics that have the same topic."""
    vectors = WordVectors.load(folder)
    words = [word for word in vectors.words if word.startswith("t")]
    assert len(words) == TOPICS * WORDS_OF_TOPIC
    found = [(word, other) for word in words for _, other in vectors.nearest(vectors.find(word), 3)]
    return float(np.mean([word[:2] == other[:2] for word, other in found]))


@pytest.mark.parametrize("method", METHODS)
def test_neighbors_are_of_the_same_topic(
    planted: Path, tmp_path: Path, samestep: Samestep, method: str
) -> None:
    shares = {}
    for name in ("topics", "shuffled"):
        options = ("--method", method, "--dimensions", 12, *FAST[method])
        result = samestep("vectors", planted / name, *options, "--output", tmp_path / name)
        assert result.code == 0, result.err
        shares[name] = topic_share(tmp_path / name)
    assert shares["topics"] > 0.95
    assert shares["shuffled"] < 0.45  # chance is 7 of 45


def test_analogies(tmp_path: Path, samestep: Samestep) -> None:
    """Words at the crossings of two traits: b1 - a1 + a2 is b2."""
    generator = np.random.default_rng(0)
    texts = []
    for _ in range(2500):
        role, trait = generator.integers(4), generator.integers(2)
        around = [f"role{role}n{n}" for n in generator.integers(5, size=2)]
        around += [f"trait{trait}n{n}" for n in generator.integers(5, size=2)]
        words = [*generator.permutation(around).tolist()]
        texts.append(" ".join([*words[:2], f"word{role}of{trait}", *words[2:]]))
    data = write_dataset(tmp_path / "data", texts)
    options = ("--method", "ppmi", "--dimensions", 10, "--window", 2)
    assert samestep("vectors", data, *options, "--output", tmp_path / "vectors").code == 0
    vectors = WordVectors.load(tmp_path / "vectors")
    right = []
    for a, b in ((a, b) for a in range(4) for b in range(4) if a != b):
        asked = [
            vectors.find(f"word{role}of{trait}")[0] for role, trait in ((b, 0), (a, 0), (a, 1))
        ]
        table = vectors.vectors / vectors.vectors.norm(dim=1, keepdim=True)
        wanted = table[asked[0]] - table[asked[1]] + table[asked[2]]
        extended = torch.cat([table, wanted[None]])
        ((_, found),) = nearest(extended, [len(table)], [*asked, len(table)], 1)
        right.append(vectors.words[found] == f"word{b}of1")
    assert np.mean(right) > 0.9  # chance is 1 of 35


@pytest.mark.parametrize("method", METHODS)
def test_the_same_bytes_again(
    planted: Path, tmp_path: Path, samestep: Samestep, method: str
) -> None:
    options = ("--method", method, "--dimensions", 8, "--text")
    for name, others in {
        "one": ("--workers", 1),
        "two": ("--workers", 3, "--memory", "100kB"),
        "seed": ("--seed", 1),
    }.items():
        output = ("--output", tmp_path / name)
        assert samestep("vectors", planted / "topics", *options, *others, *output).code == 0
        assert not (tmp_path / f"{name}.partial").exists()
    one, two, seed = (
        {
            str(path.relative_to(tmp_path / name)): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file()
        }
        for name in ("one", "two", "seed")
    )
    assert one == two
    # A seed changes the vectors, but the SVD in its last digits only.
    assert one["vectors.safetensors"] != seed["vectors.safetensors"]
    assert one["words.txt"] == seed["words.txt"]
    description = json.loads(one["vectors.json"])
    dataset = Dataset.open(planted / "topics")
    assert description["dataset"] == dataset.manifest.digest
    assert description["tokenizer"] == dataset.tokenizer.fingerprint
    assert description["settings"]["method"] == method
    assert description["occurrences"] == 1500 * 9


HELD = """
import sys, time
from samestep import cli
from trainer.vectors import word2vec, glove, work

word2vec.BLOCK, glove.BLOCK = 1000, 100
work._SAVE_EVERY = 0.0
save = work.State.save

def save_some(state, done, arrays):
    save(state, done, arrays)
    if done == 5:
        time.sleep(1000)

work.State.save = save_some
cli.main()
"""


@pytest.mark.parametrize("method", ["cbow", pytest.param("glove", marks=pytest.mark.long)])
def test_one_that_is_killed_goes_on(
    planted: Path,
    tmp_path: Path,
    samestep: Samestep,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    monkeypatch.setattr("trainer.vectors.word2vec.BLOCK", 1000)
    monkeypatch.setattr("trainer.vectors.glove.BLOCK", 100)
    ask = ("vectors", planted / "topics", "--method", method, "--dimensions", 8, "--epochs", 2)
    assert samestep(*ask, "--output", tmp_path / "whole").code == 0
    output = tmp_path / "killed"
    process = start(*ask, "--output", output, command=(sys.executable, "-c", HELD))
    state = tmp_path / "killed.partial" / "state.safetensors"
    while not state.exists() or work.State(state).done < 5:
        assert process.popen.poll() is None, process.stderr.read_text()
        time.sleep(0.02)
    assert "another process makes" in samestep(*ask, "--output", output).message
    process.popen.kill()
    process.popen.wait()
    other = samestep(*ask, "--output", output, "--seed", 7)
    assert "was begun with another seed; use the same again" in other.message
    # Only blocks that the state does not have are computed again.
    steps = list[int]()
    for module in (word2vec, glove):
        step = module.step
        monkeypatch.setattr(module, "step", lambda *a, step=step: steps.append(1) or step(*a))
    assert samestep(*ask, "--output", output).code == 0
    resumed = len(steps)
    assert load_file(output / "vectors.safetensors").keys() == {"vectors"}
    for name in ("vectors.safetensors", "words.txt", "vectors.json"):
        assert (output / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert samestep(*ask, "--output", tmp_path / "again").code == 0
    assert resumed < len(steps) - resumed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "ppmi", "--dimensions", 1000), "--dimensions is 1000, and the matrix of 46"),
        (("--method", "skipgram", "--min-count", 10**6), "no word of"),
        (("--method", "glove", "--negatives", 3), "--negatives is 3, and --method glove has no"),
        (
            ("--method", "skipgram", "--rate", 1e30),
            "the vectors grow without bound: the loss is nan with --rate 1e+30",
        ),
        (
            ("--method", "glove", "--rate", 1e30),
            "the vectors grow without bound: the loss is nan with --rate 1e+30",
        ),
        (("--method", "cbow", "--workers", 0), "--workers must be at least 1"),
        (("--method", "glove", "--memory", "much"), "--memory must be a size such as"),
    ],
)
def test_wrong_options(
    planted: Path, tmp_path: Path, samestep: Samestep, options: tuple[object, ...], words: str
) -> None:
    result = samestep("vectors", planted / "topics", *options, "--output", tmp_path / "vectors")
    assert result.code in (1, 2)
    assert result.message.startswith(words), result.message
    assert not list(tmp_path.glob("vectors*"))  # nothing is left behind


def test_wrong_datasets_and_folders(planted: Path, tmp_path: Path, samestep: Samestep) -> None:
    ask = ("--method", "glove", "--output", tmp_path / "vectors")
    assert "holds no finished dataset" in samestep("vectors", tmp_path / "none", *ask).message
    tokenizer = Dataset.open(planted / "topics").tokenizer
    empty = write_dataset(tmp_path / "empty", [], tokenizer=tokenizer)
    assert "the train split of" in samestep("vectors", empty, *ask).message
    single = write_dataset(tmp_path / "single", ["c1"] * 20, tokenizer=tokenizer)
    assert "no two words of the dataset are near" in samestep("vectors", single, *ask).message
    assert not list(tmp_path.glob("vectors*"))
    (tmp_path / "vectors").mkdir()
    message = samestep("vectors", planted / "topics", *ask).message
    assert "is there already; remove it, or name another folder" in message


@pytest.fixture(scope="module")
def of_tokens(dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vectors of the tokens of the dataset of `finished_run`, as wide as its model."""
    from samestep.cli import main

    folder = tmp_path_factory.mktemp("vectors") / "tokens"
    options = ["--units", "tokens", "--dimensions", "32", "--min-count", "3", "--epochs", "1"]
    arguments = ["vectors", str(dataset_folder), "--method", "skipgram", *options]
    assert main([*arguments, "--output", str(folder)]) == 0
    return folder


def test_neighbors(
    planted: Path,
    of_tokens: Path,
    finished_run: Path,
    tmp_path: Path,
    samestep: Samestep,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = tmp_path / "words"
    options = ("--method", "ppmi", "--dimensions", 8, "--output", words)
    assert samestep("vectors", planted / "topics", *options).code == 0
    result = samestep("neighbors", words, "t1w2", "--top", 4)
    assert result.code == 0, result.err
    assert f"t1w2 alone, in the ppmi vectors of {words}" in result.out
    vectors = WordVectors.load(words)
    for cosine, word in vectors.nearest(vectors.find("t1w2"), 4):
        assert f"│ {cosine:.3f}  │ {word}" in result.out
    asked = ("neighbors", finished_run, "class", "--in", "a class is a type")
    without, beside = samestep(*asked), samestep(*asked, "--vectors", of_tokens)
    assert "class alone, in the skipgram vectors of" in beside.out
    # What the model says stays the same, and comes after.
    assert beside.out.endswith(without.out)
    assert len(beside.out.splitlines()) > len(without.out.splitlines()) + 10
    for arguments, message in (
        ((words, "nonsense"), "the word 'nonsense' is not among the 46"),
        ((words, "t1w22"), "it has t1w2"),
        ((words, "t1w2", "--in", "a t1w2"), "--in is given, and the word vectors of"),
        ((words, "t1w2", "--layer", 0), "--layer is given, and the word vectors of"),
        (
            (finished_run, "class"),
            "is not a folder of word vectors, so a context is needed; add --in",
        ),
        ((finished_run, "class", "--in", "a class", "--vectors", tmp_path), "has no vectors.json"),
        ((finished_run, "class", "--in", "a class", "--vectors", words), "the word 'class' is not"),
    ):
        assert message in samestep("neighbors", *arguments).message


def train(samestep: Samestep, experiment_file: str, output: Path, *overrides: object):
    steps = ("training.steps=1", "schedule.warmup_steps=0", "training.evaluate_every=null")
    return samestep("train", experiment_file, f"output={output}", *steps, *overrides)


@pytest.mark.long
def test_a_model_starts_from_vectors(
    dataset_folder: Path, of_tokens: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    still = ("optimizer.lr=1e-12", "optimizer.weight_decay=0")
    start = f"init_embeddings={of_tokens}"
    for name, overrides in {"seeded": (), "started": (start,)}.items():
        result = train(samestep, experiment_file, tmp_path / name, *still, *overrides)
        assert result.code == 0, result.err
    vectors = WordVectors.load(of_tokens)
    table, seeded = (
        load_weights(tmp_path / name).tensors["embeddings.tokens.weight"]
        for name in ("started", "seeded")
    )
    assert vectors.tokens is not None
    torch.testing.assert_close(table[vectors.tokens], vectors.vectors, rtol=0, atol=1e-9)
    others = torch.ones(len(table), dtype=torch.bool)
    others[vectors.tokens] = False
    assert 5 <= int(others.sum()) < 300  # special tokens, and rare ones
    torch.testing.assert_close(table[others], seeded[others], rtol=0, atol=1e-9)
    # The rest of the model starts as without vectors.
    for name, tensor in load_weights(tmp_path / "seeded").tensors.items():
        if name != "embeddings.tokens.weight":
            same = load_weights(tmp_path / "started").tensors[name]
            torch.testing.assert_close(same, tensor, rtol=0, atol=1e-9)


def test_a_run_continues_without_its_vectors(
    of_tokens: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    moved = tmp_path / "moved"
    of_tokens.rename(moved)
    start = f"init_embeddings={moved}"
    try:
        assert train(samestep, experiment_file, tmp_path / "run", start).code == 0
        moved.rename(of_tokens)
        more = ("training.steps=2", start)
        result = train(samestep, experiment_file, tmp_path / "run", *more)
        assert result.code == 0, result.err
        gone = train(samestep, experiment_file, tmp_path / "new", start)
        assert "moved is not a folder of word vectors" in gone.message
    finally:
        if moved.exists():
            moved.rename(of_tokens)


def test_the_start_of_a_run_is_computed_again(
    of_tokens: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    """For `samestep replay` and the step 0 of `samestep publish`."""
    folder, run = Path(shutil.copytree(of_tokens, tmp_path / "vectors")), tmp_path / "run"
    assert train(samestep, experiment_file, run, f"init_embeddings={folder}").code == 0
    replayed = json.loads(samestep("replay", run, 1, "--json").out)
    assert replayed["loss"] == pytest.approx(losses(run)[1], rel=1e-5)
    checkpoint = run / "checkpoints" / "step-00000001"
    start, vectors = StepZero.of(checkpoint), WordVectors.load(of_tokens)
    table = start.weights().tensors["embeddings.tokens.weight"]
    assert vectors.tokens is not None
    assert torch.equal(table[vectors.tokens], vectors.vectors)
    other = load_file(folder / "vectors.safetensors")
    save_file({**other, "vectors": 2 * other["vectors"]}, folder / "vectors.safetensors")
    with pytest.raises(CheckpointError, match="has other vectors than when the run began"):
        StepZero.of(checkpoint)
    assert json.loads(samestep("replay", run, 1, "--json").out)["loss"] != replayed["loss"]
    save_file({**other, "vectors": other["vectors"] * float("inf")}, folder / "vectors.safetensors")
    with pytest.raises(DataError, match=r"vectors/vectors\.safetensors holds NaN or infinity"):
        WordVectors.load(folder)
    shutil.rmtree(folder)
    with pytest.raises(DataError, match="is not a folder of word vectors"):
        StepZero.of(checkpoint)


def test_the_start_is_that_of_the_settings_at_the_start(
    experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    starts = []
    for steps, deviation in ((1, 0.02), (2, 0.5)):
        settings = f"training.steps={steps}", f"model.initializer_range={deviation}"
        assert train(samestep, experiment_file, tmp_path, *settings).code == 0
        starts.append(StepZero.of(tmp_path / "checkpoints" / f"step-0000000{steps}"))
    first, second = (start.weights().tensors["embeddings.tokens.weight"] for start in starts)
    assert torch.equal(first, second)
    assert starts[0].identity == starts[1].identity


def test_a_run_goes_on_from_a_snapshot_with_the_record_of_its_start(
    of_tokens: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    """No checkpoint on disk has it yet."""
    run = tmp_path / "run"
    assert train(samestep, experiment_file, run, f"init_embeddings={of_tokens}").code == 0
    experiment = load_experiment(experiment_file, [f"output={tmp_path / 'empty'}"])
    snapshots = Checkpointer(run / "checkpoints", experiment.checkpoint, rank=0, world_size=1)
    with open_strategy(experiment) as strategy:
        durable = open_checkpointer(experiment, strategy.world)
        trainer = build_trainer(
            experiment, experiment.data.open(), strategy, durable, to_restore=True
        )
        trainer.restore(1, snapshots)
        stored = read_meta(step_folder(snapshots.folder, 1))["start"]
        assert stored["embeddings"] is not None
        assert trainer.description["start"] == stored
        trainer.close()


def test_two_processes_start_alike(
    of_tokens: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    """Each process initializes only the elements that it holds."""
    from trainer.models.families import bert
    from trainer.training.weights.embeddings import with_embeddings

    vectors = WordVectors.load(of_tokens)
    settings = yaml.safe_load(Path(experiment_file).read_text())["model"]
    settings.pop("kind")
    with torch.device("meta"):
        model = bert.Config(**settings).build()

    class Named:
        name = "data"
        tokenizer = vectors.tokenizer

    def seeded(name: str, first: int, stop: int) -> torch.Tensor:
        return model.initial_values(name, first, stop, 0)

    values = with_embeddings(seeded, model, vectors, Named())
    name, size = "embeddings.tokens.weight", 600 * 32
    whole = values(name, 0, size)
    for bounds in ((0, 7, 4000, size), (0, 33, 33, 9999, size)):
        pairs = itertools.pairwise(bounds)
        assert torch.equal(torch.cat([values(name, *pair) for pair in pairs]), whole)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("init_from=runs/other", "and init_from has embeddings, too"),
        (
            "model.width=16",
            "has vectors of 32 dimensions, and the model's token embeddings have 16",
        ),
    ],
)
def test_models_that_cannot_start_from_them(
    of_tokens: Path,
    experiment_file: str,
    tmp_path: Path,
    samestep: Samestep,
    override: str,
    words: str,
) -> None:
    start = f"init_embeddings={of_tokens}"
    assert words in train(samestep, experiment_file, tmp_path / "run", start, override).message


def test_vectors_that_no_model_can_start_from(
    planted: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    for units, words in {
        "words": "holds vectors of words, and the model reads tokens",
        "tokens": "was trained with another tokenizer than",
    }.items():
        options = ("--method", "ppmi", "--dimensions", 32, "--units", units)
        folder = tmp_path / units
        assert samestep("vectors", planted / "topics", *options, "--output", folder).code == 0
        start = f"init_embeddings={folder}"
        assert words in train(samestep, experiment_file, tmp_path / "run", start).message
    absent = f"init_embeddings={tmp_path / 'none'}"
    checked = samestep(
        "config", experiment_file, f"output={tmp_path / 'run'}", "--devices", 1, absent
    )
    assert "is not a folder of word vectors" in checked.message
