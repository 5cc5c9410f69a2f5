#!/bin/sh
# The collective kernels under compute-sanitizer's racecheck, which looks at shared memory: how the threads of a block
# add up a row and agree on a fault. Memory between ranks is not its subject (tests/gpu/collectives/test_stress.py is).
# 2 ranks as streams of one GPU. Ends with its status: 0 when no hazard was seen.
#
#   tests/gpu/racecheck.sh [pytest arguments]        COMPUTE_SANITIZER=/path/to/compute-sanitizer PYTHON=python3
set -eu
cd "$(dirname "$0")/../.."
exec "${COMPUTE_SANITIZER:-/usr/local/cuda/bin/compute-sanitizer}" --tool racecheck --racecheck-report all \
    --error-exitcode 9 \
    "${PYTHON:-python3}" -m pytest -p no:cacheprovider tests/gpu/collectives/test_norm.py tests/gpu/collectives/test_bits.py \
    --halma-backend cuda -q -k "2ranks and bfloat16" "$@"
