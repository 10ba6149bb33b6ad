"""`samestep publish`: the checkpoints of a run as revisions of a model repository on the Hub.

Each checkpoint becomes a branch, step-000100, as for the models of Pythia and MultiBERTs; main is
the newest. A commit appears as a whole, so a branch that names its checkpoint is complete.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from samestep.errors import CheckpointError, ConfigError, MissingExtra, SamestepError, StorageError
from samestep.storage.hub import MODEL_FILES
from samestep.stored_json import JsonError, read_json
from trainer.checkpoint import files, integrity
from trainer.checkpoint.files import Location
from trainer.checkpoint.meta import best_step, read_meta
from trainer.publish import sentence_transformers
from trainer.publish.export import export, export_weights
from trainer.publish.step_zero import StepZero
from trainer.training.weights.places import checkpoints_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)

Revisions: TypeAlias = Literal["all", "last", "best"]

_MAIN = "main"
_MARKER = "samestep.json"
"""In each revision: the step, the checkpoint's digest, and the run's if its start is recorded."""
_REPLACED = (*MODEL_FILES, *sentence_transformers.FILES)
"""Files of an earlier export, which a commit removes if the new export lacks them."""
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class _Revision:
    """A checkpoint to publish.

    Attributes:
        step: its number.
        identity: a digest of its content.
        source: the checkpoint, or the start of the run.
        run: a digest that tells the run from others; None for an older run, or an average.
    """

    step: int
    identity: str
    source: Location | StepZero
    run: str | None

    @property
    def branch(self) -> str:
        return f"step-{self.step:06d}"

    @property
    def marker(self) -> dict[str, object]:
        marker: dict[str, object] = {"step": self.step, "checkpoint": self.identity}
        return marker if self.run is None else {**marker, "run": self.run}

    def write(self, run: str, repository: str, folder: Path) -> None:
        """Exports the checkpoint to a new folder."""
        if isinstance(self.source, StepZero):
            export_weights(self.source.weights(), run, str(folder), name=repository)
        else:
            export(str(self.source), str(folder), name=repository)
        (folder / _MARKER).write_text(json.dumps(self.marker, indent=2) + "\n", encoding="utf-8")


def publish(
    run: str,
    repository: str,
    revisions: Revisions = "all",
    private: bool = False,
    dry_run: bool = False,
) -> None:
    """Exports checkpoints of a run and pushes each as a revision of a repository on the Hub.

    Revisions that have the checkpoint already are left as they are, so a publication that was
    stopped at any moment is continued by the same command.

    Args:
        run: the run's output folder, or the folder or address of its checkpoints.
        repository: OWNER/NAME; it is created if there is none.
        revisions: all checkpoints and step 0, the last checkpoint, or the best one.
        private: whether a new repository is private.
        dry_run: only print the revisions that would be pushed.

    Raises:
        ConfigError: the name is malformed, there is no token, or it has no right to write there.
        CheckpointError: the run has no such checkpoint, or one is damaged.
        StorageError: the Hub cannot be reached, or a revision has other content.
    """
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError:
        raise MissingExtra("huggingface-hub", "hf", "samestep publish") from None
    if not _REPOSITORY.fullmatch(repository):
        raise ConfigError(f"REPO is {repository!r}. Write OWNER/NAME, such as ada/bert_mini.")
    chosen = _chosen(run, revisions)
    api = HfApi()
    if not dry_run and get_token() is None:
        raise ConfigError(
            "there is no token for the Hugging Face Hub. Log in with `hf auth login`, or set "
            "HF_TOKEN to a token with write rights."
        )
    with _explained(repository):
        # All conflicts are found before the first push.
        missing = _missing(api, repository, chosen)
    _print(repository, chosen, missing)
    if dry_run or not missing:
        return
    with _explained(repository):
        api.create_repo(repository, private=private, exist_ok=True)
    for revision in chosen:
        targets = missing.get(revision.step, [])
        if targets:
            _push(api, run, repository, revision, targets)
    logger.info("published %s: %d checkpoints as revisions", repository, len(chosen))


def _chosen(run: str, revisions: Revisions) -> list[_Revision]:
    """The checkpoints to publish, oldest first."""
    root = checkpoints_of(files.location(run))
    steps = integrity.committed_steps(root)
    if not steps:
        raise CheckpointError(f"{run} has no checkpoint yet. Wait for one, or name another run.")
    meta = read_meta(integrity.step_folder(root, steps[-1]))
    name = (meta.get("start") or {}).get("run")
    start: list[_Revision] = []
    if revisions == "last":
        steps = steps[-1:]
    elif revisions == "best":
        best = best_step(root)
        if best is None:
            raise CheckpointError(
                f"{run} has no best checkpoint: it was trained without training.best. Use "
                "--revisions last or all."
            )
        steps = [best]
    elif steps[0] > 0 and "average" not in meta:  # the start of an average is its run's
        start = _start(integrity.step_folder(root, steps[0]), name)
    folders = ((step, integrity.step_folder(root, step)) for step in steps)
    found = [_Revision(step, integrity.identity(folder), folder, name) for step, folder in folders]
    return start + found


def _start(oldest: Location, run: str | None) -> list[_Revision]:
    """Step 0, computed again; nothing if the weights that the run started from are gone."""
    try:
        start = StepZero.of(oldest)
        return [_Revision(0, start.identity, start, run)]
    except SamestepError as error:
        logger.warning("step 0 is left out, as its weights cannot be computed again: %s", error)
        return []


def _missing(api: HfApi, repository: str, chosen: Sequence[_Revision]) -> dict[int, list[str]]:
    """The branches that each step has to be pushed to.

    Raises:
        StorageError: a branch has another checkpoint of this step, or main another run.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        branches = {ref.name for ref in api.list_repo_refs(repository).branches}
    except RepositoryNotFoundError:  # or a private one, without a token
        branches = set()
    missing: dict[int, list[str]] = {}
    for revision in chosen:
        there = _marker(api, repository, revision.branch) if revision.branch in branches else None
        if there == revision.marker or _is_start(there, revision):
            continue
        # Of another step it is when it was made from main, and nothing was pushed to it yet.
        if there is not None and there.get("step") == revision.step:
            raise StorageError(
                f"{repository} has a revision {revision.branch} of another run. Name another "
                "repository, or delete that branch."
            )
        missing[revision.step] = [revision.branch]
    # main is what a user loads who names no revision.
    newest = chosen[-1]
    main = _marker(api, repository, _MAIN) if _MAIN in branches else None
    if main != newest.marker:
        # Two averages, or older runs, have no digest of a run and may be of different runs.
        if main is not None and (newest.run is None or main.get("run") != newest.run):
            raise StorageError(
                f"{repository} has a checkpoint of another run in {_MAIN}. Name another repository."
            )
        missing.setdefault(newest.step, []).append(_MAIN)
    return missing


def _is_start(there: dict[str, object] | None, revision: _Revision) -> bool:
    """Whether a branch has step 0 of the revision's run, and the revision is that step."""
    # A run that went on with another dropout, for example, describes its start differently.
    if there is None or revision.run is None:
        return False
    return revision.step == there.get("step") == 0 and there.get("run") == revision.run


def _marker(api: HfApi, repository: str, branch: str) -> dict[str, object] | None:
    """A revision's description of its checkpoint; None without a model.

    Raises:
        StorageError: there is a model that `samestep publish` has not pushed.
    """
    names = api.list_repo_files(repository, revision=branch)
    if _MARKER in names:
        path = api.hf_hub_download(repository, _MARKER, revision=branch)
        try:
            return read_json(Path(path), dict[str, object])
        except (OSError, JsonError) as error:
            raise StorageError(
                f"{_MARKER} of {repository} is damaged: {error}. Remove it there, or name another "
                "repository."
            ) from error
    # A new repository may have a README or .gitattributes, but no model.
    if any(name.endswith((".safetensors", ".bin")) or name == "config.json" for name in names):
        raise StorageError(
            f"{repository} has a model in {branch} that samestep publish has not pushed. Name "
            "another repository."
        )
    return None


def _push(
    api: HfApi, run: str, repository: str, revision: _Revision, branches: Sequence[str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="samestep-publish-") as temporary:
        folder = Path(temporary) / "export"
        revision.write(run, repository, folder)
        # One export for all branches of a step.
        for branch in branches:
            with _explained(repository):
                # A new branch is made from main, with the content that main has at that time.
                if branch != _MAIN:
                    api.create_branch(repository, branch=branch, exist_ok=True)
                api.upload_folder(
                    repo_id=repository,
                    folder_path=folder,
                    revision=branch,
                    commit_message=f"Step {revision.step:,}",
                    delete_patterns=list(_REPLACED),
                )
            logger.info("pushed %s to %s of %s", revision.branch, branch, repository)


def _print(repository: str, chosen: Sequence[_Revision], missing: dict[int, list[str]]) -> None:
    for revision in chosen:
        branches = missing.get(revision.step)
        state = "is there already" if branches is None else f"push to {' and '.join(branches)}"
        sys.stdout.write(f"{repository} {revision.branch}: {state}\n")
    sys.stdout.flush()


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Turns errors of the Hub's client into ours."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except SamestepError:
        raise
    except HFValidationError as error:
        raise ConfigError(f"REPO is {repository!r}: {error}. Write OWNER/NAME.") from error
    except Exception as error:  # the classes differ between versions of the Hub's client
        response = error.response if isinstance(error, HfHubHTTPError) else None
        status = getattr(response, "status_code", None)
        if status in (401, 403):
            raise ConfigError(
                f"the Hub does not let this token write to {repository} (status {status}). Use a "
                "token with write rights (`hf auth login`, or HF_TOKEN), or a repository of yours."
            ) from error
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise StorageError(
            f"{repository} cannot be published: {reason}. Run the same command again; it leaves "
            "out what is on the Hub."
        ) from error
