#!/usr/bin/env bash
# All GPU tests and micro-benchmarks in less than eight minutes, on a machine with python, torch (for its GPU), triton and
# transformers, and nothing else: no network, no installation. From the repository's root:
#
#     OUT=somewhere SPECDEC_COMMIT=$(git rev-parse --short=12 HEAD) bash bench/gpu.sh
#
# Leaves in $OUT (default: bench/results/gpu) one file of JSON rows for each op, tests.log and summary.txt. A step that fails or
# runs out of time does not stop the others; the exit status is 1 then. PYTHON names another interpreter; with QUICK=1 the
# benchmarks are short.
set -euo pipefail

python=${PYTHON:-python3}
out=${OUT:-bench/results/gpu}
quick=${QUICK:+--quick}
export PYTHONPATH=. PYTHONUNBUFFERED=1 TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
unset TRITON_INTERPRET SPECDEC_BACKEND
mkdir -p "$out"
: >"$out/summary.txt"
failed=()

say() { echo "$*" | tee -a "$out/summary.txt"; }

step() { # step NAME SECONDS COMMAND...
    local name=$1 limit=$2 status=0 begin=$SECONDS
    shift 2
    echo "== $name"
    timeout --kill-after=5 "$limit" "$@" </dev/null || status=$?
    [ "$status" -eq 0 ] || failed+=("$name")
    case $status in
        0) say "$name: passed in $((SECONDS - begin)) s" ;;
        124 | 137) say "$name: STOPPED after its $limit s" ;;
        *) say "$name: FAILED with status $status after $((SECONDS - begin)) s" ;;
    esac
}

device() {
    "$python" - <<'PYTHON'
import sys
import torch
import transformers
print("python", sys.version.split()[0], "torch", torch.__version__, "transformers", transformers.__version__)
import triton
print("triton", triton.__version__)
if not torch.cuda.is_available():
    sys.exit("no GPU")
p = torch.cuda.get_device_properties(0)
print(p.name, f"{p.total_memory >> 20} MiB,", p.multi_processor_count, "multiprocessors")
PYTHON
}

tests() { # in several processes: compiling kernels is most of the work
    local count=$(($(nproc) / 2)) i failures=0 pids=()
    count=$((count < 1 ? 1 : count > 6 ? 6 : count))
    for ((i = 0; i < count; i++)); do
        "$python" tests/test_gpu.py --shard "$i/$count" --seconds 115 >"$out/tests.$i.log" 2>&1 &
        pids+=($!)
    done
    for i in "${pids[@]}"; do wait "$i" || failures=$((failures + 1)); done
    return $((failures > 0))
}

export -f device tests
export python out
begin=$SECONDS
step device 60 bash -euc device
[ ${#failed[@]} -eq 0 ] || exit 1
step tests 140 bash -euc tests
cat "$out"/tests.?.log | tee "$out/tests.log"
rm -f "$out"/tests.?.log
# name, seconds after which no further problem starts, limit
while read -r op budget limit; do
    step "$op" "$limit" "$python" -m "bench.bench_$op" --seconds 0.4 $quick --budget "$budget" --out "$out/$op.jsonl"
done <<'BENCHES'
verify_attention 55 75
accept_reject 40 60
accept_tree 15 25
sample 25 40
append_kv 10 20
rope_append 10 20
compact_kv 8 15
ngram_propose 8 15
skinny_linear 15 25
row_mean 5 10
verify_head 15 25
apply_logit_rules 12 20
rms_norm 5 12
gated_mlp_activation 5 12
gated_linear 10 20
BENCHES

if [ ${#failed[@]} -eq 0 ]; then
    say "gpu.sh: all passed in $((SECONDS - begin)) s"
else
    say "gpu.sh: FAILED or stopped: ${failed[*]} ($((SECONDS - begin)) s)"
    exit 1
fi
