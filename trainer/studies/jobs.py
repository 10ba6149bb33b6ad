"""The jobs of a study: one for each stage, arm and seed, made once where several are equal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from samestep.config import Tree
from samestep.errors import ConfigError, DataError
from samestep.hashing import json_hash
from samestep.storage import write_text
from samestep.stored_json import Measure, damage_of, read_json
from trainer.monitoring.costs import Usage
from trainer.monitoring.report.study import RESULT
from trainer.studies.stages import StageConfig
from trainer.studies.study import REFERENCE, Study


@dataclass(frozen=True)
class Job:
    """A stage with the settings of an arm, for one seed.

    Attributes:
        stage: its name.
        config: its settings.
        seed: of the samestep commands.
        resolved: all settings, with stages named.
        needs: the jobs that make its inputs, by stage.
        digest: of the settings, the seed, the content of files and the digests of `needs`.
        folder: of its files, named by the digest. Studies in one folder share equal jobs.
    """

    stage: str
    config: StageConfig
    seed: int
    resolved: Tree
    needs: Mapping[str, Job]
    digest: str
    folder: Path

    @property
    def after(self) -> tuple[str, ...]:
        """The jobs that must be finished before."""
        return tuple(job.digest for job in self.needs.values())

    @property
    def name(self) -> str:
        return self.folder.name

    def settings(self) -> Tree:
        """All settings, with folders in place of stages."""
        products = {name: str(job.folder / job.config.product) for name, job in self.needs.items()}
        return {name: _replaced(value, products) for name, value in self.resolved.items()}

    def result(self) -> Result | None:
        """The result, if the job is finished."""
        file = self.folder / RESULT
        if not file.exists():
            return None
        with damage_of(file, DataError, "Remove it to do the job again."):
            return read_json(file, Result)


@dataclass(frozen=True)
class Result:
    """Scores and resources of a finished job.

    Attributes:
        scores: by name.
        usage: of all its commands; of an attempt that was stopped, nothing is counted.
        flops: of training, as the model counts them.
    """

    scores: Mapping[str, Measure]
    usage: Usage
    flops: float = 0.0

    def save(self, folder: Path) -> None:
        """Marks a job as finished."""
        write_text(folder / RESULT, json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True)
class Jobs:
    """The jobs of a study.

    Attributes:
        of: by arm, seed of the repetition and stage; an arm may leave out stages.
    """

    of: Mapping[tuple[str, int, str], Job]

    @property
    def all(self) -> list[Job]:
        """Each job once, after those that it needs."""
        return list({job.digest: job for job in self.of.values()}.values())

    def of_arm(self, arm: str) -> list[Job]:
        """Each job of an arm once."""
        found = {job.digest: job for (name, *_), job in self.of.items() if name == arm}
        return list(found.values())


def list_jobs(study: Study, root: Path) -> Jobs:
    """Lists the jobs of a study.

    Args:
        root: folder of the jobs.

    Raises:
        ConfigError: a setting is invalid, or names a stage that does not come before.
    """
    stages = {arm: study.stages_of(arm) for arm in study.config.arms}
    resolved = {
        (arm, name): _resolved(arm, name, config)
        for arm, configs in stages.items()
        for name, config in configs.items()
    }
    inputs = {
        (arm, name): list(stages[arm][name].inputs(tree)) for (arm, name), tree in resolved.items()
    }
    jobs: dict[tuple[str, int, str], Job] = {}
    # All arms have their first seed before any has its second.
    for repetition in study.config.repetitions:
        for arm, configs in stages.items():
            own: dict[str, Job] = {}
            for name, config in configs.items():
                tree = resolved[arm, name]
                needed = sorted(set(_named(tree)))
                for other in needed:
                    _check_order(other, name, arm, own, study)
                needs = {other: own[other] for other in needed}
                job = Job(name, config, config.seed_of(repetition), tree, needs, "", root)
                own[name] = _addressed(job, inputs[arm, name], root)
                if repetition == study.config.repetitions[0]:
                    with _named_in_errors(arm, name):
                        config.check(own[name].settings())
            jobs |= {(arm, repetition, name): job for name, job in own.items()}
    return Jobs(jobs)


def _resolved(arm: str, name: str, config: StageConfig) -> Tree:
    with _named_in_errors(arm, name):
        return config.resolved()


@contextmanager
def _named_in_errors(arm: str, name: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"arm {arm!r}, stage {name}: {error}") from error


def _check_order(other: str, name: str, arm: str, before: Mapping[str, Job], study: Study) -> None:
    if other in before:
        return
    if other in study.config.stages:
        raise ConfigError(
            f"stages.{name} uses stage:{other}, which comes later or is left out in the arm "
            f"{arm!r}. Put it before {name}."
        )
    raise ConfigError(
        f"stages.{name} uses stage:{other}, and there is no such stage. "
        f"Use one of {', '.join(before) or 'none'}."
    )


def _addressed(job: Job, inputs: list[object], root: Path) -> Job:
    """The job with its digest and its folder."""
    # Not `kind_name`: folders of jobs have this name and digest, also of a user's own stage.
    kind = type(job.config).__module__.rpartition(".")[2]
    digests = {name: need.digest for name, need in job.needs.items()}
    settings = _replaced(job.resolved, digests)
    # The result of a build does not depend on the seed, and then nor does its digest.
    seed = job.seed if job.config.random else None
    digest = json_hash([kind, settings, seed, inputs])[:16]
    return replace(job, digest=digest, folder=root / f"{kind}-{digest[:10]}")


def _named(value: object) -> Iterator[str]:
    """Names of the stages that are used in settings."""
    for text in _texts(value):
        if found := REFERENCE.match(text):
            yield found[1]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _replaced(value: object, by: Mapping[str, str]) -> object:
    """Settings with each stage:NAME replaced by `by[NAME]`."""
    # Example: stage:corpus/tokenizer becomes runs/study/corpus-1f2e3d/dataset/tokenizer.
    if isinstance(value, str):
        return REFERENCE.sub(lambda found: by[found[1]], value) if REFERENCE.match(value) else value
    if isinstance(value, dict):
        return {key: _replaced(each, by) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(each, by) for each in value]
    return value
