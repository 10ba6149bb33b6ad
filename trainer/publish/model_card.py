"""Model cards: what a model is, what it was trained on and how, and how good it is, for people who find it later.

A card is Markdown behind a block of metadata that the Hugging Face Hub reads. It says nothing of the machine: folders,
addresses and what looks like a secret are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

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

_FAMILIES = {"bert": "BERT", "roberta": "RoBERTa", "gpt2": "GPT-2", "openai-gpt": "GPT", "t5": "T5"}
_MOST = 30  # labels or files that are named
_SECRET = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE
)
_MARKUP = re.compile(r"([\\`*\[\]<>|#~&$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")

_PIPELINE_EXAMPLE = """\
from transformers import pipeline

model = pipeline({task!r}, model={name!r})
print(model({inputs}))
"""
_EXAMPLES = {
    "multiple-choice": """\
from transformers import AutoModelForMultipleChoice, AutoTokenizer

tokenizer, model = (kind.from_pretrained({name!r}) for kind in (AutoTokenizer, AutoModelForMultipleChoice))
inputs = tokenizer(["It rained."] * 2, ["The street is wet.", "The street is dry."], padding=True, return_tensors="pt")
print(model(**{{key: value[None] for key, value in inputs.items()}}).logits.argmax())
""",
    "question-answering": """\
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer, model = (kind.from_pretrained({name!r}) for kind in (AutoTokenizer, AutoModelForQuestionAnswering))
inputs = tokenizer("Who wrote the letter?", "Ada wrote the letter.", return_tensors="pt")
answer = model(**inputs)
print(tokenizer.decode(inputs.input_ids[0, answer.start_logits.argmax() : answer.end_logits.argmax() + 1]))
""",
    "text2text-generation": """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer, model = (kind.from_pretrained({name!r}) for kind in (AutoTokenizer, AutoModelForSeq2SeqLM))
output = model.generate(**tokenizer("A text.", return_tensors="pt"), max_new_tokens=20)
print(tokenizer.batch_decode(output, skip_special_tokens=True))
""",
}

_GENERIC_CLASSES = {
    "fill-mask": "AutoModelForMaskedLM",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
}
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
    """The card of a model that is exported, or of what was added to one.

    Args:
        weights: of the model.
        source: what they were opened by: a run, a checkpoint, a Hugging Face folder or hf://NAME.
        name: of the exported folder.
        mask: how the tokenizer spells the token that is filled in.
        base: what was added to, if that alone is exported; None: a whole model is.
    """
    meta = {} if weights.step is None else integrity.read_meta(weights.folder)
    tree: Tree = meta.get("config", {})
    origin = source if weights.step is None else tree.get("init_from")
    data, manifests = _data(meta)
    pipeline = _pipeline_of(weights.config)
    pairs = any(len(manifest.source.get("texts", ())) == 2 for manifest in manifests)
    sections = [
        _metadata(pipeline, origin, base),
        f"# {_escaped(name)}\n",
        _section("Model", _table(_shape(weights))),
        _section("Trained on", data),
        _section("Training", _table(_training(meta, origin))),
        _section("Held-out scores", _scores(weights, _run_folder(weights, source))),
        _section(
            "Use",
            _adapter_example(weights, name, base)
            if base
            else _example(pipeline, name, mask, pairs),
        ),
        _section("Configuration", configuration(tree)),
    ]
    return "\n".join(filter(None, sections))


def _pipeline_of(config: ModelConfig) -> str:
    """The task of the Hub that a model is for."""
    if facts := facts_of_head(config.head):
        return facts.pipeline
    if config.encoder_decoder:
        return "text2text-generation"
    return "text-generation" if config.causal else "fill-mask"


def _class_of(config: ModelConfig) -> str:
    """The class of `transformers` that loads a model."""
    if facts := facts_of_head(config.head):
        return f"AutoModelFor{facts.architecture}"
    return _GENERIC_CLASSES[_pipeline_of(config)]


def _metadata(pipeline: str, origin: str | None, base: Weights | None) -> str:
    content: Tree = {"library_name": "transformers", "pipeline_tag": pipeline, "tags": ["samestep"]}
    if base is not None:
        content["library_name"], origin = "peft", base.hub
    if origin is not None and is_hub_path(origin):
        content["base_model"], _ = name_and_revision(origin)
    return f"---\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True)}---\n"


def _shape(weights: Weights) -> Iterator[tuple[str, object]]:
    config = weights.config
    yield "family", _FAMILIES.get(config.model_type, config.model_type)
    kind = "encoder and decoder" if config.encoder_decoder else None
    yield "kind", kind or ("decoder, left to right" if config.causal else "encoder")
    yield "head", config.head.replace("_", " ")
    yield "layers", config.layers
    yield "width", config.width
    yield "attention heads", config.heads or None
    yield "vocabulary", f"{config.vocab_size:,} rows"
    yield (
        "longest text",
        f"{config.max_positions:,} tokens" if config.max_positions is not None else None,
    )
    yield (
        "parameters",
        f"{sum(math.prod(weights.tensors.shape(name)) for name in weights.tensors):,}",
    )
    yield "labels", _listed(config.labels)


def _training(meta: Tree, origin: str | None) -> Iterator[tuple[str, object]]:
    """What a checkpoint says about how it was trained."""
    if not meta:
        return
    tree, state = meta["config"], meta.get("state", {})
    objective, data, training, optimizer, schedule, strategy = (
        tree.get(name) or {}
        for name in ("objective", "data", "training", "optimizer", "schedule", "strategy")
    )
    yield "started from", None if origin is None else _public(origin)
    yield "objective", objective.get("kind")
    yield (
        "steps",
        f"{meta['step']:,} of {training['steps']:,}"
        if "steps" in training
        else f"{meta['step']:,}",
    )
    yield "examples seen", f"{state['examples']:,}" if "examples" in state else None
    yield "tokens seen", f"{state['tokens']:,}" if "tokens" in state else None
    yield "sequence length", data.get("sequence_length")
    yield "global batch", training.get("global_batch_size")
    yield "phases", "; ".join(_phase(phase, data, training) for phase in tree.get("phases", ()))
    yield "optimizer", optimizer.get("kind")
    yield "learning rate", optimizer.get("lr")
    yield "weight decay", optimizer.get("weight_decay")
    yield "schedule", schedule.get("decay")
    yield "warm-up", f"{schedule['warmup_steps']:,} steps" if "warmup_steps" in schedule else None
    yield "seed", tree.get("seed")
    yield "strategy", strategy.get("kind")
    yield "precision", training.get("precision")
    yield (
        "software",
        ", ".join(f"{name} {version}" for name, version in meta.get("versions", {}).items()),
    )


def _phase(phase: Tree, data: Tree, training: Tree) -> str:
    given = {name: value for name, value in phase.items() if value is not None}
    length, batch = (
        given.get(name, section.get(name))
        for name, section in (("sequence_length", data), ("global_batch_size", training))
    )
    return f"{phase['steps']:,} steps of {batch} x {length}" + (
        f", lr {given['lr']}" if "lr" in given else ""
    )


def _data(meta: Tree) -> tuple[str, list[Manifest]]:
    """A table of the datasets, by the digests in a checkpoint, and what of them is still where it was."""
    mixture = meta.get("data", {}).get("mixture", [])
    digests = dict.fromkeys(digest for _, shares in mixture for digest in shares)
    found = {manifest.digest: manifest for manifest in manifests_of(meta)} if digests else {}
    rows = []
    for digest in digests:
        files, documents, tokens = "", "", ""
        if (manifest := found.get(digest)) is not None:
            shards = manifest.splits.get("train", ())
            files = _listed(dict.fromkeys(_file(name, manifest) for name in manifest.files))
            documents, tokens = (
                f"{sum(getattr(s, name) for s in shards):,}" for name in ("documents", "tokens")
            )
        rows.append((files, documents, tokens, digest[:16]))
    used = [manifest for digest, manifest in found.items() if digest in digests]
    return _table(rows, ("source files", "documents", "tokens", "digest")), used


def manifests_of(meta: Tree) -> Iterator[Manifest]:
    """Those that lie where a run found its datasets, by what its checkpoint says."""
    data = meta["config"].get("data", {})
    for path in [data.get("path"), *(source.get("path") for source in data.get("sources", ()))]:
        if path is not None:
            with suppress(SamestepError):
                yield load_manifest(path.rstrip("/"))


def _file(name: str, manifest: Manifest) -> str:
    """The name of a file without its folder; a dataset of the Hub keeps its owner."""
    source = manifest.source
    is_hub = source.get("kind") == "huggingface" or source.get("dataset") is not None
    if is_hub and re.match(r"[\w.-]+/[\w.-]+(@|\s|$)", name):
        return name
    return shown(name).rstrip("/").rpartition("/")[2]


def _run_folder(weights: Weights, source: str) -> Path | None:
    """The folder of the run that a checkpoint is of, if it is known and on this machine."""
    candidates = [Path(source)]
    if isinstance(weights.folder, Path) and weights.folder.parent.name == "checkpoints":
        candidates.append(weights.folder.parent.parent)
    return next((folder for folder in candidates if (folder / "metrics.jsonl").is_file()), None)


def _scores(weights: Weights, run: Path | None) -> str:
    """The newest scores of training that are not newer than the checkpoint, and the newest of each evaluation of it."""
    if weights.step is None or run is None:
        return ""
    found: dict[
        tuple[str, str], Mapping[str, object]
    ] = {}  # by whether texts were written and what it was scored on
    for row in read_rows(run / "metrics.jsonl"):
        if row["step"] <= weights.step and any(name.startswith("heldout/") for name in row):
            found["On ", "the held-out split"] = row
    for row in read_rows(run / "scores.jsonl"):
        if row["step"] == weights.step:
            of = ", ".join(
                shown(name).rstrip("/").rpartition("/")[2] for name in row["of"].split(",")
            )
            found[
                f"Of {row['pairs']:,} texts that it wrote for " if "pairs" in row else "On ", of
            ] = row
    of_tokens = weights.config.head == "language_model"
    return "\n".join(
        f"{what}{_escaped(of)}, after step {row['step']:,}:\n\n"
        + _table(
            [(name, f"{value:.6g}") for name, value in scores_of(row, of_tokens).items()],
            ("score", "value"),
        )
        for (what, of), row in found.items()
    )


def _example(pipeline: str, name: str, mask: str | None, pairs: bool) -> str:
    """Code that loads and runs the model."""
    pair = {"text": "A text.", "text_pair": "Another one."}
    inputs = {
        "fill-mask": repr(f"The man went to the {mask}."),
        "text-generation": "'Once upon a time', max_new_tokens=20",
        "text-classification": repr(pair if pairs else "A text."),
        "token-classification": "'Ada Lovelace lived in London.'",
    }
    code = _EXAMPLES.get(pipeline, _PIPELINE_EXAMPLE)
    return _fenced(code.format(task=pipeline, name=name, inputs=inputs.get(pipeline)), "python")


def _adapter_example(weights: Weights, name: str, base: Weights) -> str:
    """Code that loads a model and what was added to it."""
    path, revision = name_and_revision(base.hub) if base.hub else (_public(base.path), "")
    before = ""
    if base.step is not None:
        command, path = _fenced(f"samestep export {path} base\n", ""), "base"
        before = f"What it was added to, a checkpoint of samestep, has to be exported first:\n\n{command}\n"
    count = len(weights.config.labels)
    settings = {"revision": revision or None, "num_labels": count or None}
    if count and count != len(base.config.labels) > 0:  # its head is of another task
        settings["ignore_mismatched_sizes"] = True
    arguments = [
        repr(path),
        *(f"{name}={value!r}" for name, value in settings.items() if value is not None),
    ]
    kind = _class_of(weights.config)
    return before + _fenced(
        _ADAPTER_EXAMPLE.format(kind=kind, name=name, base=", ".join(arguments)), "python"
    )


def configuration(tree: Tree) -> str:
    """The configuration of the run, without what is about the place where it ran."""
    if not tree:
        return ""
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
    """A setting, of whose absolute paths and addresses only the last part is left."""
    text = shown(text)
    if not is_hub_path(text) and ("://" in text or text.startswith(("/", "~", ".."))):
        return text.rstrip("/").rpartition("/")[2]
    return text


def _section(title: str, content: str) -> str:
    return f"## {title}\n\n{content}" if content else ""


def _table(rows: Iterable[Sequence[object]], header: Sequence[str] = ("", "")) -> str:
    """A table of the rows whose last cell is not empty, which may be none."""
    cells = [[_escaped(str(cell)) for cell in row] for row in rows if row[-1] not in (None, "")]
    lines = [header, ["---"] * len(header), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) if cells else ""


def _fenced(text: str, language: str) -> str:
    """A block of code that no backticks in it end."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}{fence}\n"


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MOST:,} more" if len(listed) > _MOST else ""
    return ", ".join(listed[:_MOST]) + more


def _escaped(text: str) -> str:
    """A text on one line in which nothing is Markdown or HTML."""
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))
