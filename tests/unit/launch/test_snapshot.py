"""Which files a snapshot of the code has, beyond those that lie in one repository."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest

from launch.submission import snapshot


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make(tmp_path / "code", "own/part.py")


def make(folder: Path, *names: str) -> Path:
    git(folder.parent, "init", "--quiet", str(folder))
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=x")
    return folder


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *who, "-C", str(folder), *arguments], check=True, capture_output=True)


def taken(folder: Path) -> dict[str, str]:
    files = snapshot.files_of(folder, [folder / "run"])
    assert files is not None
    target = folder.parent / "launch" / "code"
    target.mkdir(parents=True)
    snapshot.take(folder, files, target)
    found = [path for path in target.rglob("*") if not path.is_dir()]
    assert not any(path.is_symlink() for path in found)
    return {str(path.relative_to(target)): path.read_text() for path in found}


def test_links(repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "big").write_text("x")
    (repository / ".gitignore").write_text("ignored\n")
    (repository / "ignored").mkdir()
    for name, target in {
        "file": "own/part.py",
        "linked": "own",
        "deep/absolute": repository / "own",
        "outside": tmp_path / "elsewhere",
        "hidden": "ignored",
        "dangling": "nowhere",
        "run/link": tmp_path / "elsewhere",
        "key": tmp_path / "elsewhere" / "big",
    }.items():
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).symlink_to(target)
    part = dict.fromkeys(
        ("file", "linked/part.py", "deep/absolute/part.py", "own/part.py"), "own/part.py"
    )
    assert taken(repository) == {**part, ".gitignore": "ignored\n"}
    assert "the snapshot of the code is without key, hidden, outside:" in caplog.text


SECRETS = (
    ".env",
    ".env.local",
    "prod.env",
    "deep/.ENV",
    ".envrc",
    ".netrc",
    ".aws/config",
    "deep/.aws/credentials",
    ".ssh/known",
    ".kube/config",
    ".docker/config.json",
    "kubeconfig.yaml",
    "id_rsa",
    "id_ed25519_work",
    "server.pem",
    "tls.key",
    "store.p12",
    "credentials",
    "credentials.json",
    "gcp-credentials.json",
    "my-service-account.json",
    "client_secret_1.json",
    "secrets.yaml",
    ".secret",
    "token",
    ".token",
    "hf_token",
    "wandb_api_key.txt",
    ".git-credentials",
    ".pypirc",
    ".npmrc",
    ".env~",
    "prod.env.bak",
    "passwords.txt",
    "kaggle.json",
)
NO_SECRETS = (
    ".env.example",
    "env.sh",
    "environment.yaml",
    "id_rsa.pub",
    "tokens.txt",
    "tokenizer.json",
    "token.py",
    "secrets.py",
    "credentials.md",
    "key.yaml",
    "keys/a.txt",
    "docker/Dockerfile",
    "secretary.txt",
    "password_model.yaml",
    ".gitignore",
)
COMMIT = "3f786850e387550fdab836ed7e6dc881de23001b"  # a key of W&B looks the same
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
PEM = "-----BEGIN PRIVATE KEY-----\\nMIIEvQIBADAN"
CONTENTS = {  # files without a telling name
    "odd": "-----BEGIN OPENSSH PRIVATE KEY-----\nx\n",
    "key.txt": f"\n\n{PEM}\n",
    "putty": "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\n",
    "gcp.json": f'{{"type": "service_account", "private_key": "{PEM}"}}',
    "project-0123456789ab.json": f'{{"private_key_id": "0123", "private_key": "{PEM}"}}',
    "adc.json": '{"client_secret": "d-FL95Q19q7MQmFpd7hHD0Ty", "type": "authorized_user"}',
    "my_kaggle": '{"username":"me","key":"0123456789abcdef0123456789abcdef"}',
    "run.sh": f"export HF_TOKEN={TOKEN}\n",
    "job.sh": f"export WANDB_API_KEY={COMMIT}\n",
    "config.yaml": f"hub:\n  token: {TOKEN}\n",
    "notes.md": f"log in with {TOKEN}",
}
HARMLESS = {
    "run_ok.sh": f"export HF_TOKEN=$(cat ~/.hf)\ngit checkout {COMMIT}",
    "ok.json": '{"key": "name", "private_key": "$KEY", "refresh_token": "<your refresh token>"}',
    "ok.md": "Replace YOUR_PRIVATE_KEY by a key.",
    "large.json": TOKEN + " " * 2**16,  # data rather than a configuration
}


def test_untracked_secrets_are_left_out(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(repository.parent / "inner", "inner.py")
    git(repository, "submodule", "add", "--quiet", str(repository.parent / "inner"), "third")
    git(repository, "commit", "--quiet", "--message=x")
    for name in (*SECRETS, *NO_SECRETS, "third/.env"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("x")
    for name, content in {**CONTENTS, **HARMLESS}.items():
        (repository / name).write_text(content)
    (repository / "utf16.txt").write_text(TOKEN, "utf-16")
    (repository / "harmless.txt").symlink_to(".env")
    found = taken(repository)
    left_out = {*SECRETS, *CONTENTS, "third/.env", "utf16.txt", "harmless.txt"}
    kept = {*NO_SECRETS, *HARMLESS}
    assert set(found) == {*kept, "own/part.py", "third/inner.py", ".gitmodules"}
    said = caplog.text.partition(" is without ")[2].partition(", which may hold secrets")[0]
    assert set(said.split(", ")) == left_out


def test_a_tracked_file_is_part_of_the_code(repository: Path) -> None:
    (repository / "secrets.yaml").write_text("x")
    git(repository, "add", ".")
    assert "secrets.yaml" in taken(repository)


def test_submodules(repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inner = make(tmp_path / "inner", "inner.py")
    library = make(tmp_path / "library", "pkg/a.py")
    git(library, "submodule", "add", "--quiet", str(inner), "third")
    git(library, "commit", "--quiet", "--message=x")
    git(repository, "submodule", "add", "--quiet", str(library), "vendor/library")
    git(repository, "submodule", "update", "--quiet", "--init", "--recursive")
    git(repository, "submodule", "add", "--quiet", str(inner), "broken")
    (repository / "broken" / ".git").write_text("gitdir: /not/here\n")
    git(repository, "submodule", "add", "--quiet", str(inner), "empty")
    git(repository, "submodule", "deinit", "--force", "empty")
    (repository / "vendor" / "library" / "pkg" / "new.py").write_text("new")
    make(repository / "clone", "x.py")
    found = taken(repository)
    expected = {
        "own/part.py",
        "vendor/library/pkg/a.py",
        "vendor/library/pkg/new.py",
        "vendor/library/third/inner.py",
    }
    assert {name for name in found if not name.endswith(".gitmodules")} == expected
    assert set(caplog.text.partition(" is without ")[2].partition(":")[0].split(", ")) == {
        "broken",
        "clone",
        "empty",
    }


def test_without_git(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "launch"):
        assert snapshot.files_of(tmp_path, []) is None
        assert "so the job runs what is installed: not a git repository" in caplog.text
        monkeypatch.setenv("PATH", str(tmp_path))
        assert snapshot.files_of(tmp_path, []) is None
        assert "what is installed: git is not on this machine" in caplog.text
