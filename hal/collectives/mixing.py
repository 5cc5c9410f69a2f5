"""An all-reduce that ends in mixed residual streams (mHC): what a channel can do of it, as pure arithmetic.

Terms: a model keeps ``STREAMS`` residual streams. After a sublayer its output goes back into all of them; before the
next one they are mixed into its input. A *mix* is one of the 24 numbers that say how: ``pre`` (4) is used in the call
that makes it, ``post`` (4) and ``comb`` (16) are handed on to the next call, which needs them.
"""

from __future__ import annotations

from typing import Final

STREAMS: Final = 4
MIXES: Final = 2 * STREAMS + STREAMS * STREAMS
HANDED: Final = MIXES - STREAMS
"""Mixes of a row that one call hands to the next, fp32."""
SUMS: Final = MIXES + STREAMS * (STREAMS + 1) // 2
"""Sums over columns that the blocks of a call exchange, a row: mixes, and the streams' Gram matrix."""
MOST_ROWS: Final = 8
MOST_BLOCKS: Final = 64
COLUMNS: Final = 64
"""Columns of a group; a block owns one group, or up to ``MOST_GROUPS`` where blocks are few."""
MOST_GROUPS: Final = 16
ROW_STEP: Final = 32
"""A row is a multiple of it, in elements."""
PART_BYTES: Final = 8 * MOST_ROWS * SUMS * MOST_BLOCKS
"""Of a channel, on each rank, for that exchange: {value, epoch} words."""
DTYPES: Final = {"bfloat16": 2, "float16": 2}


def blocks_of(row_length: int, most: int) -> int:
    """Blocks of a call: as few as have the same number of groups to do as ``most`` would have."""
    groups = -(-row_length // COLUMNS)
    each = -(-groups // min(most, MOST_BLOCKS, groups))
    return -(-groups // each)


def why_not_mixed(nbytes: int, dtype: str, row_length: int, most: int) -> str | None:
    """Why no channel can mix these, or None.

    Args:
        nbytes: of the message: whole rows of ``row_length`` elements.
        most: blocks that a call may have so that two of them fit the device together (C16).
    """
    if dtype not in DTYPES:
        return f"{dtype} streams are not mixed on a channel, only {', '.join(DTYPES)}"
    row_bytes = row_length * DTYPES[dtype]
    if row_length < 1 or row_length % ROW_STEP or nbytes % row_bytes:
        return f"rows of {row_length}: whole rows of a multiple of {ROW_STEP} elements are wanted"
    rows = nbytes // row_bytes
    if not 1 <= rows <= MOST_ROWS:
        return f"{rows} rows: 1 to {MOST_ROWS} are mixed in one call"
    limit = most_columns(most)
    if row_length > limit:
        return f"rows of {row_length}: {most} blocks, of which two calls' fit the device together, hold {limit}"
    return None


def most_columns(most: int) -> int:
    """The longest row that ``most`` blocks hold."""
    return max(0, min(most, MOST_BLOCKS)) * MOST_GROUPS * COLUMNS
