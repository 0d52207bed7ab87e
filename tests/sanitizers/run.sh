#!/usr/bin/env bash
# Builds and runs a part of the tests under sanitizers: address (with undefined) over everything, thread over the runtime.
#   run.sh address|thread SOURCE BUILD CMAKE NINJA PYTHON HALIDE
set -euo pipefail
sanitizer=$1 source=$2 build=$3 cmake=$4 ninja=$5 python=$6 halide=$7
mkdir -p "$build"
"$python" "$source/tests/sanitizers/choose.py" "$build/catalogue.json" "$source"/generators/catalogue/{cpu,mlir,gpu,mma}.json
flags=$sanitizer
[[ $sanitizer != address ]] || flags=address,undefined
# -O1: a third of the compile time of -O2, and the kernels, where the time goes, are Halide's anyway.
"$cmake" -G Ninja -S "$source" -B "$build" -DCMAKE_MAKE_PROGRAM="$ninja" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DATTUNE_SANITIZE="$flags" -DATTUNE_PYTHON="$python" \
    -DCMAKE_PREFIX_PATH="$halide;$halide/lib64/cmake" -DATTUNE_CATALOGUES="$build/catalogue.json" \
    -DATTUNE_FOLDERS="tools;tests" >"$build/configure.txt" 2>&1 || { tail -n 30 "$build/configure.txt"; exit 1; }
targets=(contract_test)
[[ $sanitizer == thread ]] ||
    targets+=(tools_test faults_test mha_test device_test attune_ptx_driver fuzz_{case,manifest,onnx_model,safetensors})
"$ninja" -C "$build" "${targets[@]}" >"$build/build.txt" 2>&1 || { tail -n 40 "$build/build.txt"; exit 1; }

export ATTUNE_ISA=avx2
export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
contract="$build/tests/contract/contract_test"
if [[ $sanitizer == thread ]]; then
    # What several threads do at once; the tests that fork cannot be run under ThreadSanitizer.
    "$contract" --gtest_filter='Contract_3_13.plan_shared_by_eight_threads:Contract_3_15.*:Contract_3_7_varlen.bits_*:Contract_merge.threads_*:Contract_3_14.threads:Reported.H6_*:Reported.I6_*-*forked*:*.slow_*'
    exit
fi
# The long tests are long because of their number of sizes, which the default tests go through.
"$contract" --gtest_filter='-*.slow_*:Contract_edges.*:Contract_3_2.slow*:Contract_3_7.*:Contract_3_17.*:Contract_3_13.*exactly*:Reported.F3_*:Reported.D9_*'
"$build/tools/tests/tools_test"
(cd "$build/tests/faults" && ./faults_test --gtest_filter='-*no_memory*')
"$build/tests/mha/mha_test"
# Devices by CUDA's driver on the PTX interpreter: no driver of a vendor, with leaks of its own, is loaded.
ATTUNE_CUDA_LIBRARY="$build/ptx/libcuda.so.1" ATTUNE_PTX_SAME_WRITES=1 ATTUNE_PTX_MEMORY=3221225472 \
    "$build/tests/device/device_test" --gtest_filter='*cuda*'
for name in case manifest onnx_model safetensors; do
    "$build/tests/fuzz/fuzz_$name" "$source/tests/fuzz/corpus/$name"
done
