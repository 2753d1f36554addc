#!/usr/bin/env bash
# The operators' tests under compute-sanitizer, on a GPU machine: memcheck with an allocation of its own for every tensor, so
# that an access behind one is seen, and racecheck on shared memory, each by as many processes at a time as SHARDS says.
#   SHARDS=4 tests/sanitize_gpu.sh [python] [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
python="${1:-python3}"
shift || true

# Graphs need torch's allocator; the other tests left out repeat kernels on problems too large for instruments.
small="not graph and not [rows and not T4097 and not many_tokens and not batch3 and not everything and not opcheck"
small+=" and not many_segments and not card- and not as_long_as and not 46080 and not 30000"
files=(tests/test_ops_cuda.py tests/test_sparse_cuda.py tests/test_sparse_item_cuda.py tests/test_sparse_near_cuda.py)
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m pytest -q -m gpu --collect-only -k "$small" "${files[@]}" "$@" >"$work/found" || { cat "$work/found" && exit 1; }
grep :: "$work/found" | sort -R --random-source=<(yes) >"$work/tests"
split -e -n "r/${SHARDS:-4}" "$work/tests" "$work/shard_" # pytest would take an empty file for all tests
run() { compute-sanitizer --tool "$1" --error-exitcode 9 "$python" -m pytest -q -x -p no:cacheprovider "@$2"; }
jobs=()
for tool in memcheck racecheck; do
    for shard in "$work"/shard_*; do
        run "$tool" "$shard" >"$work/$tool-${shard##*_}" 2>&1 &
        jobs+=("$!:$work/$tool-${shard##*_}")
    done
done
status=0
for job in "${jobs[@]}"; do
    wait "${job%%:*}" || { status=1 && cat "${job#*:}"; }
    echo "${job##*/}: $(grep -E '[0-9]+ (passed|failed)' "${job#*:}"); $(grep SUMMARY "${job#*:}")"
done
exit $status
