#!/bin/bash
# The script of a machine, without the lines that differ between runs. `startup.py` puts these before
# it: the variables of the run, and the functions get_code, install, mounts, setup and environment.
# This paragraph is left out.
# shellcheck disable=SC2154,SC2317

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
