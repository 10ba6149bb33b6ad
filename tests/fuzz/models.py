# ruff: noqa: E501
"""Folders of models, checkpoints, configurations and addresses."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from safetensors.torch import save

from samestep import addresses, storage
from samestep.config import read_tree
from tests.fuzz.mutations import blobs, jsons, named, one_of, trees
from tests.fuzz.trial import Files, Target
from trainer.checkpoint import files, layout
from trainer.models.codecs import codec_of
from trainer.models.families import bert, gpt2, t5
from trainer.training.weights.loading import load_weights

_SMALL = {"vocab_size": 20, "layers": 1, "width": 8, "heads": 2, "ffn_width": 8}


@cache
def _folders() -> list[tuple[object, bytes]]:
    """The config.json and the weights of small models."""
    configs = [
        bert.Config(**_SMALL, max_positions=8, head="classification", labels=("a", "b")),  # type: ignore[arg-type]
        gpt2.Config(**_SMALL, max_positions=8),  # type: ignore[arg-type]
        t5.Config(**_SMALL),  # type: ignore[arg-type]
    ]
    found = []
    for config in configs:
        model = config.build()
        tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
        exported = codec_of(config).export_tensors(tensors)
        exported = {name: tensor.clone().contiguous() for name, tensor in exported.items()}
        found.append((codec_of(config).to_huggingface(), save(exported)))
    return found


def _header(content: bytes) -> tuple[object, bytes]:
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def _file(header: bytes, body: bytes) -> bytes:
    header += b" " * (-len(header) % 8)  # as writers do: the body begins between two elements
    return len(header).to_bytes(8, "little") + header + body


def _safetensors(content: bytes) -> SearchStrategy[bytes]:
    header, body = _header(content)
    changed = jsons(header, most=2).map(lambda text: _file(text, body))
    return st.one_of(changed, blobs(content, most=2))


@st.composite
def _model_folders(draw: DrawFn) -> Files:
    config, weights = draw(st.sampled_from(_folders()))
    plain = {"config.json": json.dumps(config).encode(), "model.safetensors": weights}
    return draw(
        one_of(plain, {"config.json": jsons(config), "model.safetensors": _safetensors(weights)})
    )


def read_model(folder: Path) -> object:
    """Opens a Hugging Face folder as `samestep features` and others do."""
    return load_weights(folder).model()


@cache
def _tensor_file() -> bytes:
    model = bert.Config(**_SMALL, max_positions=8).build()  # type: ignore[arg-type]
    named_tensors = {f"model/{name}": each.detach() for name, each in model.named_parameters()}
    named_tensors["step"] = torch.tensor(3)
    pieces = [
        piece for name, each in named_tensors.items() for piece in layout.local_pieces(name, each)
    ]
    header, _ = layout._header(layout._in_file_order(pieces))
    body = b"".join(piece.tensor.numpy().tobytes() for piece in layout._in_file_order(pieces))
    return header + body


@st.composite
def _tensor_files(draw: DrawFn) -> bytes:
    header, body = _header(_tensor_file())
    assert isinstance(header, dict)
    pieces = json.loads(header["__metadata__"]["pieces"])
    if draw(st.booleans()):
        pieces = draw(trees(pieces))
    header["__metadata__"]["pieces"] = json.dumps(pieces)
    text = draw(st.one_of(st.just(json.dumps(header).encode()), jsons(header, most=2)))
    return _file(text, body)


def read_tensors(folder: Path) -> object:
    stored = layout.read_files([folder / "rank-00000.safetensors"])
    return [stored[name].sum() for name in stored]


_META = {
    "format": 1, "step": 3, "world_size": 1, "versions": {"samestep": "0.1"},
    "config": {"output": "x", "data": {"path": "d"}, "objective": {"kind": "mlm"},
               "model": {"kind": "bert", **_SMALL, "max_positions": 8}, "training": {"steps": 3}},
}  # fmt: skip


@st.composite
def _checkpoints(draw: DrawFn) -> Files:
    """A step whose checksums are right, of hostile content."""
    _folders()  # imports what a model is built with, outside of the limits of a file
    found = {
        "meta.json": draw(jsons(_META)),
        "rank-00000.safetensors": draw(st.one_of(st.just(_tensor_file()), _tensor_files())),
    }
    sums = {name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            for name, content in found.items()}  # fmt: skip
    listed = json.dumps(sums).encode()
    if draw(st.integers(0, 3)) == 0:
        listed = draw(jsons(sums))
    step = "checkpoints/step-00000003/"
    return {
        **{step + name: content for name, content in found.items()},
        step + "checksums.json": listed,
        step + "COMMITTED": hashlib.sha256(listed).hexdigest().encode(),
        "config.yaml": draw(st.one_of(st.just(b"output: x\n"), _yaml)),
    }


def read_checkpoint(folder: Path) -> object:
    return load_weights(folder).model()


_YAML = b"a: &x [1, 2.5, text, null]\nmodel: {kind: bert, width: 8}\nb: {<<: {c: 1}}\nc: *x\nd: !!int '3'\n"
_yaml = st.one_of(
    blobs(_YAML, _YAML.replace(b"*x", b"*y"), b"base: [a.yaml]\nphases: [{steps: 1}]\n", b"? [a]\n: b\n"),
    trees(_META["config"]).map(lambda tree: json.dumps(tree).encode()),
    st.integers(1, 40).map(lambda n: b"a0: &a0 [1]\n" + b"".join(
        b"a%d: &a%d [*a%d, *a%d]\n" % (i, i, i - 1, i - 1) for i in range(1, n))),
    st.integers(1, 3000).map(lambda n: b"a: " + b"[" * n + b"]" * n),
)  # fmt: skip


def read_yaml(folder: Path) -> object:
    return read_tree(folder / "a.yaml", ["x.y=1"])


_ADDRESSES = [
    *("s3://bucket/a", "s3://key:secret@bucket/a?sig=1", "http://u:p@h:80/a(1)?X=1#f", "hf://a/b@main", "/a/b", "gs://b"),
    *("s3://", "http://[::1]/x", "http://[::1", "https://h:99999/x", "s3://b/../x", "file:///x", "C:\\x"),
]  # fmt: skip


def read_address(folder: Path) -> object:
    """Parses an address, as messages and checkpoints do; no store is asked."""
    address = (folder / "address").read_bytes().decode(errors="replace")
    shown = addresses.shown(address)
    assert addresses.credential_in(shown) is None, shown
    assert not addresses.has_userinfo(shown), shown
    return storage.is_url(address), str(files.location(address))


TARGETS = [
    Target("Hugging Face folder", _model_folders, read_model),
    Target("checkpoint", _checkpoints, read_checkpoint),
    Target("tensor file",
           lambda: named("rank-00000.safetensors", st.one_of(_tensor_files(), blobs(_tensor_file()))),
           read_tensors),
    Target("YAML", lambda: named("a.yaml", _yaml), read_yaml),
    Target("address", lambda: named("address", st.one_of(
        blobs(*map(str.encode, _ADDRESSES)), st.text(max_size=30).map(str.encode))), read_address),
]  # fmt: skip
