"""The files of tasks: rows with the columns of the datasets on the Hub become the texts and labels
of the task.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from data_pipeline.building.task_rows import encode
from data_pipeline.sources import BadRecord, PairSource
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.cli import main
from samestep.config import decode, read_tree, to_tree
from samestep.errors import ConfigError
from trainer.models.families import bilm
from trainer.studies.finetune.task import Task, find_tasks

FOLDER = Path(__file__).parents[4] / "configs" / "tasks"
FILES = sorted(
    str(path.relative_to(FOLDER)).removesuffix(".yaml") for path in FOLDER.glob("*/*.yaml")
)
PUBLISHED = {
    "BERT-base": "bert_base",
    "BERT-large": "bert_large",
    "GPT": "gpt1",
    "T5-base": "t5_base",
}
"""The experiments of the models with published scores."""
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
PAIR = {"premise": "It rains.", "hypothesis": "It is wet.", "idx": 0}
TWO = {"sentence1": "It rains.", "sentence2": "It is wet.", "idx": 0}


class Case(NamedTuple):
    """A row as it is on the Hub, and what becomes of it: texts, label, group.

    Or of a pair, source and target.
    """

    row: dict[str, Any]
    texts: tuple[str, ...]
    label: float | None = None
    group: str = ""


WSC = {
    "text": "Mark told Pete lies, which he believed.",
    "span1_text": "Pete",
    "span1_index": 2,
    "span2_text": "he",
}
RECORD = {
    "passage": "Ann met Bob in Rome.",
    "query": "@placeholder is a city.",
    "entities": ["Ann", "Rome"],
    "answers": ["Rome"],
    "idx": {"passage": 4, "query": 7},
}
MULTIRC = {
    "paragraph": "Ann is 9.",
    "question": "How old?",
    "answer": "Nine.",
    "idx": {"paragraph": 1, "question": 2, "answer": 3},
    "label": 1,
}
COPA = {
    "premise": "He fell.",
    "choice1": "Ice.",
    "choice2": "Sun.",
    "question": "cause",
    "idx": 0,
    "label": 0,
}
RACE = {
    "article": "Ann is 9.",
    "question": "Ann is _ .",
    "options": ["8", "9", "10", "11"],
    "answer": "B",
}
SQUAD = {
    "id": "q",
    "title": "t",
    "question": "Who?",
    "context": "Ann did.",
    "answers": {"text": ["Ann"], "answer_start": [0]},
}
BOOLQ = {"question": "is it so", "passage": "It is so.", "idx": 0, "label": 1}
WIC = {
    "word": "bank",
    "sentence1": "A bank lends.",
    "sentence2": "The bank of a river.",
    "start1": 2,
    "label": 0,
}
QQP = {"question1": "How?", "question2": "In which way?", "label": 1, "idx": 0}
QNLI = {"question": "Who?", "sentence": "Ann did.", "label": 0, "idx": 0}
SWAG = {
    "video-id": "a",
    "sent1": "He runs.",
    "sent2": "He",
    "startphrase": "He runs. He",
    **{f"ending{i}": f"stops {i}." for i in range(4)},
    "label": 3,
}
TREC = {
    "text": "Who ?",
    "label": 1,
    "label_coarse": 3,
    "label_coarse_original": "HUM",
    "label_coarse_text": "people",
}
STORY = {
    "InputStoryid": "a",
    **{f"InputSentence{i}": f"S{i}." for i in range(1, 5)},
    "RandomFifthSentenceQuiz1": "Good.",
    "RandomFifthSentenceQuiz2": "Bad.",
    "AnswerRightEnding": 2,
}

CASES = {
    "glue/cola": Case({"sentence": "It rains.", "label": 1, "idx": 0}, ("It rains.",), 1),
    "glue/mnli": Case({**PAIR, "label": 2}, ("It rains.", "It is wet."), 2),
    "glue/mrpc": Case({**TWO, "label": 1}, ("It rains.", "It is wet."), 1),
    "glue/qnli": Case(QNLI, ("Who?", "Ann did."), 0),
    "glue/qqp": Case(QQP, ("How?", "In which way?"), 1),
    "glue/rte": Case({**TWO, "label": 0}, ("It rains.", "It is wet."), 0),
    "glue/sst2": Case({"sentence": "Good.", "label": 1, "idx": 0}, ("Good.",), 1),
    "glue/stsb": Case({**TWO, "label": 3.8}, ("It rains.", "It is wet."), 3.8),
    "glue/wnli": Case({**TWO, "label": 0}, ("It rains.", "It is wet."), 0),
    "superglue/boolq": Case(BOOLQ, ("is it so", "It is so."), 1),
    "superglue/cb": Case({**PAIR, "label": 1}, ("It rains.", "It is wet."), 1),
    "superglue/copa": Case(
        COPA,
        ("He fell.", "What was the cause of this? Ice.", "What was the cause of this? Sun."),
        0,
    ),
    "superglue/multirc": Case(MULTIRC, ("Ann is 9.", "How old? Nine."), 1, "1-2"),
    "superglue/record": Case(RECORD, ("Ann met Bob in Rome.", "Ann is a city."), 0, "7"),
    "superglue/rte_diagnostics": Case({**PAIR, "label": 1}, ("It rains.", "It is wet."), 1),
    "superglue/wic": Case(WIC, ("bank: A bank lends.", "The bank of a river."), 0),
    "superglue/wsc": Case(
        {**WSC, "span2_index": 5, "label": 1},
        ("Mark told Pete lies, which *he* believed.", "Pete"),
        1,
    ),
    "nli/snli": Case({**PAIR, "label": 1}, ("It rains.", "It is wet."), 1),
    "nli/scitail": Case({**PAIR, "label": "neutral"}, ("It rains.", "It is wet."), 1),
    "classification/sst5": Case(
        {"text": "Good.", "label": 4, "label_text": "very positive"}, ("Good.",), 4
    ),
    "classification/imdb": Case({"text": "Good.", "label": 1}, ("Good.",), 1),
    "classification/yelp": Case({"text": "Good.", "label": 1}, ("Good.",), 1),
    "classification/trec6": Case(TREC, ("Who ?",), 3),
    "classification/ag_news": Case({"text": "Stocks fell.", "label": 2}, ("Stocks fell.",), 2),
    "choice/swag": Case(
        SWAG, ("He runs.", "He stops 0.", "He stops 1.", "He stops 2.", "He stops 3."), 3
    ),
    **{
        f"choice/race_{part}": Case(
            RACE, ("Ann is 9.", *(f"Ann is _ . {n}" for n in (8, 9, 10, 11))), 1
        )
        for part in ("middle", "high")
    },
    "choice/rocstories": Case(STORY, ("S1. S2. S3. S4.", "Good.", "Bad."), 1),
    "reading/squad1.1": Case(SQUAD, ("Who?", "Ann did."), None, "q"),
    "reading/squad2.0": Case(SQUAD, ("Who?", "Ann did."), None, "q"),
    **{
        f"text/{name}": Case(row, texts)
        for name, row, texts in (
            (
                "cola",
                {"sentence": "It rains.", "label": 1},
                ("cola sentence: It rains.", "acceptable"),
            ),
            ("sst2", {"sentence": "Good.", "label": 0}, ("sst2 sentence: Good.", "negative")),
            (
                "mrpc",
                {**TWO, "label": 1},
                ("mrpc sentence1: It rains. sentence2: It is wet.", "equivalent"),
            ),
            ("qqp", QQP, ("qqp question1: How? question2: In which way?", "duplicate")),
            (
                "stsb",
                {**TWO, "label": 2.57},
                ("stsb sentence1: It rains. sentence2: It is wet.", "2.6"),
            ),
            (
                "mnli",
                {**PAIR, "label": 1},
                ("mnli hypothesis: It is wet. premise: It rains.", "neutral"),
            ),
            ("qnli", QNLI, ("qnli question: Who? sentence: Ann did.", "entailment")),
            (
                "rte",
                {**TWO, "label": 1},
                ("rte sentence1: It rains. sentence2: It is wet.", "not_entailment"),
            ),
            ("boolq", BOOLQ, ("boolq passage: It is so. question: is it so", "True")),
            (
                "cb",
                {**PAIR, "label": 2},
                ("cb hypothesis: It is wet. premise: It rains.", "neutral"),
            ),
            (
                "copa",
                COPA,
                ("copa choice1: Ice. choice2: Sun. premise: He fell. question: cause", "False"),
            ),
            (
                "multirc",
                MULTIRC,
                ("multirc question: How old? answer: Nine. paragraph: Ann is 9.", "True"),
            ),
            (
                "record",
                RECORD,
                (
                    f"record query: {RECORD['query']} entities: Ann, Rome passage: Ann met Bob in "
                    "Rome.",
                    "Rome",
                ),
            ),
            (
                "wic",
                WIC,
                (
                    "wic sentence1: A bank lends. sentence2: The bank of a river. word: bank",
                    "False",
                ),
            ),
            (
                "wsc",
                {**WSC, "span2_index": 5, "label": 0},
                ("wsc text: Mark told Pete lies, which *he* believed. noun: Pete", "False"),
            ),
            (
                "wnli",
                {**TWO, "label": 1},
                ("wnli sentence1: It rains. sentence2: It is wet.", "entailment"),
            ),
            (
                "snli",
                {**PAIR, "label": 1},
                ("snli hypothesis: It is wet. premise: It rains.", "neutral"),
            ),
            (
                "scitail",
                {**PAIR, "label": "neutral"},
                ("scitail hypothesis: It is wet. premise: It rains.", "neutral"),
            ),
            ("sst5", {"text": "Good.", "label": 4}, ("sst5 sentence: Good.", "very positive")),
            ("imdb", {"text": "Good.", "label": 1}, ("imdb text: Good.", "positive")),
            ("trec6", TREC, ("trec6 question: Who ?", "HUM")),
            (
                "ag_news",
                {"text": "Stocks fell.", "label": 2},
                ("ag_news text: Stocks fell.", "Business"),
            ),
            (
                "swag",
                SWAG,
                ("swag A: stops 0. B: stops 1. C: stops 2. D: stops 3. text: He runs. He", "D"),
            ),
            *(
                (
                    f"race_{part}",
                    RACE,
                    ("race question: Ann is _ . A: 8 B: 9 C: 10 D: 11 article: Ann is 9.", "B"),
                )
                for part in ("middle", "high")
            ),
            ("rocstories", STORY, ("rocstories 1: Good. 2: Bad. story: S1. S2. S3. S4.", "2")),
            ("squad", SQUAD, ("question: Who? context: Ann did.", "Ann")),
            (
                "cnn_dailymail",
                {"article": "Long.", "highlights": "A .\nB .", "id": "a"},
                ("summarize: Long.", "A .\nB ."),
            ),
            *(
                (
                    f"{corpus}_en_{code}",
                    {"translation": {"en": "one", code: "1"}},
                    (f"translate English to {language}: one", "1"),
                )
                for corpus, code, language in (
                    ("wmt14", "de", "German"),
                    ("wmt14", "fr", "French"),
                    ("wmt16", "ro", "Romanian"),
                )
            ),
        )
    },
    "tagging/conll2003": Case({"tokens": ["Ann", "did"], "ner": ["B-PER", "O"]}, ("Ann did",)),
    "tagging/wrong_words": Case({"tokens": ["the", "cat"], "tags": ["O", "B-WRONG"]}, ("the cat",)),
}
CASES |= {f"from_mnli/{name}_from_mnli": CASES[f"glue/{name}"] for name in ("mrpc", "rte", "stsb")}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One for all tasks, of the characters of the rows."""
    texts = [" ".join(map(chr, range(33, 127)))]
    return TokenizerConfig("", "wordpiece", 300, lowercase=False).train(texts)


def own_rows(name: str, row: dict[str, Any], folder: Path) -> Task:
    """The task of a file, with files of one row each in place of the Hub's."""
    for part in ("train", "heldout"):
        (folder / f"{part}.jsonl").write_text(json.dumps(row) + "\n")
    source = {
        "dataset": None,
        "paths": [f"{folder}/train.jsonl"],
        "heldout": [f"{folder}/heldout.jsonl"],
    }
    path = folder / "task.yaml"
    path.write_text(
        yaml.safe_dump({"base": str(FOLDER / f"{name}.yaml"), "source": source, "also": None})
    )
    return Task.read(path)


def test_every_file_has_a_case():
    assert sorted(CASES) == FILES


@pytest.mark.parametrize("name", FILES)
def test_rows_become_what_the_task_is_of(name: str, tokenizer: Tokenizer, tmp_path: Path):
    case = CASES[name]
    config = own_rows(name, case.row, tmp_path).config
    source = config.source.build()
    if isinstance(source, PairSource):
        assert source.parse_pair(next(source.records())) == case.texts
        assert config.score in config.metrics
        return
    row = source.parse_row(next(source.records()))
    assert (row.texts, row.label, row.group) == (case.texts, case.label, case.group)
    (document,) = encode([row], tokenizer, source.kind)
    parts = config.objective.build(tokenizer.vocabulary).pack_spec(config.sequence_length).parts
    assert not isinstance(document, str)
    assert parts.kind == source.kind
    assert (
        len(document.parts) == 1 + parts.choices if parts.choices > 1 else len(document.parts) <= 2
    )


@pytest.mark.parametrize("name", FILES)
def test_what_is_published_can_be_compared(name: str, tokenizer: Tokenizer):
    task = Task.read(FOLDER / f"{name}.yaml")
    config = task.config
    known = {*(config.metrics or config.objective.build(tokenizer.vocabulary).score_names)}
    assert config.score in known
    known |= {f"{further}/{metric}" for further in task.also for metric in known}
    assert set(config.published) <= known
    if config.published:
        name = config.published_by.partition(",")[0].split()[0]
        model = read_tree(FOLDER.parent / "pretrain" / f"{PUBLISHED[name]}.yaml")["model"]
        assert None not in vars(config.published_model).values()
        assert config.published_model.matches({"kind": "bert", **model})


def test_help_and_docs_name_every_recipe(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["finetune-suite", "--help"])
    (in_help,) = re.findall(
        r"--recipe NAME (.*?) \(default", " ".join(capsys.readouterr().out.split())
    )
    page = (FOLDER.parents[1] / "docs" / "finetuning.md").read_text()
    table = page.partition("| `--recipe` |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"\w+", re.sub(r"\(.*?\)| or ", " ", in_help))) == RECIPES
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_the_place_of_the_tasks_own(name: str):
    (own,), (task,) = find_tasks(["cb"]), find_tasks(["cb"], name)
    assert (task.config.source, task.config.objective) == (own.config.source, own.config.objective)
    chosen = {setting: values[0] for setting, values in task.config.grid.items()}
    assert float(task.experiment["optimizer"]["lr"]) == chosen["optimizer.lr"]
    assert task.experiment["training"]["global_batch_size"] == chosen["training.global_batch_size"]
    assert (task.experiment["optimizer"]["kind"] == "adafactor") == (name == "t5")
    assert (task.config.epochs, task.config.warmup) == {
        "roberta": (10, 0.06),
        "gpt": (3, 0.002),
        "t5": (10, 0),
        "mini": (4, 0.1),
        "ulmfit": (50, 0.1),
        "elmo": (10, 0.1),
        "elmo_attention": (10, 0.1),
        "cbow": (5, 0.1),
        "bilstm_attention": (5, 0.1),
    }.get(name, (3, 0.1))


@pytest.mark.parametrize("name", ["elmo", "elmo_attention"])
def test_a_recurrent_model_has_no_dropout_of_attention(name: str):
    """The tasks' own settings are BERT's; a recipe leaves out what its model lacks."""
    (task,) = find_tasks(["mrpc"], name)
    model = task.experiment["model"]
    assert "attention_dropout" not in model
    config = bilm.Config(30, head="classification", labels=("a", "b"))
    changed = decode(bilm.Config, {**to_tree(config), **model})
    assert changed.scalar_mix
    assert (changed.sentences is not None) == (name == "elmo_attention")


def test_what_is_no_recipe_is_refused(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"no recipe 'best'. Use a file, or one of bert, bilstm_attention, cbow"
    ):
        find_tasks(["cb"], "best")
    (tmp_path / "a.yaml").write_text("score: f1\n")
    with pytest.raises(ConfigError, match="Leave score out"):
        find_tasks(["cb"], str(tmp_path / "a.yaml"))


def test_metrics_are_of_written_texts(tmp_path: Path):
    for base, metrics, message in (
        ("glue/rte", "[f1]", "name them in objective.metrics"),
        ("text/rte", "[f1]", "score is 'accuracy', and metrics has f1"),
    ):
        (tmp_path / "a.yaml").write_text(f"base: {FOLDER}/{base}.yaml\nmetrics: {metrics}\n")
        with pytest.raises(ConfigError, match=message):
            Task.read(tmp_path / "a.yaml")


@pytest.mark.parametrize("empty", ["en", "de"])
def test_translations_without_a_text_are_left_out(empty: str, tmp_path: Path):
    config = own_rows(
        "text/wmt14_en_de", {"translation": {"en": "one", "de": "eins", empty: ""}}, tmp_path
    ).config
    source = config.source.build()
    with pytest.raises(BadRecord, match="empty"):
        source.parse_pair(next(source.records()))
    assert config.on_error == "skip"


def test_how_texts_are_written_is_checked(tmp_path: Path):
    assert Task.read(FOLDER / "text" / "cnn_dailymail.yaml").generation == {
        "beams": 4,
        "length_penalty": 0.6,
    }
    for base, generation, message in (
        ("glue/rte", "{beams: 4}", "generation is set, and the objective generates no texts"),
        ("text/rte", "{beem: 4}", r"generation\.beem is not a known key; did you mean 'beams'"),
        ("text/rte", "{min_new_tokens: 16}", "min_new_tokens is 16; use 0 to 15"),
    ):
        (tmp_path / "a.yaml").write_text(f"base: {FOLDER}/{base}.yaml\ngeneration: {generation}\n")
        with pytest.raises(ConfigError, match=message):
            Task.read(tmp_path / "a.yaml")


def test_further_rows_are_held_out_alone(tmp_path: Path):
    own = Task.read(FOLDER / "glue" / "mnli.yaml")
    assert own.also["mismatched"] == replace(
        own.config.source,
        dataset=replace(own.config.source.dataset, split=None, heldout="validation_mismatched"),
    )
    (tmp_path / "a.yaml").write_text(
        f"base: {FOLDER}/glue/mnli.yaml\nalso: {{mismatched: {{wrong: 1}}}}\n"
    )
    with pytest.raises(ConfigError, match=r"also\.mismatched\.wrong is not a known key"):
        Task.read(tmp_path / "a.yaml")


def test_diagnostics_are_read_as_the_rows_of_their_task(tmp_path: Path):
    also = Task.read(FOLDER / "text" / "rte.yaml").also
    for name, row in (("axb", TWO), ("axg", PAIR)):
        (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "label": 1}) + "\n")
        source = replace(also[name], dataset=None, heldout=(f"{tmp_path}/rows.jsonl",)).build()
        assert source.parse_pair(next(source.records())) == CASES["text/rte"].texts


def test_further_rows_are_none_to_train_on(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(
        f"base: {FOLDER}/glue/mnli.yaml\nalso: {{test: {{dataset: {{split: test}}}}}}\n"
    )
    with pytest.raises(ConfigError, match=r"also\.test names rows to train on"):
        Task.read(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("generation: [4]", r"generation is \[4\]; it is a section"),
        ("generation: {beam: 4}", "did you mean 'beams'"),
    ],
)
def test_a_section_that_is_none_is_refused(settings: str, message: str, tmp_path: Path):
    (tmp_path / "a.yaml").write_text(f"base: {FOLDER}/text/cnn_dailymail.yaml\n{settings}\n")
    with pytest.raises(ConfigError, match=message):
        Task.read(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ("epochs: 1", {"accuracy": 92.7}),
        ("source: {dataset: null, paths: [a.jsonl], heldout: [b.jsonl]}", {}),
        ('source: {dataset: {split: "train[:100]"}}', {}),
        ("heldout_fraction: 0.5", {}),
        ('source: {dataset: {split: "train[:9]"}}\npublished: {accuracy: 8.0}', {"accuracy": 8.0}),
    ],
)
def test_published_scores_are_of_the_rows_of_the_file_that_states_them(
    changes: str, shown: dict[str, float], tmp_path: Path
):
    file, further = tmp_path / "own.yaml", tmp_path / "further.yaml"
    file.write_text(f"base: {FOLDER / 'glue' / 'sst2.yaml'}\n{changes}\n")
    assert Task.read(file).published == shown
    further.write_text("base: own.yaml\nepochs: 2\n")
    assert Task.read(further).published == shown


def test_further_rows_of_a_users_own_have_no_published_score(tmp_path: Path):
    file = tmp_path / "own.yaml"
    file.write_text(
        f"base: {FOLDER / 'glue' / 'mnli.yaml'}\n"
        "also: {mismatched: {dataset: null, heldout: [mine.jsonl]}}\n"
    )
    assert "mismatched/accuracy" in Task.read(FOLDER / "glue" / "mnli.yaml").published
    assert Task.read(file).published.keys() == {"accuracy"}
