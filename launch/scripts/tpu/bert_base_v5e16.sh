#!/bin/bash
# BERT-base on a slice of 16 v5e chips: batches of 131,072 tokens (Devlin et al. 2019).
# Cost, a forecast of `samestep plan --throughput v5e`, compiled: 20 hours on 16 TPU v5e, 320 device
# hours, without the time for data and checkpoints.
#
#   PROJECT=my-project BUCKET=my-bucket bash launch/scripts/tpu/bert_base_v5e16.sh [key=value ...]
#
# In a clone, after `pip wheel --no-deps .`; DATA is in the bucket (docs/cloud_tpu.md).
# Watch: gcloud storage cat 'gs://BUCKET/bert-base-v5e16/TIME/log/*'. Stop, with a checkpoint: echo
# | gcloud storage cp - gs://BUCKET/bert-base-v5e16/TIME/stop, and delete the slice as printed, as
# after a preemption. Submitted again, the run continues.
set -euo pipefail
: "${PROJECT:=my-project}" "${ZONE:=us-central1-a}" "${BUCKET:=my-bucket}"
: "${NAME:=bert-base-v5e16}" "${EXPERIMENT:=configs/pretrain/tpu/bert_base.yaml}"
: "${DATA:=gs://$BUCKET/wikipedia_en}" "${OUTPUT:=gs://$BUCKET/$NAME}"
: "${PACKAGE:=samestep-0.1.0-py3-none-any.whl}"
OVERRIDES=(tracking.wandb=null "$@")
OUTPUT=${OUTPUT%/} && STAGING=$OUTPUT/$(date +%Y%m%d-%H%M%S) script=$(mktemp)
ARGUMENTS=("$EXPERIMENT" "data.path=$DATA" "checkpoint.folder=$OUTPUT/checkpoints" output=run)
ARGUMENTS+=("${OVERRIDES[@]}")
{ echo '#!/bin/bash' && declare -p NAME STAGING OUTPUT PACKAGE ARGUMENTS && cat; } >"$script" <<'END'
# Every machine of the slice runs this as root at each boot.
set -u -o pipefail && umask 022
work=/var/lib/samestep/$NAME home=$work/home boot=$(date +%Y%m%d-%H%M%S) worker=$(hostname)
become=(setpriv --reuid=samestep --regid=samestep --init-groups env HOME="$home")
export PATH="$PATH:/snap/bin" HOME="${HOME:-/root}"
mkdir -p "$home"
if [ -z "${SAMESTEP_UNIT:-}" ]; then  # a unit, which systemd stops while there is a network
  cp "$0" "$work/startup.sh" && systemd-run --quiet --no-block --collect --unit="$NAME" \
    -E SAMESTEP_UNIT=1 -p KillMode=mixed -p OOMPolicy=continue -p TimeoutStopSec=90 \
    -p After="network-online.target snapd.service" bash "$work/startup.sh" && exit
fi
exec >>"$work/$boot.log" 2>&1 </dev/null
cd "$work" && ln -sfn "$boot.log" job.log || exit 1
install() {
  { id samestep || useradd --system -U -M -d "$home" samestep; } && chown samestep: "$home" &&
    gcloud --quiet storage cp "$STAGING/${PACKAGE##*/}" "$work/" &&
    python3 -m pip install --quiet --no-deps --upgrade --target uv 'uv @ https://files.pythonhosted.org/packages/3d/aa/26d64642d808de4a652579ef950d7cd2d37f080a8babf9c67c6b75fc4c3f/uv-0.13.9-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl#sha256=d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19' &&
    "${become[@]}" uv/bin/uv venv --clear --python 3.11 --seed "$home/env" &&
    "${become[@]}" "$home/env/bin/pip" install --quiet "$work/${PACKAGE##*/}[gcs,tpu,wandb]" &&
    "${become[@]}" "$home/env/bin/python" -I -c 'import launch.tpu.machine' &&
    touch installed
}
if ! { [ -e installed ] || install; }; then
  gcloud --quiet storage cp job.log "$STAGING/log/$boot-$worker.log"
  echo "$worker 1" | gcloud --quiet storage cp - "$STAGING/exit-$worker"; exit 1
fi
printf '{"name": "%s", "work": "%s", "staging": "%s", "kept": "%s", "output": "run", "variables": {}}' \
  "$NAME" "$work" "$STAGING" "$OUTPUT/run" >machine.json
cd "$home" || exit 1; ulimit -l unlimited  # chips read and write locked memory
exec "${become[@]}" env/bin/python -I -m launch.tpu.machine "$work/machine.json" "${ARGUMENTS[@]}"
END
gcloud storage cp "$PACKAGE" "$STAGING/"
gcloud compute tpus queued-resources create "$NAME" --node-id="$NAME" --project="$PROJECT" \
  --zone="$ZONE" --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --spot \
  --metadata-from-file=startup-script="$script"
echo "submitted: $STAGING. In the end, delete the slice: gcloud compute tpus queued-resources" \
  "delete $NAME --project=$PROJECT --zone=$ZONE --force --quiet"
