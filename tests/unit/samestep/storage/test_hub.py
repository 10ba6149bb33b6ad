"""`hf://NAME`: downloaded once, used from the cache then on; every failure says what to do."""

from __future__ import annotations

import os

import pytest
from huggingface_hub import constants

from samestep.errors import ConfigError, StorageError
from samestep.storage.hub import model_folder, tokenizer_folder
from tests.hub import COMMIT, running_hub
from tests.processes import run_ranks

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights" * 1000,
    "tokenizer.json": b"{}",
    "README.md": b"words",
}


@pytest.fixture
def hub(tmp_path):
    with running_hub(tmp_path / "repositories", tmp_path / "cache") as hub:
        for name in ("tiny", "owner/tiny"):
            for file, data in FILES.items():
                hub.write(f"models/{name}/{file}", data)
            hub.write(f"models/{name}/pytorch_model.bin", b"a pickle")
            hub.write(f"models/{name}/onnx/model.safetensors", b"another")
        yield hub


@pytest.mark.parametrize(
    "path", ["hf://tiny", "hf://owner/tiny", "hf://tiny@main", f"hf://owner/tiny@{COMMIT}"]
)
def test_a_model_is_downloaded_once_without_pickles(hub, path):
    folder = model_folder(path)
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "README.md",
    }
    before = hub.requests.copy()
    assert model_folder(path) == folder
    assert hub.requests == before  # not even asked whether there is something newer


def test_no_pattern_leads_out_of_the_folder(hub):
    """A name such as model-/../../x-of-1.safetensors would match model-*-of-*.safetensors."""
    hub.write("models/tiny/model-a/b-of-1.safetensors", b"weights")
    assert not [path for path in model_folder("hf://tiny").iterdir() if path.is_dir()]


def test_a_tokenizer_is_downloaded_without_weights_and_does_not_pass_for_a_model(hub):
    files = {file.name for file in tokenizer_folder("hf://tiny").iterdir()}
    assert files == {"tokenizer.json", "config.json"}
    assert (model_folder("hf://tiny") / "model.safetensors").read_bytes() == FILES[
        "model.safetensors"
    ]


def test_a_download_that_breaks_off_is_gone_on_with(hub):
    hub.cut = 1
    assert (model_folder("hf://tiny") / "model.safetensors").read_bytes() == FILES[
        "model.safetensors"
    ]


def test_a_named_folder_is_filled_instead_of_the_cache(hub, tmp_path):
    folder = model_folder("hf://tiny", to=str(tmp_path / "here"))
    assert folder == tmp_path / "here"
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf://absent", "is unknown to the Hub, private or gated"),
        ("hf://tiny@v9", "names a revision that the Hub does not have"),
        ("hf://pickled", "has no config.json and no model.safetensors or "),
    ],
)
def test_what_the_hub_does_not_have_is_named(hub, path, message):
    hub.write("models/pickled/pytorch_model.bin", b"a pickle")
    hub.write("models/pickled/config.json", b"{}")
    with pytest.raises(StorageError, match=message) as caught:
        model_folder(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "path",
    ["hf://", "hf://a/b/c", "hf://datasets/owner/name", "hf://a@", "hf://.git/../x", "hf://a--b"],
)
def test_a_malformed_address_is_refused(path):
    with pytest.raises(ConfigError, match="hf://NAME"):
        model_folder(path)


@pytest.mark.parametrize("setting", [("ENDPOINT", "http://127.0.0.1:9"), ("HF_HUB_OFFLINE", True)])
def test_without_a_network_the_cache_is_used_and_what_is_not_in_it_is_named(
    hub, monkeypatch, setting
):
    folder = model_folder("hf://tiny")
    monkeypatch.setattr(constants, *setting)
    assert model_folder("hf://tiny") == folder
    with pytest.raises(
        StorageError, match=r"cannot be reached .*samestep fetch hf://unknown --to DIR"
    ):
        model_folder("hf://unknown")
    (folder / "model.safetensors").unlink()  # as after a download that was killed
    with pytest.raises(StorageError, match="cannot be reached"):
        model_folder("hf://tiny")


@pytest.mark.long
def test_processes_that_start_together_download_once(hub):
    assert len(set(run_ranks(3, _open_model))) == 1
    downloads = [
        path for path in hub.requests if path.startswith("GET") and "model.safetensors" in path
    ]
    assert [hub.requests[path] for path in downloads] == [1]


def _open_model():
    endpoint = os.environ[
        "HF_ENDPOINT"
    ]  # the Hub's client may have been imported before it was set
    constants.ENDPOINT = endpoint
    constants.HUGGINGFACE_CO_URL_TEMPLATE = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_CACHE = os.path.join(os.environ["HF_HOME"], "hub")
    return str(model_folder("hf://tiny"))
