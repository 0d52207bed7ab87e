#!/bin/bash
# Verifies and measures every CUDA kernel on a machine with an NVIDIA GPU, in less than 8 minutes.
#
#   bench/gpu.sh [RESULT.json]      default: gpu.json
#
# ATTUNE is the command line tool (default: build/bin/attune beside this folder, built first where it is not there);
# ATTUNE_GPU_DEVICE=opencl or vulkan tries the script without a GPU. The result holds what info, verify and compare write, in
# one object; the exit status is 1 if a kernel is wrong or none ran. What the time does not suffice for is left out, and said.
set -uo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
result=$(realpath -m -- "${1:-gpu.json}")
device=${ATTUNE_GPU_DEVICE:-cuda}
attune=${ATTUNE:-$root/build/bin/attune}
limit=${ATTUNE_GPU_SECONDS:-460}
python=$root/.venv/bin/python
[[ -x $python ]] || python=$(command -v python3) || { echo "gpu.sh: no python3" >&2; exit 2; }
if [[ ! -x $attune ]]; then
    "$root/attune" build attune_cli || exit 2
fi
folder=$(mktemp -d) && trap 'rm -rf -- "$folder"' EXIT
begin=$SECONDS
status=0

# step NAME SECONDS COMMAND…: runs it with --json, at most so long and no longer than there is time left.
step() {
    local name=$1 most=$2 left=$((limit - (SECONDS - begin)))
    shift 2
    ((most < left)) || most=$left
    if ((most < 5)); then
        echo "gpu.sh: left out, no time: $name" | tee -a "$folder/left_out"
        return
    fi
    timeout "$most" "$attune" "$@" --json "$folder/$name.json"
    case $? in
    0) ;;
    124) echo "gpu.sh: stopped after $most s: $name" | tee -a "$folder/left_out" ;;
    *) status=1 ;;
    esac
}

step info 60 info
# First whatever a kernel may get wrong, small and odd; then the shapes that are measured.
step verify_random 90 verify --device "$device" --random 300 --seed 1 --keep-going
step verify_shapes 60 verify --device "$device" --case f32:b1:h8:n1024:d64 --case f32:b1:h8:n1000:m1030:d128:causal-br \
    --case f16:b2:h8/2:n513:d64:causal --case f16:b2:h8:n257:m1025:d128:window=128,0 --case f16:b4:h32/8:n1:m4097:d128:kvlen=4097,100,1,0

cases=(f32:b1:h16:n1024:d64 f32:b4:h16:n4096:d64 f32:b4:h16:n4096:d64:causal f32:b4:h16:n4096:d128
    f16:b1:h16:n1024:d64 f16:b4:h16:n4096:d64 f16:b4:h16:n4096:d64:causal f16:b4:h16:n4096:d128 f16:b4:h16:n4096:d128:causal
    f16:b8:h32/8:n1:m8192:d128 f16:b1:h32:n1:m16384:d64 f32:b4:h32:n1:m8192:d128)
for i in "${!cases[@]}"; do
    step "compare_$(printf %02d "$i")" 45 compare --device "$device" --all-isas --time-limit 0.3 --case "${cases[i]}"
done

"$python" - "$folder" "$result" "$((SECONDS - begin))" <<'PYTHON' || status=1
import json, pathlib, sys
folder, result, seconds = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
parts = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))}
left_out = (folder / "left_out").read_text().splitlines() if (folder / "left_out").exists() else []
rows = [row for name, part in parts.items() if name.startswith("compare") for row in part["rows"]]
verified = [row for name, part in parts.items() if name.startswith("verify") for row in part["rows"]]
measured = [row for row in rows if row.get("median_s")]
wrong = [row for row in rows + verified if row.get("kernel") and not row["ok"]]
whole = {"seconds": seconds, "left_out": left_out, "info": parts.get("info"), "rows": rows, "verified": verified}
result.write_text(json.dumps(whole, indent=1) + "\n")
print(f"gpu.sh: {seconds} s, {len(verified)} runs verified, {len(measured)} kernels measured, {len(wrong)} wrong, {len(left_out)} steps cut: {result}")
for row in sorted(measured, key=lambda r: (r["case"], r["median_s"])):
    print(f"  {row['case']:<40} {row['kernel']:<44} {row['median_s'] * 1e3:9.3f} ms {row['gflops'] / 1e3:7.2f} TFLOP/s")
sys.exit(1 if wrong or not measured else 0)
PYTHON
exit $status
