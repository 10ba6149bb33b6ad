"""Model cards: what an exported model is, what it was trained on and how, and its scores.

A card is Markdown after a block of metadata for the Hugging Face Hub. It reveals nothing about the
machine: folders, addresses and settings that look like secrets are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import jinja2
import yaml

from data_pipeline.format.manifest import Manifest
from data_pipeline.reading.remote import load_manifest
from trainer.checkpoint import integrity
from trainer.config import Tree
from trainer.errors import SamestepError
from trainer.models import ModelConfig
from trainer.monitoring.jsonl import read_rows, scores_of
from trainer.storage import shown
from trainer.storage.hub import is_hub_path, name_and_revision
from trainer.tasks import facts_of_head
from trainer.training.weights import Weights

Score: TypeAlias = tuple[str, dict[str, float]]

_MOST = 30  # labels or files that are listed
_SECRET = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE
)
_MARKUP = re.compile(r"([\\`*\[\]<>|#~&$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")

# Everything unknown is left out: a row without a value, a section without rows.
_CARD = """\
{%- macro row(name, value) %}
{%- if value is not none and value != "" %}| {{ name }} | {{ value | escaped }} |
{% endif %}{% endmacro -%}
---
{{ metadata | yaml }}---

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
{{ row("labels", model.labels | listed) }}
{% if datasets -%}
## Trained on

| source files | documents | tokens | digest |
| --- | --- | --- | --- |
{% for digest, files, documents, tokens in datasets -%}
| {{ files | listed | escaped }} | {{ documents | count }} | {{ tokens | count }} | {{ digest }} |
{% endfor %}
{% endif -%}
{% if config -%}
## Training

| | |
| --- | --- |
{{ row("started from", init_from) -}}
{{ row("objective", config.objective.kind) -}}
{{ row("steps", (step | count) + " of " + (config.training.steps | count)) -}}
{{ row("examples seen", state.examples | count) -}}
{{ row("tokens seen", state.tokens | count) -}}
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
{% for name, version in versions.items() %}{{ row(name, version) }}{% endfor %}
{% endif -%}
{% if scores -%}
## Held-out scores

{% for heading, values in scores -%}
{{ heading | escaped }}:

| score | value |
| --- | --- |
{% for name, value in values.items() %}{{ row(name, "%.6g" | format(value)) }}{% endfor %}
{% endfor -%}
{% endif -%}
## Use

{{ use }}
{%- if config %}
## Configuration

{{ configuration }}
{%- endif -%}
"""

_PIPELINE_EXAMPLE = """\
from transformers import pipeline

model = pipeline({task!r}, model={name!r})
print(model({inputs}))
"""
_EXAMPLES = {
    "multiple-choice": """\
from transformers import AutoModelForMultipleChoice, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name!r})
model = AutoModelForMultipleChoice.from_pretrained({name!r})
choices = ["The street is wet.", "The street is dry."]
inputs = tokenizer(["It rained."] * 2, choices, padding=True, return_tensors="pt")
print(model(**{{key: value[None] for key, value in inputs.items()}}).logits.argmax())
""",
    "question-answering": """\
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name!r})
model = AutoModelForQuestionAnswering.from_pretrained({name!r})
inputs = tokenizer("Who wrote the letter?", "Ada wrote the letter.", return_tensors="pt")
answer = model(**inputs)
start, end = answer.start_logits.argmax(), answer.end_logits.argmax()
print(tokenizer.decode(inputs.input_ids[0, start : end + 1]))
""",
    "text2text-generation": """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name!r})
model = AutoModelForSeq2SeqLM.from_pretrained({name!r})
output = model.generate(**tokenizer("A text.", return_tensors="pt"), max_new_tokens=20)
print(tokenizer.batch_decode(output, skip_special_tokens=True))
""",
}
_GENERIC_CLASSES = {
    "fill-mask": "AutoModelForMaskedLM",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
}
_EXPORT_BASE_FIRST = """\
The adapter belongs to a checkpoint of samestep, which has to be exported first:

{command}
"""
_ADAPTER_EXAMPLE = """\
from peft import PeftModel
from transformers import AutoTokenizer, {kind}

tokenizer = AutoTokenizer.from_pretrained({name!r})
base = {kind}.from_pretrained({base})
model = PeftModel.from_pretrained(base, {name!r})
"""


def write(
    weights: Weights, source: str, name: str, mask: str | None = None, base: Weights | None = None
) -> str:
    """Returns the card of an exported model or adapter.

    Args:
        weights: the model.
        source: where it was loaded from: a run, a checkpoint, a Hugging Face folder or hf://NAME.
        name: of the exported folder.
        mask: the mask token, if there is one.
        base: the model that an exported adapter belongs to; None for a whole model.
    """
    meta = {} if weights.step is None else integrity.read_meta(weights.folder)
    tree: Tree = meta.get("config", {})
    origin = source if weights.step is None else tree.get("init_from")
    pipeline = _pipeline_of(weights.config)
    metadata: Tree = {
        "library_name": "transformers" if base is None else "peft",
        "pipeline_tag": pipeline,
        "tags": ["samestep"],
    }
    base_model = origin if base is None else base.hub
    if base_model is not None and is_hub_path(base_model):
        metadata["base_model"], _ = name_and_revision(base_model)
    known = {manifest.digest: manifest for manifest in manifests_of(meta)} if meta else {}
    mixture = meta.get("data", {}).get("mixture", [])
    digests = dict.fromkeys(digest for _, weights_of in mixture for digest in weights_of)
    environment = jinja2.Environment(undefined=jinja2.ChainableUndefined)
    environment.filters |= {
        "count": lambda value: f"{value:,}" if isinstance(value, int) else "",
        "escaped": lambda value: _escaped(str(value)),
        "listed": _listed,
        "yaml": lambda value: yaml.safe_dump(value, sort_keys=False, allow_unicode=True),
    }
    return environment.from_string(_CARD).render(
        metadata=metadata,
        name=name,
        model=weights.config,
        parameters=sum(math.prod(weights.tensors.shape(each)) for each in weights.tensors),
        datasets=[_dataset(digest, known.get(digest)) for digest in digests],
        config=tree,
        init_from=None if origin is None else _public(origin),
        step=weights.step,
        state=meta.get("state", {}),
        versions=meta.get("versions", {}),
        scores=_scores(weights, source),
        use=_adapter_example(weights, name, base)
        if base
        else _example(pipeline, name, mask, [known[each] for each in digests if each in known]),
        configuration=configuration(tree),
    )


def _pipeline_of(config: ModelConfig) -> str:
    """The Hub's name of the task that a model is for."""
    if facts := facts_of_head(config.head):
        return facts.pipeline
    if config.encoder_decoder:
        return "text2text-generation"
    return "text-generation" if config.causal else "fill-mask"


def manifests_of(meta: Tree) -> Iterator[Manifest]:
    """Manifests of the datasets that a checkpoint's run read, if they are still in their place."""
    data = meta["config"].get("data", {})
    for path in [data.get("path"), *(source.get("path") for source in data.get("sources", ()))]:
        if path is not None:
            with suppress(SamestepError):
                yield load_manifest(path.rstrip("/"))


def _dataset(digest: str, manifest: Manifest | None) -> tuple[object, ...]:
    """A row of the table of datasets: digest, source files, documents, tokens."""
    if manifest is None:
        return digest[:16], (), None, None
    shards = manifest.splits.get("train", ())
    files = dict.fromkeys(_file(name, manifest) for name in manifest.files)
    documents, tokens = sum(s.documents for s in shards), sum(s.tokens for s in shards)
    return digest[:16], files, documents, tokens


def _file(name: str, manifest: Manifest) -> str:
    """The name of a source file without its folder; a dataset of the Hub keeps its owner."""
    source = manifest.source
    is_hub = source.get("kind") == "huggingface" or source.get("dataset") is not None
    if is_hub and re.match(r"[\w.-]+/[\w.-]+(@|\s|$)", name):
        return name
    return _last_part(shown(name))


def _scores(weights: Weights, source: str) -> list[Score]:
    """Scores of this checkpoint, with a heading for each dataset.

    These are the newest scores of training up to the checkpoint's step, and the newest of each
    `samestep evaluate` of this step.
    """
    folders = [Path(source)]
    if isinstance(weights.folder, Path) and weights.folder.parent.name == "checkpoints":
        folders.append(weights.folder.parent.parent)
    run = next((folder for folder in folders if (folder / "metrics.jsonl").is_file()), None)
    if weights.step is None or run is None:
        return []
    newest: dict[str, dict[str, float]] = {}
    of_tokens = weights.config.head == "language_model"
    for row in read_rows(run / "metrics.jsonl"):
        if row["step"] <= weights.step and any(name.startswith("heldout/") for name in row):
            newest["On the held-out split"] = row
    for row in read_rows(run / "scores.jsonl"):
        if row["step"] == weights.step:
            data = ", ".join(_last_part(shown(name)) for name in row["of"].split(","))
            texts = f"Of {row['pairs']:,} texts generated for" if "pairs" in row else "On"
            newest[f"{texts} {data}"] = row
    return [
        (f"{heading}, after step {row['step']:,}", scores_of(row, of_tokens))
        for heading, row in newest.items()
    ]


def _example(pipeline: str, name: str, mask: str | None, data: list[Manifest]) -> str:
    """Code that loads and runs the model."""
    reads_pairs = any(len(manifest.source.get("texts", ())) == 2 for manifest in data)
    pair = {"text": "A text.", "text_pair": "Another one."}
    inputs = {
        "fill-mask": repr(f"The man went to the {mask}."),
        "text-generation": "'Once upon a time', max_new_tokens=20",
        "text-classification": repr(pair if reads_pairs else "A text."),
        "token-classification": "'Ada Lovelace lived in London.'",
    }
    code = _EXAMPLES.get(pipeline, _PIPELINE_EXAMPLE)
    return _fenced(code.format(task=pipeline, name=name, inputs=inputs.get(pipeline)), "python")


def _adapter_example(weights: Weights, name: str, base: Weights) -> str:
    """Code that loads an adapter with its base."""
    facts = facts_of_head(weights.config.head)
    kind = f"AutoModelFor{facts.architecture}" if facts else None
    kind = kind or _GENERIC_CLASSES[_pipeline_of(weights.config)]
    path, revision = name_and_revision(base.hub) if base.hub else (_public(base.path), "")
    before = ""
    if base.step is not None:
        command = _fenced(f"samestep export {path} base\n", "")
        before, path = _EXPORT_BASE_FIRST.format(command=command), "base"
    arguments = [repr(path)]
    if revision:
        arguments.append(f"revision={revision!r}")
    if count := len(weights.config.labels):
        arguments.append(f"num_labels={count}")
        if count != len(base.config.labels) > 0:  # the base has a head of another task
            arguments.append("ignore_mismatched_sizes=True")
    code = _ADAPTER_EXAMPLE.format(kind=kind, name=name, base=", ".join(arguments))
    return before + _fenced(code, "python")


def configuration(tree: Tree) -> str:
    """The settings of the run, without those about the machine, folded away."""
    kept = {name: _cleaned(value) for name, value in tree.items() if name != "tracking"}
    text = yaml.safe_dump(kept, sort_keys=False, width=120, allow_unicode=True)
    return f"<details>\n<summary>All settings</summary>\n\n{_fenced(text, 'yaml')}\n</details>\n"


def _cleaned(value: object) -> object:
    if isinstance(value, dict):
        return {
            name: "(left out)"
            if isinstance(each, str) and _SECRET.search(str(name))
            else _cleaned(each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_cleaned(each) for each in value]
    return _public(value) if isinstance(value, str) else value


def _public(text: str) -> str:
    """A setting; of absolute paths and addresses only the last part."""
    text = shown(text)
    if not is_hub_path(text) and ("://" in text or text.startswith(("/", "~", ".."))):
        return _last_part(text)
    return text


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _fenced(text: str, language: str) -> str:
    """A code block whose fence is longer than any row of backticks in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}{fence}\n"


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MOST:,} more" if len(listed) > _MOST else ""
    return ", ".join(listed[:_MOST]) + more


def _escaped(text: str) -> str:
    """A text on one line, with Markdown and HTML escaped."""
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))
