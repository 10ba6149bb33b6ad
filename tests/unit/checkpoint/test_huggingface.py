import io
import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from samestep.errors import CheckpointError
from trainer.checkpoint.huggingface import identity, load_folder, save_folder

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "vocab.txt", "unrelated.bin"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def saved(tmp_path: Path, tokenizer: Path) -> Path:
    save_folder(tmp_path / "model", {"model_type": "bert"}, TENSORS, tokenizer)
    return tmp_path / "model"


def test_what_is_saved_is_loaded(saved: Path):
    config, tensors = load_folder(saved)
    assert config == {"model_type": "bert"}
    assert {*tensors} == {*TENSORS}
    assert len(tensors) == 2
    assert all(
        tensors[name].dtype == value.dtype and torch.equal(tensors[name], value)
        for name, value in TENSORS.items()
    )
    names = sorted(path.name for path in saved.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "vocab.txt"]


def test_parts_with_an_index(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    for number, (name, value) in enumerate(TENSORS.items()):
        save_file({name: value}, tmp_path / f"part-{number}.safetensors")
    index = {"weight_map": {"a": "part-0.safetensors", "b.weight": "part-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _, tensors = load_folder(tmp_path)
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())

    index["weight_map"]["c"] = "part-1.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"lists c, which .*part-1\.safetensors does not hold"
    ):
        load_folder(tmp_path)
    (tmp_path / "part-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-0\.safetensors"):
        load_folder(tmp_path)


@pytest.mark.parametrize("index", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", ["w.pt", "w", "w.bin", "w.safetensors"])
def test_an_index_names_files_of_its_own_format(tmp_path: Path, index: str, name: str):
    (tmp_path / "config.json").write_text("{}")
    if name.endswith(".safetensors"):
        save_file(dict(TENSORS), tmp_path / name)
    else:
        torch.save(TENSORS, tmp_path / name)
    content = {"weight_map": dict.fromkeys(TENSORS, name)}
    (tmp_path / f"{index}.index.json").write_text(json.dumps(content))
    ending = Path(index).suffix
    if name.endswith(ending):
        assert {*load_folder(tmp_path)[1]} == {*TENSORS}
        return
    with pytest.raises(
        CheckpointError, match=rf"names the file '{name}', which is no \{ending} file"
    ):
        load_folder(tmp_path)


def test_an_index_without_a_list_of_files(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    for files in ("w.safetensors", ["w.safetensors"], 5):
        content = json.dumps({"weight_map": files})
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"index\.json names the file None"):
            load_folder(tmp_path)


def test_a_shard_that_was_half_downloaded(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    for number, name in enumerate(TENSORS):
        save_file({name: TENSORS[name]}, tmp_path / f"{number}.safetensors")
    shards = {name: f"{number}.safetensors" for number, name in enumerate(TENSORS)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    file = tmp_path / "1.safetensors"
    whole = file.read_bytes()
    for size in (0, 4, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cannot read .*1\.safetensors: .* again"):
            load_folder(tmp_path)


@pytest.mark.parametrize("name", ["../part.safetensors", "/etc/passwd", "a/b", 1, None])
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, name: object):
    save_file(dict(TENSORS), tmp_path / "part.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="which is not in its folder"):
        load_folder(folder)


def test_damaged_folders_are_refused_by_name(saved: Path):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_folder(saved)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_folder(saved)
    (saved / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin cannot be read as tensors alone"
    ):
        load_folder(saved)
    for content in ("[1]", "{", 10**5 * "["):
        (saved / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load_folder(saved)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_folder(saved / "nowhere")


class Evil:
    def __reduce__(self) -> object:
        return (pytest.fail, ("the pickle was run",))


@pytest.mark.parametrize("archive", [True, False])
def test_a_pickle_of_tensors_is_read_and_nothing_else(tmp_path: Path, archive: bool):
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, file, _use_new_zipfile_serialization=archive)
    _, tensors = load_folder(tmp_path)
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())
    before = identity(tmp_path)
    for content, message in (
        ({**TENSORS, "evil": Evil()}, "as tensors alone"),
        ({"state_dict": TENSORS}, "must hold tensors by name"),
        ([TENSORS["a"]], "must hold tensors by name"),
        ({"a": torch.eye(2).to_sparse()}, "must hold tensors by name"),
    ):
        torch.save(content, file, _use_new_zipfile_serialization=archive)
        assert identity(tmp_path) != before
        with pytest.raises(CheckpointError, match=f"pytorch_model.bin .*{message}"):
            load_folder(tmp_path)


def test_the_identity_is_of_the_file_that_is_read(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    save_file(TENSORS, tmp_path / "other.safetensors")
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    before = identity(tmp_path)
    torch.save({**TENSORS, "a": TENSORS["a"] + 1}, tmp_path / "pytorch_model.bin")
    assert identity(tmp_path) != before
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "weights.bin")
    index = {"weight_map": dict.fromkeys(TENSORS, "weights.bin")}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    before = identity(tmp_path)
    torch.save(TENSORS, tmp_path / "weights.bin")
    assert identity(tmp_path) != before


def test_a_pickle_that_is_damaged_or_packed_again_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(3, 3)}, file)
    whole = file.read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    damaged = [file.read_bytes(), whole[: len(whole) // 2], b"\x80\x02}q\x00(X\xff"]
    for tensor in (torch.ones(1).expand(10**9), torch.ones(2, device="meta"), torch.ones(1) * 1j):
        torch.save({"a": tensor}, file)
        damaged.append(file.read_bytes())
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin (cannot be read|must hold)"):
            load_folder(tmp_path)


def test_shards_of_pickles_have_an_index(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": TENSORS["a"]}, tmp_path / "pytorch_model-1.bin")
    index = {"weight_map": {"a": "pytorch_model-1.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert torch.equal(load_folder(tmp_path)[1]["a"], TENSORS["a"])


def test_the_header_names_the_other_names_of_a_tied_tensor(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    metadata = {"format": "pt", "z.weight": "b.weight"}
    save_file(dict(TENSORS), tmp_path / "model.safetensors", metadata=metadata)
    _, tensors = load_folder(tmp_path)
    assert {*tensors} == {*TENSORS, "z.weight"}
    assert torch.equal(tensors["z.weight"], TENSORS["b.weight"])


def test_a_failed_save_leaves_nothing(tmp_path: Path, tokenizer: Path):
    (tmp_path / "empty").mkdir()
    taken = tmp_path / "taken"
    taken.write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="no tokenizer"):
        save_folder(tmp_path / "model", {}, TENSORS, tmp_path / "empty")
    with pytest.raises(CheckpointError, match="already exists"):
        save_folder(taken, {}, TENSORS, tokenizer)
    with pytest.raises(CheckpointError, match="already exists"):
        save_folder(tokenizer, {}, TENSORS, tokenizer)
    with pytest.raises(CheckpointError, match="cannot write"):
        save_folder(taken / "below", {}, TENSORS, tokenizer)
    assert sorted(tmp_path.iterdir()) == before
    assert taken.read_text() == "mine"


def test_an_empty_folder_may_be_filled(tmp_path: Path):
    (tmp_path / "model").mkdir()
    save_folder(tmp_path / "model", {}, {})
    assert len(load_folder(tmp_path / "model")[1]) == 0
