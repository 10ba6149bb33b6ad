"""The card that goes with an exported model.

It says what the run says, runs as it stands, and gives nothing away.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from safetensors import safe_open

import samestep as samestep_package
from data_pipeline.format.manifest import Manifest
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from tests.integration import tasks
from tests.integration.commands import Samestep
from tests.outputs import published
from trainer.models.families import bert, gpt2, roberta, t5
from trainer.publish import model_card
from trainer.training.weights.loading import load_weights

LABELS = ("yes | no", "<b>`*_maybe_*`</b>", "---\nlicense: mit", "```")


def card(folder: Path) -> tuple[dict[str, Any], str]:
    """The metadata and the Markdown of an exported folder."""
    _, metadata, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(metadata), text


def table(text: str, section: str) -> dict[str, str]:
    """The rows of a section's table of two columns."""
    lines = text.partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines()
    found = [re.findall(r"(?:\\.|[^|\\])+", line) for line in lines if line.startswith("| ")]
    assert all(len(row) == 2 for row in found), found
    return {name.strip(): value.strip() for name, value in found[2:]}


def test_a_card_says_what_the_run_says(
    finished_run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    assert samestep("export", finished_run, tmp_path / "first").code == 0
    metadata, text = card(tmp_path / "first")
    assert metadata == {
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": ["samestep"],
    }
    with safe_open(tmp_path / "first" / "model.safetensors", "np") as tensors:
        parameters = sum(tensors.get_tensor(name).size for name in tensors.keys())  # noqa: SIM118
    model, training = table(text, "Model"), table(text, "Training")
    assert (model["family"], model["layers"], model["width"]) == ("bert", "2", "32")
    assert model["parameters"] == f"{parameters:,}"
    assert (training["steps"], training["global batch"], training["warm-up steps"]) == (
        "12 of 12",
        "10",
        "4",
    )
    assert (training["optimizer"], training["learning rate"], training["schedule"]) == (
        "adamw",
        "0.001",
        "linear",
    )
    run = finished_run.name
    assert (training["run"], training["checkpoint"], training["samestep"]) == (
        *(run, "step 12"),
        samestep_package.__version__,
    )
    assert model["exported by"] == f"samestep {samestep_package.__version__}"
    assert (training["seed"], training["strategy"], training["precision"]) == ("0", "fsdp", "fp32")
    manifest = Manifest.load(dataset_folder)
    documents = sum(shard.documents for shard in manifest.splits["train"])
    assert f"| topics | {documents:,} | " in text
    assert manifest.digest[:16] in text
    (scores,) = (row for row in tasks.rows_of(finished_run) if "heldout/loss" in row)
    assert table(text, "Held-out scores")["loss"] == f"{scores['heldout/loss']:.6g}"
    (settings,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert yaml.safe_load(settings)["schedule"]["warmup_steps"] == 4
    assert "tracking" not in settings
    assert str(finished_run.parent) not in text
    assert str(dataset_folder.parent) not in text


def test_the_terms_of_the_first_weights_stay(
    finished_run: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    """Through runs that start from each other, and an average, without the first folder."""
    assert samestep("export", finished_run, tmp_path / "theirs").code == 0
    readme = tmp_path / "theirs" / "README.md"
    assert "license" not in card(tmp_path / "theirs")[0]
    stated = {"license": "apache-2.0", "language": ["no", "en"], "base_model": "ada/bert"}
    readme.write_text(f"---\n{yaml.safe_dump(stated)}datasets: [x]\n---\nlicense: mit\n")
    short = ("training.steps=2", "schedule.warmup_steps=1", "checkpoint={every: 1, keep_last: 2}")
    origin = tmp_path / "theirs"
    for name in ("first", "second"):
        run = tmp_path / name
        begin = (f"init_from={origin}", f"output={run}", *short)
        assert samestep("train", experiment_file, *begin).code == 0
        origin = run
        shutil.rmtree(tmp_path / "theirs", ignore_errors=True)
    assert samestep("average", run, tmp_path / "mean", "--last", "2").code == 0
    for weights in ("first", "second", "mean"):
        assert samestep("export", tmp_path / weights, tmp_path / f"{weights}-out").code == 0
        metadata, _ = card(tmp_path / f"{weights}-out")
        assert {name: metadata.get(name) for name in (*stated, "datasets")} == {
            **stated,
            "datasets": None,
        }
    assert samestep("export", tmp_path / "mean-out", tmp_path / "again").code == 0
    assert card(tmp_path / "again")[0]["license"] == "apache-2.0"


def test_datasets_of_the_hub_are_named() -> None:
    table = {"path": "nyu-mll/glue", "revision": "abc", "name": "mrpc"}
    hub = {"kind": "huggingface", "path": "ada/books", "revision": "abc", "name": None}
    local = {"kind": "huggingface", "path": "data/saved", "revision": None}
    files = {"kind": "classification", "paths": ["a/b"], "dataset": None}
    others = [files, {**local, "revision": ""}, {"kind": "jsonl", "path": "a/b", "revision": "1"}]
    sources = [{"kind": "classification", "dataset": table}, hub, local, *others]
    assert model_card.hub_datasets(sources) == ["ada/books", "nyu-mll/glue"]


def scores(text: str) -> dict[str, dict[str, str]]:
    """The tables of scores in a card, by what is said above them."""
    *said, _ = text.partition("## Held-out scores\n")[2].partition("\n## ")
    parts = re.findall(r"^(\w.*):\n\n((?:\|.*\n)+)", said[0], re.MULTILINE)
    return {heading: dict(re.findall(r"\| (\S+) \| (\S+) \|", rows)) for heading, rows in parts}


@pytest.mark.long
def test_a_card_of_a_fine_tuned_run_has_the_scores_of_its_task(
    finished_run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """Those of training, and those of further rows that this checkpoint was scored on, the newest
    of each.
    """
    short = (
        "training.steps=8",
        "schedule.warmup_steps=2",
        "training.evaluate_every=4",
        "checkpoint.every=4",
    )
    tasks.tune("classification", tmp_path, finished_run, dataset_folder / "tokenizer", *short)
    run, file = tmp_path / "run-classification", tmp_path / "classification-data.yaml"
    further = [
        f"source.heldout=[{tasks.write(tmp_path / 'more.jsonl', tasks.classification(20, 400))}]"
    ]
    assert samestep("data", "build", file, f"output={tmp_path / 'unlike'}", *further).code == 0
    for arguments in (["--step", "4"], ["training.evaluate_batches=1"], []):
        assert samestep("evaluate", run, f"data.path={tmp_path / 'unlike'}", *arguments).code == 0
    *_, trained = (row for row in tasks.rows_of(run) if "heldout/accuracy" in row)
    *_, evaluated = map(json.loads, (run / "scores.jsonl").read_text().splitlines())
    assert samestep("export", run, tmp_path / "exported").code == 0
    metadata, text = card(tmp_path / "exported")
    assert metadata["pipeline_tag"] == "text-classification"
    names = ("accuracy", "f1", "matthews")
    found = scores(text)
    assert list(found) == ["On the held-out split, after step 8", "On unlike, after step 8"]
    for table_, row in zip(found.values(), (trained, evaluated), strict=True):
        assert {name: table_[name] for name in names} == {
            name: f"{row[f'heldout/{name}']:.6g}" for name in names
        }
    assert samestep("export", run / "checkpoints" / "step-00000004", tmp_path / "earlier").code == 0
    _, text = card(tmp_path / "earlier")
    assert list(scores(text)) == ["On the held-out split, after step 4", "On unlike, after step 4"]

    shutil.rmtree(run / "checkpoints" / "step-00000008")
    assert samestep("train", run / "config.yaml").code == 0
    assert samestep("export", run, tmp_path / "again").code == 0
    _, text = card(tmp_path / "again")
    assert list(scores(text)) == ["On the held-out split, after step 8"], (
        "the other is of a checkpoint that is gone"
    )


def test_what_is_not_known_is_not_said(
    finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """Scores that are newer than the checkpoint; those of a run that is not there.

    A dataset that has moved.
    """
    assert (
        samestep(
            "export", finished_run / "checkpoints" / "step-00000008", tmp_path / "earlier"
        ).code
        == 0
    )
    _, text = card(tmp_path / "earlier")
    assert table(text, "Training")["steps"] == "8 of 12"
    assert "## Held-out scores" not in text

    alone = tmp_path / "alone"
    shutil.copytree(finished_run / "checkpoints" / "step-00000012", alone / "step-00000012")
    shutil.copytree(finished_run / "tokenizer", alone / "tokenizer")
    assert samestep("export", alone / "step-00000012", tmp_path / "copied").code == 0
    _, text = card(tmp_path / "copied")
    assert table(text, "Training")["steps"] == "12 of 12"
    assert "## Held-out scores" not in text

    assert samestep("export", tmp_path / "copied", tmp_path / "again").code == 0
    _, text = card(tmp_path / "again")
    assert re.findall("^## (.*)", text, re.MULTILINE) == ["Model", "Use"]
    downloaded = model_card.write(
        load_weights(tmp_path / "again"), "hf://ada/bert@main", "name", ["torch"], "[MASK]"
    )
    assert yaml.safe_load(downloaded.split("---\n")[1])["base_model"] == "ada/bert"


def test_settings_give_nothing_away() -> None:
    tree = {
        "output": "/home/ada/runs/first",
        "model": {"vocab_size": 600, "api_key": "hidden-1"},
        "data": {
            "path": "https://ada:hidden-2@store.example/data/wiki?sig=hidden-3",
            "cache": "~/ada/cache",
        },
        "tracking": {"wandb": {"entity": "hidden-4"}},
        "init_from": "hf://google-bert/bert-base-uncased",
        "note": "```\n</details>",
    }
    text = model_card.configuration(tree)
    assert not re.search("ada|hidden|store", text)
    assert yaml.safe_load(text.partition("````yaml\n")[2].partition("````")[0]) == {
        "output": "first",
        "model": {"vocab_size": 600, "api_key": "(left out)"},
        "data": {"path": "wiki", "cache": "cache"},
        "init_from": "hf://google-bert/bert-base-uncased",
        "note": "```\n</details>",
    }


SMALL: dict[str, Any] = {"vocab_size": 600, "layers": 1, "width": 16, "heads": 2, "ffn_width": 32}
BERT = {**SMALL, "max_positions": 64}
MODELS: dict[str, Any] = {
    "fill-mask": bert.Config(**BERT),
    "text-classification": bert.Config(**BERT, head="classification", labels=LABELS),
    "token-classification": bert.Config(**BERT, head="tagging", labels=("O", "B-PER", "I-PER")),
    "token-classification by RoBERTa": roberta.Config(
        **BERT, head="tagging", labels=("O", "B-PER", "I-PER")
    ),
    "question-answering": bert.Config(**BERT, head="question_answering"),
    "multiple-choice": bert.Config(**BERT, head="multiple_choice"),
    "text-generation": gpt2.Config(**{**SMALL, "ffn_width": 64}, max_positions=64),
    "text2text-generation": t5.Config(**SMALL, head_width=8),
}


@pytest.mark.parametrize(
    ("datasets", "query"),
    [
        ([("digest", {"source": {"query_prompt": "find "}})], "'find A query.'"),
        ([("digest", None)], "'A query.'"),
        ([], "'A query.'"),
    ],
)
def test_the_example_of_a_reranker_has_the_prompts_of_its_dataset(
    datasets: list[Any], query: str
) -> None:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(model_card.__file__).with_name("templates")),
        undefined=jinja2.ChainableUndefined,
    )
    environment.filters |= {"fenced": model_card._fenced, "repr": repr}
    template = environment.get_template("text-ranking.md.jinja")
    assert f"query = {query}\n" in template.render(name="mine", datasets=datasets)


@pytest.mark.parametrize("task", MODELS)
def test_the_example_runs(
    task: str,
    dataset_folder: Path,
    tmp_path: Path,
    samestep: Samestep,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As it stands in the card, beside the exported folder.

    Whatever labels are called, they stay in their cell.
    """
    from trainer.checkpoint.huggingface import save_folder

    config = MODELS[task]
    model = config.build()
    for name, parameter in model.named_parameters():
        parameter.data = model.initial_values(name, 0, parameter.numel(), seed=0).view_as(parameter)
    tokenizer = dataset_folder / "tokenizer"
    if isinstance(config, roberta.Config):  # its padding has another number
        tokenizer = tmp_path / "tokenizer"
        TokenizerConfig("", algorithm="bpe", vocab_size=300).train(["Ada lived in London."]).save(
            tokenizer
        )
    save_folder(tmp_path / "theirs", *published(config, model.state_dict()), tokenizer)
    monkeypatch.chdir(tmp_path)
    assert samestep("export", "theirs", "it's_ours").code == 0
    metadata, text = card(tmp_path / "it's_ours")
    assert metadata["pipeline_tag"] == task.partition(" ")[0]
    assert "license" not in metadata
    if config.head == "classification":
        shown = r"yes \| no, \<b\>\`\*\_maybe\_\*\`\</b\>, --- license: mit, \`\`\`"
        assert table(text, "Model")["labels"] == shown
        assert (
            json.loads((tmp_path / "it's_ours" / "config.json").read_text())["id2label"]["0"]
            == "yes | no"
        )
    needs = ["torch", "transformers"]
    if config.head == "embedding":
        needs.append("sentence-transformers")
    assert re.findall("^pip install (.*)$", text, re.MULTILINE) == [" ".join(needs)]
    (code,) = re.findall(r"```python\n(.*?)```\n", text, re.DOTALL)
    capsys.readouterr()
    exec(compile(code, "README.md", "exec"), {})
    # An untrained model's answer to a question may end before it starts: then the line is empty.
    assert capsys.readouterr().out
