"""Model cards: the size, data, training and scores of an exported model.

A card is Markdown after a block of metadata for the Hugging Face Hub. It reveals nothing about the
machine: folders, addresses and settings that look like secrets are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import jinja2
import yaml

from data_pipeline.format.manifest import Manifest
from data_pipeline.reading.dataset import load_manifest
from samestep import __version__
from samestep.config import Tree
from samestep.errors import DataError, SamestepError
from samestep.storage import shown
from samestep.storage.hub import name_and_revision
from samestep.storage.urls import is_hub_path
from samestep.stored_json import damage_of, read_json
from samestep.tasks import facts_of_head
from trainer.checkpoint.meta import read_meta
from trainer.models.codecs import codec_of
from trainer.models.codecs.sentence_transformers import Pooling
from trainer.monitoring.jsonl import read_rows, scores_of
from trainer.training.weights.loading import Weights
from trainer.training.weights.terms import terms_of

_SECRET = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE
)
_MARKUP = re.compile(r"([\\`*\[\]<>|#~&$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")

_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")

_TEMPLATES = Path(__file__).with_name("templates")


Scores: TypeAlias = Mapping[str, Mapping[str, float]]
"""Tables of scores by heading."""


def packages(
    weights: Weights, tokenizer: Path, adapter: bool = False, is_sparse: bool = False
) -> list[str]:
    """Returns the packages that load an exported model or adapter.

    Args:
        tokenizer: folder of its tokenizer.
        adapter: whether it is an adapter for the `peft` library.
        is_sparse: whether it is a folder of SparseEncoder.
    """
    model = weights.config
    names = ["torch", "transformers", *codec_of(model).packages]
    if adapter:
        names.append("peft")
    if not adapter and (model.head == "embedding" or is_sparse or _ranks(weights)):
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
    measured: Scores = MappingProxyType({}),
    is_sparse: bool = False,
) -> str:
    """Returns the card of an exported model or adapter.

    Args:
        weights: the model.
        source: where it was loaded from: a run, a checkpoint, a Hugging Face folder or hf://NAME.
        name: of the exported folder.
        packages: that load it.
        mask: the mask token, if there is one.
        base: the model that an exported adapter belongs to; None for a whole model.
        measured: further scores.
        is_sparse: whether it is a folder of SparseEncoder of sentence-transformers.
    """
    model = weights.config
    # A plain dict: what a checkpoint does not say, such as a custom loop's, is left out.
    meta = {} if weights.step is None else dict(read_meta(weights.folder))
    tree: Tree = meta.get("config", {})
    # A Hugging Face folder without training of our own is its own origin.
    origin = source if weights.step is None else tree.get("init_from")
    base_model = origin if base is None else base.hub
    hub_name = revision = ""
    if base_model is not None and is_hub_path(base_model):
        hub_name, revision = name_and_revision(base_model)
    terms = dict(terms_of(weights))
    if hub_name:
        terms["base_model"] = hub_name
    # The checkpoint names its datasets by digest; one that has changed since is another one.
    known = {manifest.digest: manifest for manifest in manifests_of(meta)}
    phases = meta.get("data", {}).get("mixture", [])
    digests = dict.fromkeys(digest for _, shares in phases for digest in shares)
    # What is unknown, at any depth, is empty instead of an error.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), undefined=jinja2.ChainableUndefined
    )
    environment.filters |= {
        "count": lambda value: f"{value:,}" if isinstance(value, int) else "",
        "escaped": lambda value: _MARKUP.sub(r"\\\1", " ".join(str(value).split())),
        "fenced": _fenced,
        "file": _file,
        "public": _public,
        "repr": repr,
    }
    return environment.get_template("card.md.jinja").render(
        name=name,
        weights=weights,
        model=model,
        family=codec_of(model).model_type,
        code=codec_of(model).code,
        meta=meta,
        config=tree,
        facts=facts_of_head(model.head),
        pipeline=_pipeline(weights, base is not None, is_sparse),
        is_sparse=is_sparse,
        packages=packages,
        mask=mask,
        base=base,
        terms=yaml.safe_dump(terms, sort_keys=False) if terms else "",
        hub_name=hub_name,
        revision=revision,
        parameters=sum(math.prod(weights.tensors.shape(each)) for each in weights.tensors),
        datasets=[(digest, known.get(digest)) for digest in digests],
        hub_datasets=hub_datasets(known[each].source for each in digests if each in known),
        version=__version__,
        init_from=origin,
        scores={**_scores(weights, source), **measured},
        pooling=Pooling.of_objective(weights.objective),
        configuration=configuration(tree),
    )


def _pipeline(weights: Weights, adapter: bool, is_sparse: bool) -> str:
    """The Hub's name of the task that the model is for, by its head."""
    model = weights.config
    if model.head == "embedding":
        return "sentence-similarity"
    if not adapter and _ranks(weights):
        return "text-ranking"
    if is_sparse:
        return "feature-extraction"
    if (facts := facts_of_head(model.head)) is not None:
        return facts.pipeline
    if model.encoder_decoder:
        return "text2text-generation"
    if model.predicts == "replaced":  # a discriminator writes no tokens
        return "feature-extraction"
    return "text-generation" if model.causal else "fill-mask"


def measured(files: Sequence[Path]) -> Scores:
    """Tables from files of `samestep evaluate --scores`, each under the file's name.

    Raises:
        DataError: a file is missing, or has no scores.
    """
    tables: dict[str, dict[str, float]] = {}
    for file in files:
        with damage_of(file, DataError, "Write it again with samestep evaluate --scores."):
            found = dict(_tables(file.stem, read_json(file, dict[str, object])))
        if not found:
            raise DataError(f"{file} has no scores. Name a file of samestep evaluate --scores.")
        tables |= found
    return tables


def _tables(name: str, tree: Mapping[str, object]) -> Iterator[tuple[str, dict[str, float]]]:
    """The numbers of an object under its name, and objects in it under both names."""
    numbers = {key: float(value) for key, value in tree.items() if isinstance(value, int | float)}
    if numbers:
        yield name, numbers
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _tables(f"{name}, {key}", value)


def _ranks(weights: Weights) -> bool:
    """Whether it gives one score to a pair of texts, as CrossEncoder of sentence-transformers."""
    model = weights.config
    if weights.step is None or model.head != "classification" or len(model.labels) != 1:
        return False
    manifests = manifests_of(dict(read_meta(weights.folder)))
    is_of_pairs = any(len(manifest.source.get("texts", ())) == 2 for manifest in manifests)
    return weights.objective.get("kind") == "ranking" or is_of_pairs


def manifests_of(meta: Tree) -> Iterator[Manifest]:
    """Manifests of the datasets that a checkpoint's run read, if they are still in their place."""
    data = meta.get("config", {}).get("data", {})
    for path in [data.get("path"), *(source.get("path") for source in data.get("sources", ()))]:
        if path is not None:
            with suppress(SamestepError):
                yield load_manifest(path.rstrip("/"))


def hub_datasets(sources: Iterable[Tree]) -> list[str]:
    """Names of the datasets of the Hub among sources, as OWNER/NAME.

    Only with a revision: without one, such a path may also be a local folder.
    """
    tables = (s if s.get("kind") == "huggingface" else s.get("dataset") or {} for s in sources)
    names = (str(table.get("path")) for table in tables if table.get("revision"))
    # "squad" and "data/train/rows" have no owner, or too many parts.
    return sorted({name for name in names if _ON_HUB.fullmatch(name)})


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
    # SPLADE keeps the head; its accuracy is of texts.
    of_tokens = weights.config.head == "language_model" and "pool" not in weights.objective
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
    """A code block with a fence that is longer than any row of backticks in the text."""
    # Settings may hold Markdown, and ``` inside would end a fence of three.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}{fence}\n"
