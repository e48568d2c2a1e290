#!/usr/bin/env bash
# What needs a GPU, in parts that can be run by name, each with a time limit: results go to the folder named first.
#
#   benchmarks/on_gpu.sh OUT                    everything: about nine minutes, two GPUs side by side where there are two
#   benchmarks/on_gpu.sh OUT fidelity seeds     these parts, one after the other, on all GPUs
#   benchmarks/on_gpu.sh OUT a b + c d          a and b on the first GPU while c and d are on the second
#   benchmarks/on_gpu.sh --list                 the parts
#
# With one GPU, `everything` leaves out the pipelines over two.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="src:client/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
PY=${PYTHON:-python3}

limited() { # name, seconds, command...
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
  echo "$name: exit $? after $((SECONDS - began)) s"
}

# One GPU each.
part_checks() { limited checks 110 $PY benchmarks/pi05_checks.py --out "$OUT/pi05_checks_h200.json"; }
part_table() { limited table 420 $PY benchmarks/roofline_table.py --out "$OUT/roofline_table_h200.json"; } # other engines: --peers
part_bench() { limited bench 110 $PY -m stretto bench pi0.5 --batch 1,4,8,32 --n 60 --out "$OUT/pi05_h200.json"; }
part_load() { limited load 150 $PY benchmarks/load.py --out "$OUT/load_h200.json" --traces "$OUT"; }
part_roofline() { limited roofline 60 $PY benchmarks/roofline_robots.py --model pi0.5 --no-figures --out "$OUT/roofline_h200"; }
part_blocks() { limited blocks 130 $PY benchmarks/wan_block.py --budget-seconds 100 --rows 1 4 --out "$OUT/wan_block_h200.json"; }
part_clients() { limited clients 100 $PY benchmarks/server_clients.py --seconds 5 --out "$OUT/server_clients_h200.json"; }
part_rtc_cost() { limited rtc_cost 90 $PY benchmarks/rtc_cost.py --out "$OUT/rtc_cost_h200.json"; }

# As many GPUs as there are: results say how many.
part_smoke() { limited smoke 100 $PY benchmarks/pipeline_smoke.py --models wan2.1-1.3b --out "$OUT/pipeline_${GPUS}x_h200.json"; }
part_fidelity() { limited fidelity 170 $PY benchmarks/world_fidelity.py --budget 150 --out "$OUT/world_fidelity_${GPUS}x_h200.json"; }
part_fidelity_processes() {
  limited fidelity_processes 100 $PY benchmarks/world_fidelity.py --budget 85 --models wan2.1-1.3b --workers processes \
    --out "$OUT/world_fidelity_${GPUS}x_processes_h200.json"
}
part_seeds() {
  local parts="seed-2gpu convoy joint seed-1gpu"
  [ "$GPUS" -eq 1 ] && parts=seed-1gpu
  limited seeds 160 $PY benchmarks/world_seeds.py --budget 140 --seconds 2 --parts $parts --out "$OUT/world_seeds_${GPUS}x_h200.json"
}
plans="whole by_block by_step by_stage by_block_batched batched"
part_worlds() { # one stream, window 21, no decoder, chunks of three frames: what plans are compared by
  limited worlds 130 $PY benchmarks/world.py --windows 21 --decoders none --seconds 2 --minutes 1.8 --chunk-frames 3 \
    --models wan2.1-1.3b wan2.1-14b --plans $plans --out "$OUT/world_${GPUS}x_chunk3_h200.json"
}
part_worlds_quick() { # the same with chunks of one frame
  limited worlds_quick 110 $PY benchmarks/world.py --windows 21 --decoders none --seconds 1.5 --minutes 1.5 --chunk-frames 1 \
    --models wan2.1-1.3b wan2.2-5b wan2.1-14b --plans $plans --out "$OUT/world_${GPUS}x_chunk1_h200.json"
}
part_worlds_rest() { # the plans that are left, and as many streams as the planner admits
  limited worlds_rest 110 $PY benchmarks/world.py --windows 21 --decoders none --seconds 1.5 --minutes 1.5 --chunk-frames 1 \
    --models wan2.1-1.3b wan2.2-5b wan2.1-14b --plans portfolio serial circular --out "$OUT/world_${GPUS}x_rest_h200.json"
}
part_worlds_decoded() { # with the decoder as a stage
  limited worlds_decoded 100 $PY benchmarks/world.py --windows 21 --decoders vae --seconds 2 --minutes 1.3 --chunk-frames 1 \
    --models wan2.1-1.3b wan2.2-5b wan2.1-14b --out "$OUT/world_${GPUS}x_vae_h200.json"
}
part_worlds_short() { # windows of nine frames
  limited worlds_short 100 $PY benchmarks/world.py --windows 9 --decoders none --seconds 1.5 --minutes 0.8 \
    --out "$OUT/world_${GPUS}x_window9_h200.json"
}
part_worlds_processes() {
  limited worlds_processes 100 $PY benchmarks/world.py --windows 21 --decoders none --seconds 2 --models wan2.1-1.3b \
    --plans batched by_step by_stage by_block_batched --workers processes --minutes 1.2 \
    --out "$OUT/world_${GPUS}x_processes_h200.json"
}

parts() { # names...
  local name
  for name in "$@"; do "part_$name"; done
}

if [ "${1:-}" = --list ]; then
  declare -F | sed -n 's/^declare -f part_//p'
  exit
fi
OUT=${1:?the folder for results}
shift
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
GPUS=$($PY -c 'import torch; print(torch.cuda.device_count())')
[ "$GPUS" -gt 0 ] || { echo "no CUDA device" >&2; exit 1; }
for name in "$@"; do
  [ "$name" = + ] || declare -F "part_$name" >/dev/null || { echo "no part $name: see --list" >&2; exit 1; }
done

first="checks bench load roofline" second="blocks clients rtc_cost" all="smoke fidelity seeds worlds worlds_quick worlds_processes"
[ $# -gt 0 ] && { first="$*" second="" all=""; }
[ "${first#*" + "}" != "$first" ] && { second=${first#*" + "} first=${first%%" + "*}; }
if [ -n "$second" ] && [ "$GPUS" -gt 1 ]; then
  everyone=$GPUS GPUS=1
  (export CUDA_VISIBLE_DEVICES=0; parts $first) & (export CUDA_VISIBLE_DEVICES=1; parts $second) & wait
  GPUS=$everyone
else
  [ -n "$all" ] && [ "$GPUS" -eq 1 ] && all="fidelity seeds worlds worlds_quick worlds_rest worlds_decoded worlds_short"
  parts $first $second
fi
parts $all
