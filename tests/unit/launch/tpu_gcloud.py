"""A program of the tests: the part of `gcloud` that cannot be had here.

Buckets are folders, secrets are files, and `ssh` runs a command on this machine. All else goes to
the real gcloud, or with THIN straight to the control plane, which is much faster and knows only
what `launch` asks for.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def _main(arguments: list[str]) -> int:
    folder = Path(os.environ["FAKE_GCLOUD"])
    with (folder / "calls").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    words = [each for each in arguments if each != "--quiet"]
    if words[0] == "storage":
        return _storage(folder / "buckets", words[1], words[2:])
    if words[:3] == ["secrets", "versions", "access"]:
        name = next(word.partition("=")[2] for word in words if word.startswith("--secret="))
        sys.stdout.write((folder / "secrets" / name).read_text())
        return 0
    if "ssh" in words:
        command = next(word.partition("=")[2] for word in words if word.startswith("--command="))
        return subprocess.run(["bash", "-c", command]).returncode
    if "THIN" in os.environ:
        return _tpus(words)
    return subprocess.run([os.environ["REAL_GCLOUD"], *arguments]).returncode


def _storage(buckets: Path, verb: str, words: list[str]) -> int:
    options = [word for word in words if word.startswith("--")]
    plain = [word for word in words if not word.startswith("--")]

    def place(address: str) -> str:
        return (
            f"{buckets}/{address.removeprefix('gs://')}" if address.startswith("gs://") else address
        )

    def matching(address: str) -> list[str]:
        pattern = place(address)
        folder = pattern.endswith("/**")
        escaped = glob.escape(pattern.removesuffix("/**").removesuffix("*"))
        found = glob.glob(
            f"{escaped}/**" if folder else f"{escaped}*" if pattern.endswith("*") else escaped,
            recursive=folder,
        )
        return sorted(each for each in found if os.path.isfile(each))

    if verb == "cp":
        *sources, target = plain
        for source in sources:
            to = (
                Path(place(target)) / os.path.basename(source)
                if target.endswith("/")
                else Path(place(target))
            )
            if any("if-generation-match=0" in option for option in options) and to.exists():
                return _fail(
                    "HTTPError 412: At least one of the pre-conditions you specified did not hold."
                )
            if source != "-" and not os.path.isfile(place(source)):
                return _fail(
                    f"(gcloud.storage.cp) The following URLs matched no objects or files:\n{source}"
                )
            to.parent.mkdir(parents=True, exist_ok=True)
            text = sys.stdin.buffer.read() if source == "-" else Path(place(source)).read_bytes()
            new = buckets.with_name(f"new-{os.getpid()}")
            new.write_bytes(text)
            os.replace(new, to)  # objects appear whole
        return 0
    if verb == "rsync":
        source, target = map(place, plain)
        if not os.path.isdir(source):
            return _fail(f"(gcloud.storage.rsync) Did not find existing container at: {plain[0]}")
        shutil.copytree(source, target, dirs_exist_ok=True)
        return 0
    if verb == "objects":
        listed = []
        for each in matching(plain[1]):
            with suppress(FileNotFoundError):  # it is removed meanwhile
                name, file = os.path.relpath(each, buckets).partition("/")[2], os.stat(each)
                listed.append(
                    {"name": name, "size": file.st_size, "generation": str(file.st_mtime_ns)}
                )
        sys.stdout.write(json.dumps(listed))
        return 0
    if verb == "cat" and "--range" in options:
        first, last = map(int, plain.pop(0).split("-"))
        sys.stdout.buffer.write(Path(place(plain[0])).read_bytes()[first : last + 1])
        return 0
    if verb == "rm" and "--recursive" in options:
        shutil.rmtree(place(plain[0]), ignore_errors=True)
        return 0
    found = [each for address in plain for each in matching(address)]
    if not found:
        return _fail(
            f"(gcloud.storage.{verb}) The following URLs matched no objects or files:\n{plain[0]}"
        )
    for each in found:
        if verb == "ls":
            sys.stdout.write(f"gs://{os.path.relpath(each, buckets)}\n")
        elif verb == "cat":
            sys.stdout.buffer.write(Path(each).read_bytes())
        elif verb == "rm":
            os.remove(each)
    return 0


def _tpus(words: list[str]) -> int:
    import urllib.error  # takes longer than all else that this program does
    import urllib.request

    options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    plain = [word for word in words if not word.startswith("--")]
    _, _, what, verb, *names = [
        word
        for word in plain
        if word != "alpha" and (word != "tpu-vm" or "accelerator-types" not in plain)
    ]
    kind = {
        "queued-resources": "queuedResources",
        "tpu-vm": "nodes",
        "accelerator-types": "acceleratorTypes",
    }[what]
    parent = f"v2/projects/{options['project']}/locations/{options['zone']}/{kind}"
    labels = dict(each.partition("=")[::2] for each in options.get("labels", "").split(",") if each)
    node = {"labels": labels} if labels else {}
    method, path, body = {
        "list": ("GET", parent, None),
        "describe": ("GET", f"{parent}/{'/'.join(names)}", None),
        "create": (
            "POST",
            f"{parent}?queuedResourceId={'/'.join(names)}",
            {"tpu": {"nodeSpec": [{"node": node}]}},
        ),
        "delete": ("DELETE", f"{parent}/{'/'.join(names)}?force={'force' in options}", None),
    }[verb]
    token = Path(os.environ["CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"]).read_text()
    request = urllib.request.Request(
        os.environ["CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU"] + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {token}"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        refused = json.load(error)["error"]
        return _fail(
            f"(gcloud.compute.tpus.{what}.{verb}) {refused['status']}: {refused['message']}"
        )
    if verb == "list" and what == "accelerator-types":
        sys.stdout.write("".join(f"{each['type']}\n" for each in found[kind]))
    elif verb == "list":
        sys.stdout.write(json.dumps(found[kind]))
    elif verb == "describe":
        sys.stdout.write(json.dumps(found))
    return 0


def _fail(message: str) -> int:
    sys.stderr.write(f"ERROR: {message}\n")
    return 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
