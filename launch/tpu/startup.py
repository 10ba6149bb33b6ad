"""The script that every machine of a TPU slice runs when it boots."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from launch.environment import exports
from launch.tpu.slice import WORK
from samestep.errors import EXIT_PREEMPTED, EXIT_UNAVAILABLE

PORT = 29400  # of the rendezvous, as in docs/tpu.md
# Of a run that was stopped for an unknown reason, or has waited in vain for others, per boot.
_RESTARTS = 5

# The wheel of uv: its content is known, unlike that of an installation script of a web site. uv
# itself knows the SHA-256 of the Python that it installs.
_UV = "0.13.9"
_UV_WHEEL = (
    "https://files.pythonhosted.org/packages/3d/aa/"
    "26d64642d808de4a652579ef950d7cd2d37f080a8babf9c67c6b75fc4c3f/"
    f"uv-{_UV}-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
)
_UV_SHA256 = "d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19"


@dataclass(frozen=True)
class Startup:
    """The parts of the script that differ between runs.

    Attributes:
        name: of the slice.
        staging: folder in a bucket with the job's files.
        stop_seconds: time that the run gets for its last checkpoint.
        kept: folder in a bucket with a copy of the run's folder, from which the run continues on
            other machines.
        output: the run's folder, as the experiment names it.
        project: project of the secrets.
        user: who runs the experiment; root does all else.
        code: whether staging has a snapshot of the code.
        package: a requirement of pip, or the URL of a wheel in a bucket; None installs the
            snapshot.
        extras: of the package.
        mounts: buckets and folders in them (gs://...), by the folder where they are mounted.
        secrets: names in Secret Manager, by environment variable.
        variables: environment variables.
        setup: further lines of shell.
    """

    name: str
    staging: str
    stop_seconds: float
    kept: str
    output: str
    project: str
    user: str
    code: bool
    package: str | None
    extras: tuple[str, ...]
    mounts: Mapping[str, str]
    secrets: Mapping[str, str]
    variables: Mapping[str, str]
    setup: tuple[str, ...]

    def render(self) -> str:
        """The script."""
        values = {
            "name": self.name,
            "staging": self.staging,
            "kept": self.kept,
            "output": self.output,
            "project": self.project,
            "user": self.user,
            "work": f"{WORK}/{self.name}",
            "stop_seconds": str(math.ceil(self.stop_seconds)),
        }
        lines = [
            "#!/bin/bash",
            f"# Written by samestep launch: the run {self.name} on Cloud TPU. Each machine of the",
            "# slice runs this as root whenever it boots: when it is new, and after maintenance.",
            "# Secrets must not be printed, so there is no `set -x` in here.",
            "set -u -o pipefail",
            "umask 022",
            "",
            *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
            f"port={PORT} restarts={_RESTARTS} stopped={EXIT_PREEMPTED} alone={EXIT_UNAVAILABLE}",
            'home="$work/home"  # of the user: the code, its environment, caches',
            f'place="$home{"/code" if self.code else ""}"  # where relative paths start',
            self._become(),
        ]
        functions = {
            "get_code  # Fetches what is installed, as root.": self._code(),
            "install  # Installs the package in its own environment, as the user.": self._install(),
            "mounts  # Mounts buckets as folders.": self._mounts(),
            "setup  # Runs the commands of cluster.setup.": self._setup(),
            "environment  # Sets the variables that only the run sees.": self._environment(),
        }
        for title, commands in functions.items():
            name, _, about = title.partition("  ")
            body = [f"  {command}" for command in commands or [":"]]
            lines += ["", f"{name}() {{  {about}", *body, "}"]
        return "\n".join([*lines, _BODY])

    def _become(self) -> str:
        home = 'env HOME="$home"'
        if self.user == "root":
            return f"become=({home})"
        # Not su or runuser: they stay between the signals and the run, and kill it two seconds
        # after the first signal.
        identity = 'setpriv --reuid="$user" --regid="$user" --init-groups'
        return f'become=({identity} {home} USER="$user" LOGNAME="$user")'

    def _code(self) -> list[str]:
        lines = [
            "local found",
            'found=$(again listed "$staging/versions") || return',
            'if [ -n "$found" ]; then',
            '  fetch "$staging/versions" "$home/versions" || return',
            "fi",
        ]
        if self.code:
            lines += [
                'fetch "$staging/code.tar.gz" "$work/code.tar.gz" &&',
                '  mkdir -p "$home/code" &&',
                '  tar -xzf "$work/code.tar.gz" --no-same-owner -C "$home/code" || return',
            ]
        if self.package is not None and self._is_wheel:
            lines.append(f'fetch {shlex.quote(self.package)} "$home"/ || return')
        return lines

    @property
    def _is_wheel(self) -> bool:
        return self.package is not None and self.package.startswith("gs://")

    def _install(self) -> list[str]:
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        if self.package is None:
            requirement = f'"$home/code"{shlex.quote(extras)}'
        elif self._is_wheel:
            requirement = f'"$home"/{shlex.quote(self.package.rpartition("/")[2] + extras)}'
        else:
            requirement = shlex.quote(self.package)
        return [
            "# The images have Python 3.10, and samestep needs 3.11, which uv installs.",
            f'local wheel="$work/uv.whl" uv="$work/uv/uv-{_UV}.data/scripts/uv"',
            'rm -rf "$work/uv" "$home/env"',
            f'curl -LsSf --max-time 300 -o "$wheel" {_UV_WHEEL} || return',
            f'if ! sha256sum --check --status <<<"{_UV_SHA256}  $wheel"; then',
            '  say "$wheel has another SHA-256 than the uv that was tested, and is not used"',
            "  return 1",
            "fi",
            'python3 -m zipfile -e "$wheel" "$work/uv" && chmod +x "$uv" || return',
            'limited 600 "${become[@]}" "$uv" venv --python 3.11 --seed "$home/env" || return',
            "# Later machines install the versions of the first ones, whatever is newer by then.",
            "local same=()",
            'if [ -e "$home/versions" ]; then same=(--constraint "$home/versions"); fi',
            'limited 3600 "${become[@]}" "$home/env/bin/pip" install --quiet \\',
            f'  {requirement} "${{same[@]}}"',
        ]

    def _mounts(self) -> list[str]:
        lines = []
        for where, address in self.mounts.items():
            bucket, _, folder = address.removeprefix("gs://").partition("/")
            lines.append(f"mount_bucket {shlex.join([bucket, folder.strip('/'), where])} || return")
        return lines

    def _setup(self) -> list[str]:
        return [f"bash -e -c {shlex.quote(chr(10).join(self.setup))}"] if self.setup else []

    def _environment(self) -> list[str]:
        lines = [
            'export SAMESTEP_JOB="$name" SAMESTEP_NODES',
            'SAMESTEP_NODES=$(IFS=,; printf %s "${hosts[*]}")',
        ]
        if self.code and self.package is not None:
            lines.append('export PYTHONPATH="$home/code"')
        lines += exports(self.variables)
        for variable, secret in self.secrets.items():
            lines += [f"{variable}=$(secret {shlex.quote(secret)}) || return", f"export {variable}"]
        return lines


_BODY = r"""
export PATH="$PATH:/snap/bin" HOME="${HOME:-/root}"
log="$work/job.log" boot=$(date +%Y%m%d-%H%M%S) worker=$(hostname) hosts=()
mkdir -p "$home"
if [ -z "${SAMESTEP_UNIT:-}" ]; then
  # A unit of its own: systemd stops it, and waits for it, while there is a network. The unit of
  # startup scripts would not pass the signal on, and the run would end without a network.
  unit=(--unit="$name" --collect --setenv=SAMESTEP_UNIT=1
    --property=KillMode=mixed --property=OOMPolicy=continue)
  unit+=(--property=TimeoutStopSec="$((stop_seconds + 60))")
  unit+=(--property=After="network-online.target google-guest-agent.service snapd.service")
  cp "$0" "$work/startup.sh" &&
    systemd-run --quiet --no-block "${unit[@]}" bash "$work/startup.sh" && exit
fi
exec >>"$log" 2>&1 </dev/null
before=$(wc -l <"$log")  # lines of earlier boots
rm -rf "$work/leaving" "$work/stop" "$work/pid"  # of the boot before
cd "$work" || exit 1

say() { printf '%s startup: %s\n' "$(date +%T)" "$*" >&2; }

again() {  # tries a command five times: networks and package indices come and go
  local pause
  for pause in 2 10 30 60; do
    "$@" && return
    say "$1 has failed; again in $pause s"
    sleep "$pause"
  done
  "$@"
}

limited() { timeout --kill-after=10 "$@"; }  # a command that hangs would cost money forever

gcloud() { limited 300 gcloud "$@"; }

fetch() { again gcloud storage cp --quiet "$1" "$2"; }

listed() {  # what a pattern finds in a bucket; nothing is an answer, and no answer is a failure
  local said
  if said=$(gcloud storage ls "$1" 2>&1); then
    printf '%s\n' "$said"
  elif [[ $said != *"matched no objects"* ]]; then
    say "$said"
    return 1
  fi
}

secret() { again gcloud secrets versions access latest --secret="$1" --project="$project" --quiet; }

metadata() {
  curl --silent --fail --max-time 10 --header 'Metadata-Flavor: Google' \
    "http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance/$1"
}

mount_bucket() {  # BUCKET FOLDER WHERE
  mountpoint --quiet "$3" && return
  command -v gcsfuse >/dev/null || again install_gcsfuse || return
  mkdir -p "$3" && limited 300 gcsfuse -o allow_other --implicit-dirs --uid "$(id -u "$user")" \
    --gid "$(id -g "$user")" ${2:+--only-dir "$2"} "$1" "$3"
}

install_gcsfuse() {
  curl -LsSf --max-time 300 -o /usr/share/keyrings/cloud.google.asc \
    https://packages.cloud.google.com/apt/doc/apt-key.gpg &&
    printf 'deb [signed-by=%s] https://packages.cloud.google.com/apt %s main\n' \
      /usr/share/keyrings/cloud.google.asc "gcsfuse-$(lsb_release -cs)" \
      >/etc/apt/sources.list.d/gcsfuse.list &&
    limited 900 apt-get update -qq && limited 900 apt-get install -y -qq gcsfuse
}

copy_run() {  # the small files of the run's folder, without those that exist elsewhere
  # Rank 0 writes them, usually on the machine that hosts the rendezvous.
  cd "$place" 2>/dev/null && [ "$worker" = 0 ] && [ -d "$output" ] || return 0
  rm -rf "$work/run" && mkdir "$work/run"
  tar -C "$output" --exclude=./.owner --exclude=./checkpoints --exclude=./tensorboard \
    --exclude=./wandb -cf - . |
    tar -C "$work/run" -xf -
  gcloud storage rsync --recursive --quiet "$work/run" "$kept" >"$work/copies" 2>&1
}

bring_back() {  # all or nothing: what is half there would be copied over what was kept
  rm -rf "$work/back" && mkdir "$work/back" &&
    again gcloud storage rsync --recursive --quiet "$kept" "$work/back" &&
    chown -R "$user:" "$work/back" && "${become[@]}" mkdir -p "$(dirname -- "$output")" &&
    mv -T "$work/back" "$output"
}

copy_log() {  # of this boot; whole lines of valid UTF-8, as readers fetch ranges of bytes
  head -n "$(wc -l <"$log")" "$log" | tail -n "+$((before + 1))" |
    iconv -c -f utf-8 -t utf-8 >"$work/log"
  gcloud storage cp --quiet "$work/log" "$staging/log/$boot-worker-$worker.log" >"$work/copies" 2>&1
}

keep() {  # one at a time, or an older copy might replace a newer one
  (
    flock --wait 900 9 || { say "copies take too long" && exit; }
    copy_run || say "the run's folder could not be copied: $(tail -n 1 "$work/copies")"
    copy_log || say "this log could not be copied: $(tail -n 1 "$work/copies")"
  ) 9>"$work/lock"
}

keep_versions() {
  { "${become[@]}" "$home/env/bin/pip" list --format=freeze >"$work/versions" &&
    gcloud storage cp --quiet --if-generation-match=0 "$work/versions" "$staging/versions"; } ||
    say "which versions were installed could not be kept"
}

finish() {  # reports the end of the run to whoever waits for it
  say "the run has ended with exit code $1"
  keep
  printf '%s %s\n' "$worker" "$1" >"$work/exit"
  again gcloud storage cp --quiet "$work/exit" "$staging/exit-$worker"
  exit "$1"
}

signal_run() { [ -e "$work/pid" ] && kill -TERM "$(<"$work/pid")" 2>/dev/null; }

# Once only: a second signal would end the run without a checkpoint.
note() { mkdir "$work/$1" 2>/dev/null && signal_run; }

watch_machine() {  # a spot machine has 30 seconds from here
  until [ "$(metadata preempted)" = TRUE ]; do sleep 2; done
  say "this machine is taken away"
  note leaving
}

watch_bucket() {
  while sleep 20; do
    if [ -n "$(listed "$staging/stop")" ]; then note stop; fi
    keep
  done
}

start_run() {
  local run=("${become[@]}" "$home/env/bin/samestep" train "$work/config.yaml"
    --elastic "${#hosts[@]}")
  if [ "${#hosts[@]}" -gt 1 ]; then run+=(--rendezvous "${hosts[0]}:$port"); fi
  (
    ulimit -l unlimited  # the driver locks the memory that chips read and write
    environment && exec "${run[@]}"
  ) &
  echo $! >"$work/pid"
  # A note that came before there was a run.
  if [ -e "$work/stop" ] || [ -e "$work/leaving" ]; then signal_run; fi
  wait $!
  code=$?
  while kill -0 $! 2>/dev/null; do  # a signal to this script ended `wait`, but not the run
    wait $!
    code=$?
  done
  rm "$work/pid"
}

say "$name has booted"
worker=$(again metadata attributes/agent-worker-number) || { worker=$(hostname); finish 1; }
endpoints=$(again metadata attributes/worker-network-endpoints) || finish 1
mapfile -t hosts < <(tr , '\n' <<<"$endpoints" | cut -d : -f 3)
say "this is machine $worker of ${#hosts[@]}"
found=$(again listed "$staging/exit-$worker") || finish 1
if [ -n "$found" ]; then
  say "the run has ended already"
  exit
fi
trap 'note leaving' TERM
watch_machine &
watchers=($!)
watch_bucket &
watchers+=($!)
trap 'kill "${watchers[@]}" 2>/dev/null' EXIT

id -u "$user" >/dev/null 2>&1 ||
  useradd --system --user-group --home-dir "$home" --no-create-home "$user"
fetch "$staging/config.yaml" "$work/config.yaml" || finish 1
if [ ! -e "$work/installed" ]; then
  get_code || finish 1
  chown -R "$user:" "$home" || finish 1
  again install || finish 1
  if [ "$worker" = 0 ] && [ ! -e "$home/versions" ]; then keep_versions; fi
  : >"$work/installed"
fi
mounts || finish 1
setup || finish 1
cd "$place" || finish 1
if [ "$worker" = 0 ] && [ ! -e "$output" ]; then
  # A run that began anew for want of an answer would overwrite what was kept.
  found=$(again listed "$kept/**") || finish 1
  if [ -n "$found" ]; then
    say "bringing back the run's folder"
    bring_back || finish 1
  fi
fi

for ((tries = 0; ; tries++)); do
  if [ -e "$work/stop" ]; then finish "$stopped"; fi
  start_run
  if [ -e "$work/leaving" ] && [ "$code" -ne 0 ]; then
    say "exit code $code; the run goes on when the machine is there again, or another in its place"
    keep
    exit
  fi
  if [ -e "$work/stop" ] ||
    ((tries >= restarts || (code != stopped && code != alone && code <= 128))); then
    finish "$code"
  fi
  say "the run has ended with exit code $code, and is started again"
  sleep 5
done
"""
