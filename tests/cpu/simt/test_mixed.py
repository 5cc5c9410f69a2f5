"""An all-reduce into mixed residual streams: what the driver packs and refuses, and grids that fit together (C16)."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halma.backends.simt.geometry import most_blocks
from halma.backends.simt.mixed import kernel_name, mixed_geometry, refusals
from halma.hal.collectives import mixing
from halma.hal.collectives.choice import mixing_blocks
from halma.hal.collectives.contract import WORLD_SIZES, Algorithm, Call, Choice, Kind, Operands, StreamMix, Wire
from halma.hal.errors import CollectiveError
from tests.cpu.simt.fake_device import RESIDENT, NotedStream, fake_channel

SENTINEL = Choice(Algorithm.ONE_SHOT, Wire.SENTINEL)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def call_of(rows: int, columns: int, dtype: str = "bfloat16") -> Call:
    return Call(Kind.ALL_REDUCE_STREAMS, rows * columns * 2, dtype, detail=f"row {columns}", row_length=columns)


def aligned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.zeros(count + 16, dtype=torch.uint8)
    shift = -memory.data_ptr() % 16
    return memory[shift : shift + count].view(dtype).view(shape)


def operands_of(rows: int, columns: int, *, wide: bool = True) -> Operands:
    carrier, narrow = torch.bfloat16, torch.float32
    mix = StreamMix(
        aligned(rows, 4, columns, dtype=carrier),
        aligned(rows, 20, dtype=narrow),
        aligned(24, dtype=narrow),
        aligned(3, dtype=narrow),
        aligned(24, 4 * columns, dtype=narrow),
        aligned(24, dtype=narrow),
        aligned(3, dtype=narrow),
        hc_eps=0.5,
        iterations=20,
    )
    weight = aligned(columns, dtype=narrow if wide else carrier)
    y, x = aligned(rows, columns, dtype=carrier), aligned(rows, columns, dtype=carrier)
    return Operands(y, mix.streams, weight=weight, norm_out=x, eps=0.25, mix=mix)


def test_the_arguments_of_a_call() -> None:
    channel = fake_channel(4, rank=1)
    operands, layout = operands_of(3, 4096), channel.site.layout
    mix = operands.mix
    assert mix is not None and operands.weight is not None and operands.norm_out is not None
    channel.launch(call_of(3, 4096), SENTINEL, operands, None, NotedStream())
    (found,) = channel._launch.__self__.launches
    assert (found.kernel, found.grid, found.block, found.dependent) == ("streams_4_bfloat16", 64, 256 + 32, True)
    tag, nbytes, source, out, lane, box = found.args[4 + 3 : 4 + 9]
    assert layout.sentinel is not None and layout.parts is not None
    assert (nbytes, lane, box) == (3 * 8192, layout.sentinel.offset, layout.sentinel.box)
    assert (source, out, tag >> 32 & 255) == (operands.source.data_ptr(), mix.streams.data_ptr(), 6)
    tensors = (mix.streams, mix.mixes, mix.base, mix.scale, mix.fn, mix.next_base, mix.next_scale)
    parts = channel.site.own.address + layout.parts.offset
    assert found.args[13:] == (
        *(tensor.data_ptr() for tensor in tensors),
        operands.weight.data_ptr(),
        operands.norm_out.data_ptr(),
        parts,
        4096 | 3 << 32,
        *struct.unpack("<Q", struct.pack("<ff", 0.25, 0.5)),
        20 | 1 << 32,
    )


@pytest.mark.invariant("C16")
@given(
    rows=st.integers(1, 8),
    columns=st.integers(1, 300).map(lambda n: 32 * n),
    size=st.sampled_from(WORLD_SIZES),
    processors=st.integers(1, 300),
    channels=st.integers(1, 3),
)
def test_two_grids_fit_the_device_or_the_call_is_refused(
    rows: int, columns: int, size: int, processors: int, channels: int
) -> None:
    """Blocks wait for each other, so a grid that does not fit is worse than one that spins in vain."""
    resident = processors * 2048 // channels
    call = call_of(rows, columns)
    said = refusals(call, size, resident)
    if mixing.why_not_mixed(call.nbytes, call.dtype, columns, mixing_blocks(processors * 2048, channels)) is None:
        assert said == []  # what hal promises the driver can do
    if said:
        assert "fit the device together" in said[0]
        assert columns > most_blocks(size, resident) * mixing.MOST_GROUPS * mixing.COLUMNS
        return
    place = mixed_geometry(columns, size, resident)
    assert place.threads == 256 and 1 <= place.blocks <= min(mixing.MOST_BLOCKS, most_blocks(size, resident))
    each = -(-columns // (place.blocks * mixing.COLUMNS))
    assert each <= mixing.MOST_GROUPS and place.blocks * each * mixing.COLUMNS >= columns
    assert ("wide" in kernel_name(call, place)) == (each > 1)
    if processors // channels >= 2:  # launch bounds give two of these blocks a multiprocessor
        assert 2 * place.blocks <= 2 * (processors // channels)


@pytest.mark.invariant("C16", control=True)
def test_a_whole_device_mixes_the_published_widths_and_a_small_one_says_why() -> None:
    for size in WORLD_SIZES:
        for columns, blocks in ((4096, 64), (7168, 56), (4224, 33), (96, 2)):
            assert refusals(call_of(8, columns), size, RESIDENT) == []
            assert mixed_geometry(columns, size, RESIDENT).blocks == blocks
    assert refusals(call_of(1, 4096), 2, 4 * 2048) == []
    assert "2 blocks, of which two calls' fit the device together, hold 2048" in refusals(call_of(1, 4096), 2, 4096)[0]
    channel = fake_channel(8, channels=16)
    with pytest.raises(CollectiveError, match="fit the device together"):
        channel.launch(call_of(1, 4224), SENTINEL, operands_of(1, 4224), None, NotedStream())


@pytest.mark.invariant("C1")
def test_a_rows_blocks_depend_on_its_length_alone() -> None:
    places = {mixed_geometry(4096, size, RESIDENT) for size in WORLD_SIZES}
    assert len(places) == 1


def test_refusals_say_why_and_queue_nothing() -> None:
    channel = fake_channel()
    full = channel.site.layout
    cases = (
        (call_of(9, 512), SENTINEL, "9 rows: 1 to 8"),
        (call_of(1, 48), SENTINEL, "multiple of 32"),
        (replace(call_of(1, 512), dtype="float32"), SENTINEL, "float32 streams"),
        (call_of(1, 512), replace(SENTINEL, wire=Wire.WORDS), "one_shot/sentinel alone"),
    )
    for call, choice, said in cases:
        with pytest.raises(CollectiveError, match=said):
            channel.launch(call, choice, operands_of(1, 512), None, NotedStream())
    operands = operands_of(2, 512)
    with pytest.raises(CollectiveError, match="needs a mix"):
        channel.launch(call_of(2, 512), SENTINEL, replace(operands, mix=None), None, NotedStream())
    shifted = replace(operands.mix, mixes=aligned(44, dtype=torch.float32)[2:42].view(2, 20))  # type: ignore[type-var]
    with pytest.raises(CollectiveError, match="multiple of 16"):
        channel.launch(call_of(2, 512), SENTINEL, replace(operands, mix=shifted), None, NotedStream())
    assert channel._launch.__self__.launches == []
    without = fake_channel(layout=replace(full, parts=None))
    assert not any(name.startswith("streams") for name in without.kernels)
    with pytest.raises(CollectiveError, match="no lane parts"):
        without.launch(call_of(2, 512), SENTINEL, operands, None, NotedStream())
