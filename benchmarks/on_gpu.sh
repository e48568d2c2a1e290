#!/usr/bin/env bash
# Everything that needs a GPU, in one go, each part with a time limit: results go to the folder named first.
#
#   benchmarks/on_gpu.sh OUT            about nine minutes; two GPUs are used side by side where there are two
#
# With one GPU the parts of the second column run after those of the first, and the pipelines over two are left out.
set -u
OUT=${1:?the folder for results}
mkdir -p "$OUT"
cd "$(dirname "$0")/.."
export PYTHONPATH="src:client/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
PY=${PYTHON:-python3}
GPUS=$($PY -c 'import torch; print(torch.cuda.device_count())')
[ "$GPUS" -gt 0 ] || { echo "no CUDA device" >&2; exit 1; }

part() { # name, seconds, command...
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
  echo "$name: exit $? after $((SECONDS - began)) s"
}

policies() {
  part checks 110 $PY benchmarks/pi05_checks.py --out "$OUT/pi05_checks_h200.json"
  part bench 110 $PY -m stretto.cli bench pi0.5 --batch 1,4,8,32 --n 60 --out "$OUT/pi05_h200.json"
  part load 150 $PY benchmarks/load.py --seconds 2.5 --buckets 1,2,4,6,8,12,16 --out "$OUT/load_h200.json"
}

worlds() {
  part blocks 130 $PY benchmarks/wan_block.py --budget-seconds 100 --rows 1 4 --out "$OUT/wan_block_h200.json"
  part clients 100 $PY benchmarks/server_clients.py --seconds 5 --out "$OUT/server_clients_h200.json"
  part rtc_cost 90 $PY benchmarks/rtc_cost.py --out "$OUT/rtc_cost_h200.json"
}

if [ "$GPUS" -gt 1 ]; then
  (export CUDA_VISIBLE_DEVICES=0; policies) & (export CUDA_VISIBLE_DEVICES=1; worlds) & wait
  part pipeline_smoke 100 $PY -X faulthandler benchmarks/pipeline_smoke.py --out "$OUT/pipeline_2x_h200.json"
  spread=(--windows 21 --decoders none --seconds 2)
  part threads 150 $PY benchmarks/world.py "${spread[@]}" --minutes 2 --out "$OUT/world_2x_h200.json"
  part processes 100 $PY benchmarks/world.py "${spread[@]}" --models wan2.1-1.3b --plans batched by_step by_stage by_block_batched \
    --workers processes --minutes 1.2 --out "$OUT/world_2x_processes_h200.json"
else
  policies
  worlds
  part world 150 $PY benchmarks/world.py --windows 21 --decoders none light --minutes 2 --out "$OUT/world_h200.json"
fi
