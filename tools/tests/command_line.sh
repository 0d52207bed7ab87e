#!/usr/bin/env bash
# The attune program from outside: exit statuses, messages, files, Ctrl-C.
#   command_line.sh PATH_OF_ATTUNE
set -uo pipefail

attune=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failures=0

# expect STATUS PATTERN ARGUMENTS…: the exit status, and what stdout and stderr together must contain.
expect() {
    local wanted=$1 pattern=$2 status
    shift 2
    "$attune" "$@" >"$folder/out" 2>&1 </dev/null
    status=$?
    if [[ $status != "$wanted" ]] || ! grep -qF -- "$pattern" "$folder/out"; then
        echo "FAILED: attune $*"
        echo "  status $status, expected $wanted; expected the text: $pattern"
        sed 's/^/  | /' "$folder/out" | head -n 20
        failures=$((failures + 1))
    fi
}

expect 0 'compare' --help
expect 0 'layout=L' compare --help
expect 0 'float64' verify --help
expect 0 'KERNEL' info --help
expect 0 '--peers' bench --help
expect 0 'roofline' explain --help
expect 2 'CASE is required' explain
expect 2 '--seconds=0: expected' explain f32:n4:d8 --seconds 0
expect 0 'of the limit' explain f32:h4:n256:d64:causal --seconds 0.1 --threads 1 --json "$folder/explain.json"
python3 - "$folder/explain.json" <<'PY' || failures=$((failures + 1))
import json, sys
(e,) = json.load(open(sys.argv[1]))["explained"]
assert e["limit"] == "multiply-adds" and e["limit_s"] < e["median_s"], e
parts = e["profile"]["parts"]
assert abs(sum(parts.values()) - 1) < 1e-6 and parts["matmul"] > 0.2, parts  # it is mostly matmul
assert e["phases"] and e["stagewise"]["phases"], e
PY
expect 0 'MODEL' onnx-attention --help
expect 0 'attune 0.' --version
expect 2 'subcommand is required'
expect 2 'fast: no such command; expected one of: compare, bench, explain, verify, info' fast
expect 2 '--colour' info --colour

expect 2 "d=0; expected at least 1" verify --case f32:n4:d0
expect 2 "h8/3; expected query heads (8) to be a multiple" compare --case f32:h8/3:n4:d64
expect 2 "'casual' is not a part of a case; expected one of:" verify --case f32:n4:d8:casual
expect 2 "--strategy=flush: unknown; expected one of: " compare --strategy flush --case f32:n4:d8
expect 2 "--device=tpu: unknown; expected cpu, opencl, vulkan or cuda" verify --device tpu --case f32:n4:d8
expect 2 "--threads=0: expected a number from 1" verify --threads 0 --case f32:n4:d8
expect 2 "neither --case nor --random is given" verify
expect 2 "INPUTS is required" onnx-attention node.json
expect 2 "MODEL is $folder/none.json: it cannot be read" onnx-attention "$folder/none.json" inputs.safetensors
expect 2 "--random=-1: expected" verify --random -1
expect 2 "there is no folder" verify --case f32:n4:d8 --json "$folder/none/x.json"
expect 2 "KERNEL=attn_none: unknown; expected one of:" info attn_none
expect 2 "--diff without KERNEL" info --diff attn_none
expect 2 "--mlir without KERNEL" info --mlir
expect 2 "is made by halide; expected a kernel made by mlir" info attn_flash_f32_d64_avx2 --mlir
expect 2 "--rounds=0: expected at least 1" compare --rounds 0 --case f32:n4:d8

expect 0 'kernels on 20 random cases from seed 11: 0 wrong' verify --random 20 --seed 11
expect 0 '1 kernel on 1 random case from seed 3' verify --random 1 --seed 3 --kernel attn_flash_f32_dbig_sse41
expect 0 'that none of the kernels asked for can do' verify --random 30 --kernel attn_flash_f32_d64_avx2
expect 0 'right' verify --case f32:h4/2:d64:varlen=3,17,0:varlenk=40,0,9:causal-br
expect 0 'right' verify --case f32:b2:h4/2:n13:m29:d64:causal-br --json "$folder/verify.json"
python3 - "$folder/verify.json" <<'PY' || failures=$((failures + 1))
import json, sys
rows = json.load(open(sys.argv[1]))["rows"]
assert rows and all(r["ok"] and r["max_err"] <= r["err_bound"] for r in rows), rows
PY

expect 0 'of peak' compare --case f32:h2:n64:d64 --rounds 3 --time-limit 0.05 --threads 1 --json "$folder/compare.json"
python3 - "$folder/compare.json" <<'PY' || failures=$((failures + 1))
import json, sys
result = json.load(open(sys.argv[1]))
assert result["machine"]["peak_gflops_f32"] > 0 and result["machine"]["cores"] >= 1
ran = [r for r in result["rows"] if r["median_s"] is not None]
assert ran and all(r["ok"] and r["min_s"] <= r["median_s"] <= r["p90_s"] * 1.0001 and 0 < r["pct_peak"] < 110 for r in ran), ran
assert sum(r["chosen"] for r in ran) == 1, ran
PY

# Ctrl-C, at several moments: the file is as it was before, or whole and new, and nothing else is left behind.
mkdir "$folder/interrupted"
for delay in 0.05 0.2 0.4 0.6 0.8 1.0; do
    echo '{"old": true}' >"$folder/interrupted/result.json"
    "$attune" compare --case f32:h2:n64:d64 --rounds 3 --time-limit 0.05 --threads 1 \
        --json "$folder/interrupted/result.json" >/dev/null 2>&1 &
    process=$!
    sleep "$delay"
    kill -INT "$process" 2>/dev/null
    wait "$process"
    status=$?
    if [[ $status != 130 && $status != 0 ]]; then
        echo "FAILED: status $status after Ctrl-C, expected 130 (or 0 if it had ended)"
        failures=$((failures + 1))
    fi
    if ! python3 -c 'import json, sys; d = json.load(open(sys.argv[1])); assert "old" in d or d["rows"]' \
        "$folder/interrupted/result.json" || [[ $(ls -A "$folder/interrupted" | wc -l) != 1 ]]; then
        echo "FAILED: after Ctrl-C at $delay s:"
        ls -lA "$folder/interrupted"
        failures=$((failures + 1))
    fi
done

if ((failures)); then
    echo "$failures failures"
    exit 1
fi
echo "all right"
