"""The driver's part of an all-reduce that ends in mixed residual streams: geometry, kernel, arguments of streams.cu."""

from __future__ import annotations

import struct
from typing import Final

from halma.backends.simt.geometry import Geometry, most_blocks
from halma.backends.simt.sources import ROW_COUNTS
from halma.hal.collectives.contract import Call, Operands
from halma.hal.collectives.mixing import COLUMNS, DTYPES, MOST_ROWS, blocks_of, why_not_mixed
from halma.hal.errors import CollectiveError

WARPS: Final = 8
"""Teams of lanes that move data: one a row, two columns a lane; a warp, or a part of a wider one."""


def refusals(call: Call, size: int, resident_threads: int) -> list[str]:
    """Why the kernels cannot do a call; with too few multiprocessors two grids would not fit together (C16)."""
    reason = why_not_mixed(call.nbytes, call.dtype, call.row_length, most_blocks(size, resident_threads))
    return [] if reason is None else [reason]


def mixed_geometry(row_length: int, size: int, resident_threads: int) -> Geometry:
    """Blocks for the columns, threads for the rows; a function of no row count, as a row's sums depend on it (C1)."""
    return Geometry(blocks_of(row_length, most_blocks(size, resident_threads)), WARPS * COLUMNS // 2)


def kernel_name(call: Call, place: Geometry) -> str:
    """The entry point: by rows where a block has one group of columns, else the one for any."""
    rows = rows_of(call)
    one = place.blocks * COLUMNS >= call.row_length
    return f"streams_{next(n for n in ROW_COUNTS if rows <= n) if one else 'wide'}_{call.dtype}"


def rows_of(call: Call) -> int:
    """Rows of a call that is not refused."""
    rows = call.nbytes // (call.row_length * DTYPES[call.dtype])
    assert 1 <= rows <= MOST_ROWS, "refusals() looked"
    return rows


def addresses_of(call: Call, operands: Operands) -> tuple[int, ...]:
    """Arguments ``streams`` to ``norm_out`` of the kernels, each of which starts a vector.

    Raises:
        CollectiveError: an operand is missing.
    """
    mix, weight, norm_out = operands.mix, operands.weight, operands.norm_out
    if mix is None or weight is None or norm_out is None:
        raise CollectiveError(f"{call.describe()} needs a mix, a weight and norm_out")
    tensors = (mix.streams, mix.mixes, mix.base, mix.scale, mix.fn, mix.next_base, mix.next_scale, weight, norm_out)
    return tuple(tensor.data_ptr() for tensor in tensors)


def numbers_of(call: Call, operands: Operands) -> tuple[int, int, int]:
    """Arguments ``shape``, ``epsilons`` and ``options`` of the kernels."""
    mix, weight = operands.mix, operands.weight
    assert mix is not None and weight is not None, "addresses_of() looked"
    (epsilons,) = struct.unpack("<Q", struct.pack("<ff", operands.eps, mix.hc_eps))
    wide = weight.element_size() == 4
    return call.row_length | rows_of(call) << 32, epsilons, mix.iterations | int(wide) << 32
