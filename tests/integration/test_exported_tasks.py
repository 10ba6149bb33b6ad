"""What is exported gives, with its tokenizer, the numbers in `transformers` that the model was
scored by here.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from data_pipeline.tokenizers.tokenizer import Tokenizer
from tests.integration import tasks
from tests.integration.commands import Samestep
from trainer.models.families import bart
from trainer.objectives.rows import logits as logits_of
from trainer.publish.tokenizer import adapt
from trainer.strategies import Replica
from trainer.training.compose import open_loader
from trainer.training.starting import load_experiment
from trainer.training.weights.loading import load_weights

SHAPE = {"layers": 1, "width": 32, "heads": 2, "ffn_width": 64}
END = "<|endoftext|>"


def write_tokenizer(algorithm: str, folder: Path) -> None:
    """GPT-2's own kind has one special token, which begins and ends texts and is no padding."""
    words = " ".join((*tasks.FILL, *tasks.NAMES))
    if algorithm != "gpt2":
        size = {"wordpiece": 100, "bpe": 300, "unigram": 36}[algorithm]
        TokenizerConfig("", algorithm=algorithm, vocab_size=size, sentinels=2).train(
            [words] * 20
        ).save(folder)
        return
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=alphabet
    )
    backend.train_from_iterator([words] * 20, trainer)
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "tokenizer_class": "GPT2Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def our_logits(experiment_file: Path, run: Path) -> np.ndarray:
    """Of the held-out rows, in their order."""
    experiment = load_experiment(experiment_file)
    dataset = experiment.data.open()
    weights = load_weights(run)
    model = weights.config.build().eval()
    model.load_state_dict(dict(weights.tensors))
    found = {}
    with open_loader(
        experiment, dataset, Replica(0, 1), experiment.resolved_phases()[0], "heldout"
    ) as rows:
        for batch in (batch for step in rows for batch in step):
            with torch.no_grad():
                logits = logits_of(model, batch, "classification")[:, 0]
            counts = batch["weights"] > 0
            found.update(
                zip(batch["document"][counts].tolist(), logits[counts].numpy(), strict=True)
            )
    return np.stack([found[row] for row in sorted(found)])


@pytest.mark.parametrize(
    ("family", "algorithm"),
    [
        ("bert", "wordpiece"),
        ("roberta", "bpe"),
        ("t5", "unigram"),
        ("bart", "bpe"),
        ("gpt2", "bpe"),
        ("gpt2", "gpt2"),
    ],
)
def test_pairs_of_texts_get_the_same_scores(
    family: str, algorithm: str, tmp_path: Path, samestep: Samestep
) -> None:
    write_tokenizer(algorithm, tmp_path / "tokenizer")
    assert (
        samestep(
            "data", "build", tasks.write_build("regression", tmp_path, tmp_path / "tokenizer")
        ).code
        == 0
    )
    file = tasks.write_experiment("regression", tmp_path, tmp_path, steps=1)
    tree = yaml.safe_load(file.read_text())
    del tree["init_from"]
    shape = SHAPE | ({"head_width": 16} if family == "t5" else {"initializer_range": 0.2})
    size = len(AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    tree["model"] = {
        "kind": family,
        "vocab_size": size,
        **shape,
        "head": "classification",
        "labels": ["score"],
    }
    tree["objective"]["reads"] = "last" if family in ("t5", "bart", "gpt2") else "first"
    tree["schedule"], tree["data"]["sequence_length"] = {}, 64  # nothing is cut
    file.write_text(yaml.safe_dump(tree))
    assert samestep("train", file).code == 0
    assert samestep("export", tmp_path / "run-regression", tmp_path / "exported").code == 0

    rows = [
        json.loads(line) for line in (tmp_path / "regression-dev.jsonl").read_text().splitlines()
    ]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    batch = tokenizer(
        [row["a"] for row in rows], [row["b"] for row in rows], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        theirs = model(**batch).logits.numpy()
    np.testing.assert_allclose(
        our_logits(file, tmp_path / "run-regression"), theirs, rtol=1e-5, atol=1e-5
    )
    from transformers import pipeline

    serve = pipeline(
        "text-classification", str(tmp_path / "exported"), device="cpu", function_to_apply="none"
    )
    scores = serve([{"text": row["a"], "text_pair": row["b"]} for row in rows[:5]], batch_size=5)
    np.testing.assert_allclose(
        [score["score"] for score in scores], theirs[:5, 0], rtol=1e-4, atol=1e-5
    )


def test_sources_of_an_exported_bart_are_written_as_in_training(tmp_path: Path) -> None:
    """A text and </s>, without the <s> that the tokenizer puts before other models' texts."""
    write_tokenizer("bpe", tmp_path)
    before = AutoTokenizer.from_pretrained(tmp_path)
    cls, sep = before.cls_token_id, before.sep_token_id
    text = f"{tasks.NAMES[0]} {tasks.FILL[0]}"
    (begin, *ids, end) = before(text)["input_ids"]
    assert (begin, end) == (cls, sep)
    vocabulary = Tokenizer.load(tmp_path).vocabulary
    adapt(tmp_path, bart.Config(start_token=sep), vocabulary, generates_targets=True)
    after = AutoTokenizer.from_pretrained(tmp_path)
    assert after(text)["input_ids"] == [*ids, sep]
    assert after(text, text)["input_ids"] == [*ids, sep, *ids, sep]
