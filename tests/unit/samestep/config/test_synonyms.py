"""Names of other tools lead to the settings of an experiment."""

import dataclasses

import pytest

from data_pipeline.building.config import Config as BuildConfig
from samestep.config import Kinds, decode
from samestep.config.synonyms import SETTINGS, _sections
from samestep.errors import ConfigError
from trainer.training.experiment import Experiment

KINDS = {
    "accelerator": ("trainer.accelerators.kinds", "cuda"),
    "model": ("trainer.models.families", "bert"),
    "objective": ("trainer.objectives.kinds", "mlm"),
    "optimizer": ("trainer.optim.kinds", "adamw"),
    "strategy": ("trainer.strategies.kinds", "deepspeed"),
}


@pytest.mark.parametrize("setting", sorted(set(SETTINGS.values())))
def test_the_setting_exists(setting: str) -> None:
    section, _, name = setting.rpartition(".")
    keys = _sections(Experiment).get(section, ())
    if section in KINDS:
        package, kind = KINDS[section]
        schema = Kinds(package).schema(kind, section)
        keys = tuple(field.name for field in dataclasses.fields(schema))
    assert name in keys


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"learning_rate": 1e-4}, "learning_rate is not a known key; set optimizer.lr instead"),
        ({"training": {"batch_size": 8}}, "set training.global_batch_size instead. Known in tra"),
        ({"training": {"sequence_length": 8}}, "set data.sequence_length instead"),
        ({"patience": 8}, "set training.best.patience instead"),
        ({"training": {"stepz": 8}}, "did you mean 'steps'?"),
    ],
)
def test_an_unknown_key_names_the_setting(tree: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode(Experiment, tree)
    assert words in str(caught.value)


def test_the_file_of_another_command_is_recognized() -> None:
    for tree, words in (
        ({"kind": "slurm"}, "a cluster, for samestep launch CLUSTER EXPERIMENT. Known: "),
        ({"source": {}, "output": "x"}, "a dataset, for samestep data build. Known: "),
        ({"question": "?"}, "a study, for samestep study. Known: "),
    ):
        with pytest.raises(ConfigError) as caught:
            decode(Experiment, tree)
        assert f"is not a known key; a file with it describes {words}" in str(caught.value)
    with pytest.raises(ConfigError, match="describes an experiment, for samestep train"):
        decode(BuildConfig, {"init_from": "x"})
    with pytest.raises(ConfigError, match=r"training.kind is not a known key; [^a]"):
        decode(Experiment, {"training": {"kind": "x"}})


def test_other_files_have_no_such_settings() -> None:
    """A dataset's recipe has no learning rate to set."""

    @dataclasses.dataclass
    class Recipe:
        output: str

    with pytest.raises(ConfigError, match=r"learning_rate is not a known key; Known: output"):
        decode(Recipe, {"learning_rate": 1})
    with pytest.raises(ConfigError, match=r"save_dir is not a known key; set output instead"):
        decode(Recipe, {"save_dir": "x"})
