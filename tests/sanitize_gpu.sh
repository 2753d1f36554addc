#!/usr/bin/env bash
# The operators' tests under compute-sanitizer, on a GPU machine: memcheck with an allocation of its own for every tensor, so
# that an access behind one is seen, then racecheck on shared memory.
#   tests/sanitize_gpu.sh [python] [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
python="${1:-python3}"
shift || true

# Graphs need torch's allocator; the other tests left out repeat kernels on problems too large for instruments.
small="not graphs and not rows and not T4097 and not many_tokens and not batch3 and not everything and not opcheck"
for tool in memcheck racecheck; do
    echo "== $tool"
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 \
        "$python" -m pytest -q -x -m gpu tests/test_ops_cuda.py tests/test_sparse_cuda.py tests/test_sparse_item_cuda.py -k "$small" "$@"
done
