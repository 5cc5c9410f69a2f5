"""Launch geometry: pure, bounded, and covering every byte (C5, C16)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halma.backends.simt.geometry import MOST_THREADS, TABLE, geometry, most_blocks, norm_threads, room
from halma.hal.arena.layout import MAX_BLOCKS
from halma.hal.capabilities import Capabilities
from halma.hal.collectives.contract import WORLD_SIZES, Algorithm, Call, Kind, Wire

pytestmark = pytest.mark.torchfree

WAYS = (
    (Algorithm.ONE_SHOT, Wire.WORDS),
    (Algorithm.ONE_SHOT, Wire.SENTINEL),
    (Algorithm.ONE_SHOT, Wire.CHUNKS),
    (Algorithm.TWO_SHOT, Wire.CHUNKS),
    (Algorithm.STAGED, Wire.FLAGS),
    (Algorithm.STAGED_TWO_SHOT, Wire.FLAGS),
)
H200 = 132 * 2048


@pytest.mark.invariant("C16")
@given(
    nbytes=st.integers(0, 1 << 26),
    way=st.sampled_from(WAYS),
    size=st.sampled_from(WORLD_SIZES),
    processors=st.integers(1, 300),
)
def test_two_grids_in_a_row_fit_the_device(nbytes: int, way: tuple, size: int, processors: int) -> None:
    place = geometry(Call(Kind.ALL_REDUCE, nbytes, "bfloat16"), *way, size, processors * 2048, 32)
    apart = way[1] in (Wire.CHUNKS, Wire.FLAGS) and nbytes > 0
    blocks_a_processor = 2 if size <= 4 else 1
    assert 1 <= place.threads <= MOST_THREADS and place.blocks >= 1
    if blocks_a_processor * processors >= 4:  # a smaller device holds a block of each grid, and one for a header
        assert 2 * (place.blocks + apart) <= blocks_a_processor * processors
    flags = place.blocks * place.pieces if way[1] is Wire.CHUNKS else 2 * place.blocks
    assert way[1] not in (Wire.CHUNKS, Wire.FLAGS) or flags <= MAX_BLOCKS


@pytest.mark.invariant("C5")
def test_the_table_ends_with_a_rule_for_every_size() -> None:
    for wire, rows in TABLE.items():
        limits = [row.nbytes for row in rows]
        assert limits == sorted(limits) and limits[-1] >= 1 << 40, wire


@pytest.mark.invariant("C1")
def test_a_rows_threads_depend_on_the_row_alone() -> None:
    assert [norm_threads(units, 32) for units in (1, 32, 33, 512, 4096)] == [32, 32, 64, 512, 512]
    assert norm_threads(100, 128) == 128
    shapes = [
        geometry(Call(Kind.ALL_REDUCE_NORM, rows * 8192, "bfloat16"), way, wire, 2, H200, 32, 512)
        for rows in (1, 7, 320)
        for way, wire in WAYS[:2]
    ]
    assert {place.threads for place in shapes} == {512}
    assert [place.blocks for place in shapes] == [1, 1, 7, 7, 132, 132]


def test_what_was_measured() -> None:
    def of(kib: int, wire: Wire) -> tuple[int, int]:
        place = geometry(Call(Kind.ALL_REDUCE, kib << 10, "bfloat16"), Algorithm.ONE_SHOT, wire, 2, H200, 32)
        return place.blocks, place.threads

    assert of(8, Wire.SENTINEL) == (4, 128) and of(8, Wire.WORDS) == (8, 128)
    assert of(512, Wire.SENTINEL) == (128, 256) and of(1024, Wire.SENTINEL) == (128, 512)


@pytest.mark.invariant("B8")
def test_unknown_room_means_the_least() -> None:
    assert most_blocks(2, room(Capabilities())) == 1 and most_blocks(8, room(Capabilities())) == 1
    assert most_blocks(2, H200) == 132 and most_blocks(8, H200) == 66
