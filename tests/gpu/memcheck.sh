#!/bin/sh
# The collective kernels under compute-sanitizer's memcheck: every algorithm, size and dtype once, 2 ranks as streams of
# one GPU. Ends with its status: 0 when no access was out of bounds or misaligned.
#
#   tests/gpu/memcheck.sh [pytest arguments]        COMPUTE_SANITIZER=/path/to/compute-sanitizer PYTHON=python3
set -eu
cd "$(dirname "$0")/../.."
exec "${COMPUTE_SANITIZER:-/usr/local/cuda/bin/compute-sanitizer}" --tool memcheck --report-api-errors no --error-exitcode 9 \
    "${PYTHON:-python3}" -m pytest -p no:cacheprovider tests/gpu/collectives/test_bits.py tests/gpu/collectives/test_norm.py \
    --halma-backend cuda -q -k "2ranks" "$@"
