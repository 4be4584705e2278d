#!/usr/bin/env bash
# Record Qwen3's shapes on a machine that has a GPU, torch and transformers, and neither internet nor compiler.
#
#   record.sh KIT OUT [SIZE ...]      SIZE: a shape of simcluster/calibrate/dummy_model.py; default qwen3-0.6b qwen3-8b
#
# KIT is a folder with on_gpu.sh and the pieces of a stripped vLLM that it unpacks; "-" if vLLM can be imported already.
# This repository is used as it lies here: the recorder needs vLLM, numpy and the standard library, nothing built.
# For every size the whole plan runs in the synchronous loop, then the served mix in the asynchronous one, and OUT gets
# a folder SIZE-sync and SIZE-async each. Where simcluster is installed, turn them into recordings:
#
#   simcluster calibrate record --collect OUT/SIZE-sync
#
# Environment: MINUTES (of a synchronous plan, 2.5), MINUTES_ASYNC (1.2), LIMIT (s, a start and its plan at most, 330),
# BUDGET (s, nothing is started later, 800), OPTIONS (for vLLM), SEED (0), LOOPS ("sync async").
set -uo pipefail
kit=${1:?usage: record.sh KIT OUT [SIZE ...]} out=${2:?usage: record.sh KIT OUT [SIZE ...]}
shift 2
[ $# -gt 0 ] || set -- qwen3-0.6b qwen3-8b
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out" && out=$(cd "$out" && pwd)
py=${PYTHON:-python3}
options=${OPTIONS-"--dtype bfloat16 --max-model-len 16384 --max-num-seqs 256 --max-num-batched-tokens 8192 \
--gpu-memory-utilization 0.8 --compilation-config {\"mode\":0,\"cudagraph_mode\":\"FULL_DECODE_ONLY\"}"}
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false
export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-/tmp/vllm_cache} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton_cache}

if [ "$kit" != - ]; then
  site=${KIT_SITE:-/tmp/site}
  KIT_SITE=$site ALONE=1 bash "$kit/on_gpu.sh" "$kit" || exit 3
  export PYTHONPATH=$PYTHONPATH:$site
  [ ! -d /tmp/kit_stub ] || PYTHONPATH=/tmp/kit_stub:$PYTHONPATH # stand-ins that on_gpu.sh has put there
  export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_HOST_IP=127.0.0.1
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} NCCL_IB_DISABLE=1
fi

attempt() { # attempt FOLDER LOOP PHASES MINUTES MODEL NAME [VARIABLE=VALUE ...]: one engine, one plan
  local folder=$1 began=$SECONDS
  [ "$SECONDS" -lt "${BUDGET:-800}" ] || { echo "SKIP $folder: BUDGET spent"; return 1; }
  rm -rf "$folder" && mkdir -p "$folder/raw"
  "$py" - "$@" "$options" "${SEED:-0}" > "$folder/job.json" <<'P' || return 1
import json, sys
folder, loop, phases, minutes, model, name, *_, options, seed = sys.argv[1:]
plan = {"seed": int(seed), "minutes": float(minutes), "phases": phases.split(","), "loads": [0.5, 0.7, 0.9]}
options = ["--load-format", "dummy", *options.split()]
print(json.dumps({"folder": folder, "model": model, "name": name, "loop": loop, "plan": plan, "engine_options": options}))
P
  # timeout makes a process group of its own and kills all of it.
  env "${@:7}" timeout -k 5 "${LIMIT:-330}" "$py" -m simcluster.calibrate.recorder_run "$folder/job.json" --status 3 \
    3> "$folder/status.jsonl" > "$folder/engine.log" 2>&1
  local code=$?
  if [ -e "$folder/raw/complete" ]; then
    echo "OK   $folder in $((SECONDS - began)) s: $(grep progress "$folder/status.jsonl" | tail -1)"
    return 0
  fi
  echo "FAIL $folder after $((SECONDS - began)) s, exit code $code: $(tail -1 "$folder/status.jsonl")"
  tail -25 "$folder/engine.log" | cut -c1-300
  # What a plan has recorded before its time was over is worth keeping.
  [ -n "$(find "$folder/raw" -name 'steps_*.bin' -size +64k)" ]
}

bad=0
for size in "$@"; do
  model=$out/models/$size
  "$py" -m simcluster.calibrate.dummy_model "$size" "$model" || { bad=1; continue; }
  for loop in ${LOOPS:-sync async}; do
    phases=warmup,lone_prefill,decode,mixed,saturation,served minutes=${MINUTES:-2.5}
    [ "$loop" = sync ] || phases=warmup,saturation,served minutes=${MINUTES_ASYNC:-1.2}
    # The engine in a process of its own first, as it is served; within one process if that fails; older parts at last.
    for setting in VLLM_ENABLE_V1_MULTIPROCESSING=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_USE_V2_MODEL_RUNNER=0; do
      attempt "$out/$size-$loop" "$loop" "$phases" "$minutes" "$model" "$size" "$setting" && continue 2
    done
    bad=1
  done
done
echo "total $SECONDS s"
exit $bad
