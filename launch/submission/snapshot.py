"""A copy of the code for a job, so that you can go on editing while it waits in a queue."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from launch.credentials import has_key
from samestep.errors import LaunchError
from samestep.untrusted import read_regular

logger = logging.getLogger(__name__)

MOST_BYTES = 100 * 2**20

# Files that hold credentials by convention, in lower case. Examples and templates hold none.
_SECRET_FILES = (
    ".env",
    ".env.*",
    "*.env",
    ".envrc",
    ".netrc",
    "_netrc",
    ".pgpass",
    ".my.cnf",
    ".pypirc",
    ".npmrc",
    ".htpasswd",
    ".git-credentials",
    ".dockercfg",
    ".vault-token",
    ".boto",
    ".s3cfg",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    "*.pem",
    "*.key",
    "*.ppk",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.keystore",
    "*.kdbx",
    "*.ovpn",
    "kubeconfig*",
    "*.kubeconfig",
    "kaggle.json",
    "credentials",
    "credentials.*",
    ".credentials*",
    "*-credentials.json",
    "*_credentials.json",
    "client_secret*.json",
    "*service*account*.json",
    "application_default_credentials.json",
    "secret",
    "secrets",
    "secret.*",
    "secrets.*",
    ".secret*",
    "token",
    "*.token",
    "*_token",
    "*_token.txt",
    "token.txt",
    ".token*",
    "*api_key",
    "*api_key.txt",
    "*apikey",
    "*apikey.txt",
    "password",
    "passwords",
    "password.*",
    "passwords.*",
    "*_password.txt",
    "*_passwords.txt",
)
_SECRET_FOLDERS = (".aws", ".ssh", ".gnupg", ".kube", ".docker", ".azure", ".gcloud", ".secrets")
_HARMLESS_FILES = ("*.example", "*.sample", "*.template", "*.dist", "*.pub", "*.py", "*.md")
_BACKUP = re.compile(r"(~|\.(bak|backup|old|orig|save|copy)\d*)+$")  # what editors add to a name
_LONGEST_KEY = 2**16
# In files of Kaggle and Google Cloud.
_JSON_KEY = re.compile(
    r'"key"\s*:\s*"[0-9a-f]{32}"|"(private_key|client_secret|refresh_token)"\s*:\s*"[^"\s$<]{16}'
)


def files_of(directory: Path, without: Sequence[Path]) -> list[Path] | None:
    """The files in a folder that git tracks, or would add; None without git.

    Untracked files that may hold secrets are left out, with a warning: others can read a job's
    code. Tracked files can be read in the repository anyway.

    Args:
        without: folders that are excluded: the run's own.

    Returns:
        Paths relative to `directory`.

    Raises:
        LaunchError: they are too large to be code.
    """
    try:
        files, others, secrets = _known(directory)
    except LaunchError as error:
        logger.info(
            "no snapshot of the code is taken, so the job runs what is installed: %s", error
        )
        return None
    excluded = [
        folder.relative_to(directory) for folder in without if folder.is_relative_to(directory)
    ]
    files, others, secrets = (
        [path for path in paths if not any(map(path.is_relative_to, excluded))]
        for paths in (files, others, secrets)
    )
    if secrets:
        logger.warning(
            "the snapshot of the code is without %s, which may hold secrets, and others can read "
            "it; set them in the environment, or track a file that holds none",
            ", ".join(map(str, secrets)),
        )
    if others:
        logger.warning(
            "the snapshot of the code is without %s: it takes the files of this repository and of "
            "its submodules",
            ", ".join(map(str, others)),
        )
    sizes = {path: (directory / path).stat().st_size for path in files}
    total = sum(sizes.values())
    if total > MOST_BYTES:
        largest = max(sizes, key=lambda path: sizes[path])
        raise LaunchError(
            f"the code in {directory} has {total / 2**20:.0f} MiB, and {largest} is its largest "
            "file. Name in .gitignore what is no code, or set cluster.code=installed."
        )
    return files


def _is_secret(file: Path, name: Path) -> bool:
    """Whether a file holds credentials, by its name in the snapshot or its content."""
    # A link has another name than the file that it leads to.
    for path in (name, Path(*file.resolve().parts[-2:])):
        last = _BACKUP.sub("", path.name.lower())
        if any(part.lower() in _SECRET_FOLDERS for part in path.parts[:-1]):
            return True
        if any(fnmatch(last, pattern) for pattern in _HARMLESS_FILES):
            continue
        if any(fnmatch(last, pattern) for pattern in _SECRET_FILES):
            return True
    if file.stat().st_size > _LONGEST_KEY:
        return False
    # In UTF-16, every other byte of ASCII is zero.
    content = read_regular(file, _LONGEST_KEY).replace(b"\0", b"").decode("latin-1")
    return has_key(content) or bool(_JSON_KEY.search(content))


def _known(directory: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Three lists of the files in a folder.

    The first has the files that git tracks or would add, the second the folders of which it knows
    no files, and the third those that it would add, but which may hold secrets.

    Follows submodules, and links to folders inside the repository: their files are copied.

    Raises:
        LaunchError: git is not installed, or the folder is in no repository.
    """
    files: list[Path] = []
    links: list[Path] = []
    others: list[Path] = []
    secrets: list[Path] = []
    tracked = _git(directory, "ls-files", "--cached", "-z").split("\0")[:-1]
    new = set(_git(directory, "ls-files", "--others", "--exclude-standard", "-z").split("\0")[:-1])
    for name in sorted({*tracked, *new}):
        path, place = Path(name), directory / name
        if name in new and place.is_file() and _is_secret(place, path):
            secrets.append(path)
        elif place.is_file():
            # A link to a file elsewhere would carry it along, such as a private key.
            is_inside = place.resolve().is_relative_to(directory.resolve())
            (files if is_inside else others).append(path)
        elif place.is_symlink() and place.exists():
            links.append(path)
        # A name with a slash at the end is a repository that is no submodule.
        elif (place / ".git").exists() and not name.endswith("/"):
            try:
                inner_files, inner_others, inner_secrets = _known(place)
            except LaunchError:  # it is broken, or belongs to somebody else
                inner_files, inner_others, inner_secrets = [], [Path()], []
            files += [path / inner for inner in inner_files]
            others += [path / inner for inner in inner_others]
            secrets += [path / inner for inner in inner_secrets]
        elif place.is_dir():
            others.append(path)
    # A link `linked` to the folder `own` adds `linked/part.py` for `own/part.py`.
    root, linked = directory.resolve(), []
    for link in links:
        target = (directory / link).resolve()
        behind = []
        if target.is_relative_to(root):
            inside = target.relative_to(root)
            behind = [
                link / file.relative_to(inside) for file in files if file.is_relative_to(inside)
            ]
        linked += behind
        if not behind:
            others.append(link)
    return files + linked, others, secrets


def _git(directory: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True)
    except FileNotFoundError as error:
        raise LaunchError("git is not on this machine") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise LaunchError(said.removeprefix("fatal: "))
    return done.stdout.decode(errors="surrogateescape")


def take(directory: Path, files: list[Path], target: Path) -> None:
    """Copies the files, and a file with the commit, with -dirty if they differ from it."""
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(directory / path, target / path)
    commit = ""
    with suppress(LaunchError):  # there is no commit yet
        commit = _git(directory, "describe", "--always", "--dirty", "--abbrev=40")
    (target.parent / "commit").write_text(commit)
