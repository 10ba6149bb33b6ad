"""A trained model goes on with added tokens: by the commands, from the tokenizer to the export."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from data_pipeline.reading.dataset import Dataset
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.cli import main
from tests.conftest import VOCAB_SIZE
from tests.integration.commands import Samestep
from tests.processes import run_ranks
from trainer.training.weights.loading import load_weights

NEW = ["metaclass", "<place>", "the", "namespace"]  # "the" is in the vocabulary already
STILL = ("optimizer.lr=1e-12", "optimizer.weight_decay=0", "schedule.warmup_steps=0")


def command(arguments: tuple[object, ...]) -> int:
    """Runs a command in one of several processes."""
    return main([str(argument) for argument in arguments])


@pytest.fixture
def extended(finished_run: Path, tmp_path: Path, samestep: Samestep) -> Path:
    """A dataset that was built with the run's tokenizer and three more tokens."""
    (tmp_path / "tokens.txt").write_text("\n".join(NEW) + "\n\n")
    folder = tmp_path / "larger"
    result = samestep("data", "extend", finished_run / "tokenizer", tmp_path / "tokens.txt", folder)
    assert result.code == 0, result.err
    assert "1 of 4 tokens are in the vocabulary already" in result.err
    assert f"set model.vocab_size to {VOCAB_SIZE + 3} or more" in result.err
    texts = [*list(topics.values())[::3], "a metaclass in its <place>, or a namespace."]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = tmp_path / "data.yaml"
    recipe.write_text(
        f"source: {{kind: jsonl, paths: ['{corpus}']}}\ntokenizer: {{path: {folder}}}\n"
        f"output: {tmp_path / 'data'}\nworkers: 1\nheldout_fraction: 0\n"
    )
    assert samestep("data", "build", recipe).code == 0
    return tmp_path / "data"


@pytest.mark.long
@pytest.mark.parametrize(
    ("processes", "strategy"),
    [
        (1, "single"),
        pytest.param(2, "fsdp", marks=pytest.mark.long),
        pytest.param(2, "ddp", marks=pytest.mark.long),
        pytest.param(3, "{kind: deepspeed, stage: 3}", marks=pytest.mark.long),
    ],
)
def test_a_run_starts_with_added_tokens_and_its_export_has_them(
    extended: Path,
    finished_run: Path,
    experiment_file: str,
    tmp_path: Path,
    samestep: Samestep,
    processes: int,
    strategy: str,
) -> None:
    arguments: tuple[object, ...] = (
        "train",
        experiment_file,
        f"data.path={extended}",
        f"output={tmp_path / 'run'}",
        f"init_from={finished_run}",
        "training.steps=1",
        *STILL,
        f"strategy={strategy}",
    )
    size = VOCAB_SIZE + 3
    message = samestep(*arguments).err
    assert f"has a vocabulary of {size} and model.vocab_size is {VOCAB_SIZE}" in message
    started = run_ranks(processes, command, (*arguments, "model.vocab_size=608"))
    assert started == [0] * processes
    # The learning rate is so small that the weights after a step are those it started with.
    before, after = load_weights(finished_run), load_weights(tmp_path / "run")
    for name in ("embeddings.tokens.weight", "head.bias"):
        old, new = before.tensors[name], after.tensors[name]
        assert len(new) == 608
        torch.testing.assert_close(new[:VOCAB_SIZE], old, rtol=0, atol=1e-9)
        mean = old.double().mean(0).float().expand_as(new[VOCAB_SIZE:])
        torch.testing.assert_close(new[VOCAB_SIZE:], mean, rtol=0, atol=1e-7)

    for run, folder in ((finished_run, "old"), (tmp_path / "run", "new")):
        assert samestep("export", run, tmp_path / folder).code == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert tokenizer.convert_ids_to_tokens([size - 3, size - 2, size - 1]) == [
        "metaclass",
        "<place>",
        "namespace",
    ]
    text = "a metaclass has its <place> in a namespace"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert {size - 3, size - 2, size - 1} < set(ids)
    assert Dataset.open(extended).tokenizer.encode_batch([text])[0].tolist() == ids
    # In transformers, too, old tokens have the logits that they had.
    inputs = AutoTokenizer.from_pretrained(tmp_path / "old")(
        "names in a class", return_tensors="pt"
    )
    assert torch.equal(
        inputs["input_ids"], tokenizer("names in a class", return_tensors="pt")["input_ids"]
    )
    logits = [
        AutoModelForMaskedLM.from_pretrained(tmp_path / folder)(**inputs).logits.detach()
        for folder in ("old", "new")
    ]
    torch.testing.assert_close(logits[1][..., :VOCAB_SIZE], logits[0], rtol=1e-5, atol=1e-6)


def test_bad_input(finished_run: Path, tmp_path: Path, samestep: Samestep) -> None:
    own, tokens = finished_run / "tokenizer", tmp_path / "tokens.txt"
    spiece, target = tmp_path / "spiece", tmp_path / "target"
    TokenizerConfig("", "unigram", vocab_size=18).train(["the dog of a fox runs"] * 50).save(spiece)
    tokens.write_text("the\n")
    for arguments, words in (
        ((own, tokens, target), "tokens.txt has no token that"),
        ((own, tmp_path / "none", target), "cannot read the tokens in"),
        ((tmp_path, tokens, target), "there is no tokenizer in"),
        ((own, tokens, own), "is the tokenizer itself"),
        ((own, tokens, finished_run), "exists already, and datasets may have been built with it"),
        ((own, tokens, "hf://ada/bert"), "is on the Hub. Name a folder on this machine"),
    ):
        assert words in samestep("data", "extend", *arguments).message
    tokens.write_text("cat\n")
    message = samestep("data", "extend", spiece, tokens, target).message
    assert "a spiece.model cannot be extended. Convert it with AutoTokenizer" in message
    assert not target.exists()


def test_tokens_are_compared_as_the_tokenizer_reads_them(
    tmp_path: Path, samestep: Samestep
) -> None:
    tokenizer = TokenizerConfig("", "wordpiece", vocab_size=40, lowercase=True)
    tokenizer.train(["fever is a word"] * 50).save(tmp_path / "own")
    size = Tokenizer.load(tmp_path / "own").vocabulary.size
    words, larger = tmp_path / "words.txt", tmp_path / "larger"
    words.write_text("Fever\nCovid\ncovid\nCOVID\nSoir\u00e9e\nsoiree\n")
    result = samestep("data", "extend", tmp_path / "own", words, larger)
    assert result.code == 0, result.err
    assert "1 of 3 tokens are in the vocabulary already" in result.err
    extended = Tokenizer.load(larger)
    assert extended.vocabulary.size == size + 2
    ids = extended.encode_batch(["fever covid soiree"])[0].tolist()
    assert ids[0] == Tokenizer.load(tmp_path / "own").encode_batch(["fever"])[0].tolist()[0]
    assert ids[1:] == [size, size + 1]
    # Also beside a token that was added in capitals.
    words.write_text("covid\n")
    message = samestep("data", "extend", larger, words, tmp_path / "again").message
    assert "has no token that" in message
    # A tokenizer that keeps capitals has two tokens for the two.
    cased = TokenizerConfig("", "wordpiece", vocab_size=40)
    cased.train(["fever is a word"] * 50).save(tmp_path / "cased")
    words.write_text("Fever\nCovid\ncovid\n")
    result = samestep("data", "extend", tmp_path / "cased", words, tmp_path / "three")
    assert "3 of them new" in result.err


def test_whole_words(finished_run: Path, tmp_path: Path, samestep: Samestep) -> None:
    (tmp_path / "tokens.txt").write_text("zap\n")
    for arguments, found in (((), 2), (("--whole-words",), 1)):
        folder = tmp_path / f"tokenizer-{found}"
        command = ("data", "extend", finished_run / "tokenizer", tmp_path / "tokens.txt", folder)
        assert samestep(*command, *arguments).code == 0
        tokenizer = Tokenizer.load(folder)
        theirs = AutoTokenizer.from_pretrained(folder)
        text = "a zap, and zapping"
        ids = tokenizer.encode_batch([text])[0].tolist()
        assert ids.count(tokenizer.vocabulary.size - 1) == found
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
