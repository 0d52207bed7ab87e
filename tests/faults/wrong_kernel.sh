#!/usr/bin/env bash
# verify finds a wrong kernel, says how to do the case again (by itself, and by number), and makes it minimal.
#   wrong_kernel.sh PATH_OF_ATTUNE_WITH_THE_WRONG_KERNEL
set -uo pipefail
attune=$1
output=$("$attune" verify --random 500 --seed 40 --strategy wrong 2>&1)
status=$?
fail() {
    echo "FAILED: $*; the output was:"
    printf '%s\n' "$output"
    exit 1
}
[[ $status == 1 ]] || fail "status $status, expected 1"
[[ $output == *"WRONG  attn_wrong_f32_dbig_sse41"* ]] || fail "the wrong kernel is not named"
small=$(sed -n "s/^  smaller: attune verify \(.*\)$/\1/p" <<<"$output" | head -n 1)
[[ $small == "--case 'f32:b1:h1:n5:m7:d1:causal' --seed "* ]] || fail "the case is not minimal: $small"
eval "set -- $small"
"$attune" verify "$@" >/dev/null 2>&1
[[ $? == 1 ]] || fail "the smaller case does not fail again: $small"
number=$(sed -n 's/.*the same by \(--random 1 --seed [0-9]*\))/\1/p' <<<"$output" | head -n 1)
[[ -n $number ]] || fail "no number of the case"
# shellcheck disable=SC2086 # words
"$attune" verify $number --strategy wrong >/dev/null 2>&1
[[ $? == 1 ]] || fail "the case does not fail again by its number: $number"
# One less in any direction is right, and so is the kernel that was spoiled.
for case in f32:b1:h1:n4:m7:d1:causal f32:b1:h1:n5:m6:d1:causal f32:b1:h1:n5:m7:d1; do
    "$attune" verify --case "$case" --strategy wrong >/dev/null 2>&1 || fail "$case: expected it to be right"
done
"$attune" verify --case f32:b1:h1:n5:m7:d1:causal --strategy flash >/dev/null 2>&1 || fail "flash: expected it to be right"
