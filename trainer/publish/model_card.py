"""Model cards: what an exported model is, what it was trained on and how, and its scores.

A card is Markdown after a block of metadata for the Hugging Face Hub. It reveals nothing about the
machine: folders, addresses and settings that look like secrets are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import jinja2
import yaml

from data_pipeline.format.manifest import Manifest
from data_pipeline.reading.dataset import load_manifest
from samestep.config import Tree
from samestep.errors import SamestepError
from samestep.storage import shown
from samestep.storage.hub import name_and_revision
from samestep.storage.urls import is_hub_path
from samestep.tasks import facts_of_head
from trainer.checkpoint import integrity
from trainer.models import ModelConfig
from trainer.monitoring.jsonl import read_rows, scores_of
from trainer.training.weights.loading import Weights

_SECRET = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE
)
_MARKUP = re.compile(r"([\\`*\[\]<>|#~&$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")

_TEMPLATES = {
    # Everything unknown is left out: a row without a value, a section without rows.
    "card": """\
{%- macro row(name, value) %}
{%- if value is not none and value != "" %}| {{ name }} | {{ value | escaped }} |
{% endif %}{% endmacro -%}
{%- macro listed(names) %}{{ names[:30] | join(", ") }}
{%- if names | length > 30 %} and {{ (names | length - 30) | count }} more{% endif %}
{%- endmacro -%}
---
library_name: {{ "peft" if base
  else "sentence-transformers" if pipeline == "sentence-similarity" else "transformers" }}
pipeline_tag: {{ pipeline }}
tags:
- samestep
{% if hub_name -%}
base_model: {{ hub_name }}
{% endif -%}
---

# {{ name | escaped }}

## Model

| | |
| --- | --- |
{{ row("family", model.model_type) -}}
{{ row("kind", "encoder and decoder" if model.encoder_decoder
               else "decoder, left to right" if model.causal else "encoder") -}}
{{ row("head", model.head.replace("_", " ")) -}}
{{ row("layers", model.layers) -}}
{{ row("width", model.width) -}}
{{ row("attention heads", model.heads or none) -}}
{{ row("vocabulary", model.vocab_size | count) -}}
{{ row("maximum length", model.max_positions | count) -}}
{{ row("parameters", parameters | count) -}}
{{ row("labels", listed(model.labels)) }}
{% if datasets -%}
## Trained on

| source files | documents | tokens | digest |
| --- | --- | --- | --- |
{% for digest, manifest in datasets -%}
{%- set shards = manifest.splits.train -%}
{%- set files = manifest.files | map("file", manifest.source) | unique(true) | list -%}
| {{ listed(files) | escaped }} |
{%- if manifest %} {{ shards | sum("documents") | count }} | {{ shards | sum("tokens") | count }}
{%- else %}  | {% endif %} | {{ digest[:16] }} |
{% endfor %}
{% endif -%}
{% if config -%}
## Training

| | |
| --- | --- |
{{ row("started from", init_from and init_from | public) -}}
{{ row("embeddings from", config.init_embeddings and config.init_embeddings | public) -}}
{{ row("objective", config.objective.kind) -}}
{{ row("steps", (weights.step | count) + " of " + (config.training.steps | count)) -}}
{{ row("examples seen", meta.state.examples | count) -}}
{{ row("tokens seen", meta.state.tokens | count) -}}
{{ row("sequence length", config.data.sequence_length) -}}
{{ row("global batch", config.training.global_batch_size) -}}
{{ row("phases", config.phases | length or none) -}}
{{ row("optimizer", config.optimizer.kind) -}}
{{ row("learning rate", config.optimizer.lr) -}}
{{ row("weight decay", config.optimizer.weight_decay) -}}
{{ row("schedule", config.schedule.decay) -}}
{{ row("warm-up steps", config.schedule.warmup_steps | count) -}}
{{ row("seed", config.seed) -}}
{{ row("strategy", config.strategy.kind) -}}
{{ row("precision", config.training.precision) -}}
{% for name, version in (meta.versions or {}).items() %}{{ row(name, version) }}{% endfor %}
{% endif -%}
{% if scores -%}
## Held-out scores

{% for heading, values in scores.items() -%}
{{ heading | escaped }}:

| score | value |
| --- | --- |
{% for name, value in values.items() %}{{ row(name, "%.6g" | format(value)) }}{% endfor %}
{% endfor -%}
{% endif -%}
## Use

{% filter fenced("") -%}
pip install {{ packages | join(" ") }}
{% endfilter %}
{% include "adapter" if base else [pipeline, "pipeline"] %}
{%- if config %}
## Configuration

{{ configuration }}
{%- endif -%}
""",
    "pipeline": """\
{% filter fenced("python") -%}
from transformers import pipeline

model = pipeline({{ pipeline | repr }}, model={{ name | repr }})
print(model({% if pipeline == "fill-mask" -%}
{{ ("The man went to the " ~ mask ~ ".") | repr }}
{%- elif pipeline == "text-generation" -%}
'Once upon a time', max_new_tokens=20
{%- elif pipeline == "token-classification" -%}
'Ada Lovelace lived in London.'
{%- elif 2 in datasets | map(attribute="1.source.texts") | map("length") | list -%}
{'text': 'A text.', 'text_pair': 'Another one.'}
{%- else -%}
'A text.'
{%- endif %}))
{% endfilter %}
""",
    # transformers has no pipelines for this kind of model and the next three.
    "sentence-similarity": """\
{% filter fenced("python") -%}
from sentence_transformers import SentenceTransformer

model = SentenceTransformer({{ name | repr }})
embeddings = model.encode(['A text.', 'Another one.'])
print(model.similarity(embeddings, embeddings))
{% endfilter %}
""",
    "multiple-choice": """\
{% filter fenced("python") -%}
from transformers import AutoModelForMultipleChoice, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({{ name | repr }})
model = AutoModelForMultipleChoice.from_pretrained({{ name | repr }})
choices = ["The street is wet.", "The street is dry."]
inputs = tokenizer(["It rained."] * 2, choices, padding=True, return_tensors="pt")
print(model(**{key: value[None] for key, value in inputs.items()}).logits.argmax())
{% endfilter %}
""",
    "question-answering": """\
{% filter fenced("python") -%}
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({{ name | repr }})
model = AutoModelForQuestionAnswering.from_pretrained({{ name | repr }})
inputs = tokenizer("Who wrote the letter?", "Ada wrote the letter.", return_tensors="pt")
answer = model(**inputs)
start, end = answer.start_logits.argmax(), answer.end_logits.argmax()
print(tokenizer.decode(inputs.input_ids[0, start : end + 1]))
{% endfilter %}
""",
    "text2text-generation": """\
{% filter fenced("python") -%}
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({{ name | repr }})
model = AutoModelForSeq2SeqLM.from_pretrained({{ name | repr }})
output = model.generate(**tokenizer("A text.", return_tensors="pt"), max_new_tokens=20)
print(tokenizer.batch_decode(output, skip_special_tokens=True))
{% endfilter %}
""",
    # A base of another task has a head of another size, which transformers must ignore.
    "adapter": """\
{%- set classes = {"fill-mask": "MaskedLM", "text-generation": "CausalLM",
                   "text2text-generation": "Seq2SeqLM"} -%}
{%- set class = "AutoModelFor" ~ (facts.architecture or classes[pipeline]) -%}
{%- set base_name = hub_name or base.path | public -%}
{%- set labels, base_labels = model.labels | length, base.config.labels | length -%}
{% if base.step is not none -%}
The adapter belongs to a checkpoint of samestep, which has to be exported first:

{% filter fenced("") -%}
samestep export {{ base_name }} base
{% endfilter %}
{% endif -%}
{% filter fenced("python") -%}
from peft import PeftModel
from transformers import AutoTokenizer, {{ class }}

tokenizer = AutoTokenizer.from_pretrained({{ name | repr }})
base = {{ class }}.from_pretrained(
{{- "'base'" if base.step is not none else base_name | repr -}}
{%- if revision %}, revision={{ revision | repr }}{% endif -%}
{%- if labels %}, num_labels={{ labels }}{% endif -%}
{%- if labels != base_labels > 0 and labels %}, ignore_mismatched_sizes=True{% endif %})
model = PeftModel.from_pretrained(base, {{ name | repr }})
{% endfilter %}
""",
}


def packages(model: ModelConfig, tokenizer: Path, adapter: bool = False) -> list[str]:
    """Returns the packages that load an exported model or adapter.

    Args:
        tokenizer: folder of its tokenizer.
        adapter: whether it is an adapter for the `peft` library.
    """
    names = ["torch", "transformers"]
    if adapter:
        names.append("peft")
    if model.head == "embedding":
        names.append("sentence-transformers")
    # Without tokenizer.json, transformers converts the SentencePiece model by these two.
    if not (tokenizer / "tokenizer.json").is_file():
        names += ["sentencepiece", "protobuf"]
    return names


def write(
    weights: Weights,
    source: str,
    name: str,
    packages: Sequence[str],
    mask: str | None = None,
    base: Weights | None = None,
) -> str:
    """Returns the card of an exported model or adapter.

    Args:
        weights: the model.
        source: where it was loaded from: a run, a checkpoint, a Hugging Face folder or hf://NAME.
        name: of the exported folder.
        packages: that load it.
        mask: the mask token, if there is one.
        base: the model that an exported adapter belongs to; None for a whole model.
    """
    model = weights.config
    meta = {} if weights.step is None else integrity.read_meta(weights.folder)
    tree: Tree = meta.get("config", {})
    # A Hugging Face folder without training of our own is its own origin.
    origin = source if weights.step is None else tree.get("init_from")
    facts = facts_of_head(model.head)
    # The Hub's name of the task that the model is for, by its head.
    pipeline = "text-generation" if model.causal else "fill-mask"
    if model.predicts == "replaced":  # a discriminator writes no tokens
        pipeline = "feature-extraction"
    if model.head == "embedding":
        pipeline = "sentence-similarity"
    elif facts is not None:
        pipeline = facts.pipeline
    elif model.encoder_decoder:
        pipeline = "text2text-generation"
    base_model = origin if base is None else base.hub
    hub_name = revision = ""
    if base_model is not None and is_hub_path(base_model):
        hub_name, revision = name_and_revision(base_model)
    # The checkpoint names its datasets by digest; one that has changed since is another one.
    known = {manifest.digest: manifest for manifest in manifests_of(meta)}
    phases = meta.get("data", {}).get("mixture", [])
    digests = dict.fromkeys(digest for _, shares in phases for digest in shares)
    # What is unknown, at any depth, is empty instead of an error.
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(_TEMPLATES), undefined=jinja2.ChainableUndefined
    )
    environment.filters |= {
        "count": lambda value: f"{value:,}" if isinstance(value, int) else "",
        "escaped": lambda value: _MARKUP.sub(r"\\\1", " ".join(str(value).split())),
        "fenced": _fenced,
        "file": _file,
        "public": _public,
        "repr": repr,
    }
    return environment.get_template("card").render(
        name=name,
        weights=weights,
        model=model,
        meta=meta,
        config=tree,
        facts=facts,
        pipeline=pipeline,
        packages=packages,
        mask=mask,
        base=base,
        hub_name=hub_name,
        revision=revision,
        parameters=sum(math.prod(weights.tensors.shape(each)) for each in weights.tensors),
        datasets=[(digest, known.get(digest)) for digest in digests],
        init_from=origin,
        scores=_scores(weights, source),
        configuration=configuration(tree),
    )


def manifests_of(meta: Tree) -> Iterator[Manifest]:
    """Manifests of the datasets that a checkpoint's run read, if they are still in their place."""
    data = meta.get("config", {}).get("data", {})
    for path in [data.get("path"), *(source.get("path") for source in data.get("sources", ()))]:
        if path is not None:
            with suppress(SamestepError):
                yield load_manifest(path.rstrip("/"))


def _file(name: str, source: Tree) -> str:
    """The name of a source file without its folder; a dataset of the Hub keeps its owner."""
    # OWNER/NAME of the Hub is public and says more than NAME; a local folder's name does not.
    is_hub = source.get("kind") == "huggingface" or source.get("dataset") is not None
    if is_hub and re.match(r"[\w.-]+/[\w.-]+(@|\s|$)", name):
        return name
    return _last_part(shown(name))


def _scores(
    weights: Weights,
    source: str,
) -> dict[str, dict[str, float]]:
    """Scores of this checkpoint by heading, one for each dataset.

    These are the newest scores of training up to the checkpoint's step, and the newest of each
    `samestep evaluate` of this step.
    """
    if weights.step is None:
        return {}
    run = Path(source)
    # An average has scores of its own, but no metrics of training.
    has_scores = any((run / name).is_file() for name in ("metrics.jsonl", "scores.jsonl"))
    if isinstance(weights.folder, Path) and not has_scores:
        run = weights.folder.parent.parent  # RUN/checkpoints/step-N
    # Later rows replace earlier ones: the newest of training, and of each evaluated dataset.
    newest: Tree = {}
    for row in read_rows(run / "metrics.jsonl"):
        if row["step"] <= weights.step and any(name.startswith("heldout/") for name in row):
            newest["On the held-out split"] = row
    for row in read_rows(run / "scores.jsonl"):
        if row["step"] == weights.step:
            data = ", ".join(_last_part(shown(name)) for name in row["of"].split(","))
            texts = f"Of {row['pairs']:,} texts generated for" if "pairs" in row else "On"
            newest[f"{texts} {data}"] = row
    of_tokens = weights.config.head == "language_model"
    return {
        f"{heading}, after step {row['step']:,}": scores_of(row, of_tokens)
        for heading, row in newest.items()
    }


def configuration(tree: Tree) -> str:
    """The settings of the run, without those about the machine, folded away."""
    # Accounts, projects and groups of a tracker are nobody else's business.
    kept = {name: value for name, value in tree.items() if name != "tracking"}
    text = yaml.safe_dump(_cleaned(kept), sort_keys=False, width=120, allow_unicode=True)
    return f"<details>\n<summary>All settings</summary>\n\n{_fenced(text, 'yaml')}\n</details>\n"


def _cleaned(value: object, name: str = "") -> object:
    """A setting and all below it, without secrets and folders."""
    if isinstance(value, dict):
        return {key: _cleaned(each, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [_cleaned(each) for each in value]
    if not isinstance(value, str):
        return value
    return "(left out)" if _SECRET.search(name) else _public(value)


def _public(text: str) -> str:
    """A setting; of absolute paths and addresses only the last part."""
    # Example: /home/ada/runs/first becomes first, hf://NAME stays.
    text = shown(text)
    is_place = "://" in text or text.startswith(("/", "~", ".."))
    return _last_part(text) if is_place and not is_hub_path(text) else text


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _fenced(text: str, language: str) -> str:
    """A code block whose fence is longer than any row of backticks in the text."""
    # Settings may hold Markdown, and ``` inside would end a fence of three.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}{fence}\n"
