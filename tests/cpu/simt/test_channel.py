"""What the driver packs, refuses, reads and resets: over host memory, without a kernel."""

from __future__ import annotations

import ctypes
import struct
import tracemalloc
from dataclasses import dataclass, replace

import pytest
import torch

from halma.backends.simt.geometry import most_blocks
from halma.backends.simt.sources import UNITS
from halma.hal.collectives import control
from halma.hal.collectives.contract import Algorithm, Box, Call, Choice, Fault, Kind, Operands, Wire
from halma.hal.collectives.remembered import MOST
from halma.hal.errors import CapabilityError, CollectiveError
from tests.cpu.simt.fake_device import RESIDENT, Launch, NotedStream, fake_backend, fake_channel

WORDS = Choice(Algorithm.ONE_SHOT, Wire.WORDS)
SENTINEL = Choice(Algorithm.ONE_SHOT, Wire.SENTINEL)
CHUNKS = Choice(Algorithm.ONE_SHOT, Wire.CHUNKS)
TWO_SHOT = Choice(Algorithm.TWO_SHOT, Wire.CHUNKS)
STAGED = Choice(Algorithm.STAGED, Wire.FLAGS)


def launched(channel, call: Call, choice: Choice, *, box: Box | None = None, **more) -> list[Launch]:
    """The launches of one call over tensors of its size."""
    before = len(channel_kernels(channel).launches)
    count = max(call.nbytes, 16)
    operands = more.pop("operands", None) or Operands(aligned(count), aligned(count * channel.site.size), **more)
    channel.launch(call, choice, operands, box, NotedStream())
    return channel_kernels(channel).launches[before:]


def channel_kernels(channel):
    return channel._launch.__self__


def aligned(nbytes: int) -> torch.Tensor:
    """Bytes that start at a multiple of 16, as device memory does."""
    memory = torch.zeros(nbytes + 16, dtype=torch.uint8)
    shift = -memory.data_ptr() % 16
    return memory[shift : shift + nbytes]


@pytest.mark.invariant("C18")
def test_every_kernel_is_loaded_at_construction() -> None:
    backend = fake_backend()
    channel = fake_channel(backend=backend)
    units = [unit for unit in UNITS.values() if unit.channel]
    assert sorted(backend.kernels.loaded) == sorted(entry for unit in units for entry in unit.entries)
    assert backend.kernels.launches == [] and set(channel.kernels) == set(backend.kernels.loaded)


@pytest.mark.invariant("C18")
def test_a_layout_without_push_lanes_loads_no_push_kernels() -> None:
    full = fake_channel().site.layout
    staged = replace(full, words=None, sentinel=None, scatter=None, gather=None, chunk_flags=None, parts=None)
    channel = fake_channel(layout=staged)
    assert set(channel.kernels) == {*UNITS["staged"].entries, *UNITS["norm_alone"].entries}
    with pytest.raises(CollectiveError, match="no lane words"):
        launched(channel, Call(Kind.ALL_REDUCE, 64, "bfloat16"), WORDS)


def test_the_arguments_of_a_one_shot() -> None:
    channel = fake_channel(4, rank=2)
    call = Call(Kind.ALL_REDUCE, 8192, "bfloat16")
    operands = Operands(aligned(8192), aligned(8192))
    (found,) = launched(channel, call, WORDS, operands=operands)
    site, words = channel.site, channel.site.layout.words
    assert words is not None
    assert found.kernel == "all_reduce_words_one_bfloat16" and found.dependent
    assert (found.grid, found.block) == (8, 128 + 32)
    assert found.args[:4] == tuple(peer.address for peer in site.peers)
    own, table, where, tag, nbytes, source, out, lane, box = found.args[4:]
    assert own == site.own.address and where == own + site.layout.control
    assert table == channel._table.data_ptr() and nbytes == 8192
    assert (source, out) == (operands.source.data_ptr(), operands.out.data_ptr())
    assert (lane, box) == (words.offset, words.box)
    assert tag & 0xFFFFFFFF == call.digest
    assert [tag >> shift & 255 for shift in (32, 40, 48, 56)] == [Kind.ALL_REDUCE, Algorithm.ONE_SHOT, 255, 2]
    (again,) = launched(channel, call, WORDS, operands=operands)
    assert again == found


def test_short_units_and_more_units_than_threads_take_the_general_kernel() -> None:
    channel = fake_channel()
    (short,) = launched(channel, Call(Kind.ALL_REDUCE, 8188, "float32"), WORDS)
    assert short.kernel == "all_reduce_words_float32"
    narrow = replace(SENTINEL, blocks=2, threads=64)
    (many,) = launched(channel, Call(Kind.ALL_REDUCE, 8192, "float16"), narrow)
    assert (many.kernel, many.grid, many.block) == ("all_reduce_sentinel_float16", 2, 96)


def test_kernels_with_barriers_have_a_block_for_the_header() -> None:
    channel = fake_channel()
    (two_shot,) = launched(channel, Call(Kind.ALL_REDUCE, 1 << 20, "bfloat16"), TWO_SHOT)
    shard, length = two_shot.args[-2] & 0xFFFFFFFF, two_shot.args[-2] >> 32
    data_blocks = two_shot.grid - 1
    assert shard == (1 << 20) // 2 // 16 and data_blocks * length * two_shot.args[-1] >= shard
    (staged,) = launched(channel, Call(Kind.ALL_REDUCE, 4096, "bfloat16"), STAGED)
    staging = channel.site.layout.staging
    assert staging is not None
    assert staged.args[-2:] == (staging.at(0, 0), staging.at(1, 0) - staging.at(0, 0))
    (slot,) = launched(channel, Call(Kind.ALL_REDUCE, 4096, "bfloat16"), STAGED, box=Box(4096, 512))
    assert slot.args[-2:] == (4096, 512)


def norm(rows: int, columns: int, *, fp8: bool = False, in_place: bool = False) -> tuple[Call, Operands]:
    def rows_of(dtype: torch.dtype) -> torch.Tensor:
        itemsize = torch.empty(0, dtype=dtype).element_size()
        return aligned(rows * columns * itemsize).view(dtype).view(rows, columns)

    source, residual = rows_of(torch.bfloat16), rows_of(torch.bfloat16)
    out = residual if in_place else rows_of(torch.bfloat16)
    weight = aligned(columns * 2).view(torch.bfloat16)
    norm_out = rows_of(torch.float8_e4m3fn if fp8 else torch.bfloat16)
    scales = aligned(rows * max(columns // 128, 1) * 4).view(torch.float32) if fp8 else None
    call = Call(Kind.ALL_REDUCE_NORM, rows * columns * 2, "bfloat16", detail=f"row {columns}")
    return call, Operands(source, out, residual, weight, norm_out, scales, 1e-6, columns)


def test_a_fused_norm_is_one_kernel_and_another_way_two() -> None:
    channel = fake_channel()
    call, operands = norm(3, 4096)
    (one,) = launched(channel, call, SENTINEL, operands=operands)
    assert (one.kernel, one.grid, one.block) == ("norm_sentinel_bfloat16", 3, 512 + 32)
    assert one.args[-2] == 512 | 3 << 32 and struct.unpack("<f", struct.pack("<I", one.args[-1]))[0] == pytest.approx(
        1e-6
    )
    first, second = launched(channel, call, TWO_SHOT, operands=operands)
    assert (first.kernel, second.kernel) == ("all_reduce_chunks_bfloat16", "norm_alone_bfloat16")
    assert operands.norm_out is not None
    between = operands.norm_out.data_ptr()
    assert first.args[-3] == between and second.args[2 + 3 + 2] == between
    assert second.block == 512
    (wide,) = launched(channel, norm(1, 7168)[0], WORDS, operands=norm(1, 7168)[1])
    assert wide.kernel == "norm_words_wide_bfloat16"


@pytest.mark.invariant("C10")
@pytest.mark.parametrize("way", [WORDS, SENTINEL, TWO_SHOT, STAGED], ids=["words", "sentinel", "two-shot", "staged"])
def test_a_norm_of_no_rows_keeps_its_place_and_launches_no_empty_grid(way: Choice) -> None:
    call, operands = norm(0, 4096)
    found = launched(fake_channel(), call, way, operands=operands)
    assert len(found) == 1 and found[0].grid >= 1


@pytest.mark.invariant("C10", control=True)
def test_a_norm_of_one_row_launches_both_kernels() -> None:
    call, operands = norm(1, 4096)
    assert [one.grid >= 1 for one in launched(fake_channel(), call, TWO_SHOT, operands=operands)] == [True, True]


@pytest.mark.invariant("C16")
@pytest.mark.parametrize("size", (2, 4, 6, 8))
def test_no_grid_is_larger_than_half_of_the_device(size: int) -> None:
    """The norm behind an all-reduce too: it is resident, waiting, while others still spin."""
    channel = fake_channel(size)
    most = most_blocks(size, RESIDENT)
    call, operands = norm(320, 512)
    for choice in (SENTINEL, TWO_SHOT, STAGED):
        assert all(found.grid <= most for found in launched(channel, call, choice, operands=operands))
    for choice in (SENTINEL, TWO_SHOT, STAGED, replace(STAGED, algorithm=Algorithm.STAGED_TWO_SHOT)):
        (found,) = launched(channel, Call(Kind.ALL_REDUCE, 1 << 20, "float32"), choice)
        assert found.grid <= most


def test_refusals_say_why_and_queue_nothing() -> None:
    channel = fake_channel()
    call, operands = norm(2, 256, fp8=True, in_place=True)
    cases = (
        (Call(Kind.ALL_REDUCE, 1 << 21, "bfloat16"), SENTINEL, {}, "do not fit a box"),
        (Call(Kind.ALL_REDUCE, 64, "float64"), WORDS, {}, "float64"),
        (Call(Kind.ALL_GATHER, 64, "int32"), SENTINEL, {}, "may hold the sentinel"),
        (Call(Kind.ALL_REDUCE, 64, "bfloat16"), replace(WORDS, algorithm=Algorithm.TWO_SHOT), {}, "no algorithm"),
        (call, STAGED, {"operands": operands}, "no room"),
        (replace(call, nbytes=24), SENTINEL, {"operands": replace(operands, row_length=12)}, "multiple of 16 bytes"),
    )
    for case, choice, more, said in cases:
        with pytest.raises(CollectiveError, match=said):
            launched(channel, case, choice, **more)
    shifted = Operands(aligned(80)[2:66], aligned(64))
    with pytest.raises(CollectiveError, match="multiple of 16"):
        launched(channel, Call(Kind.ALL_REDUCE, 64, "bfloat16"), WORDS, operands=shifted)
    assert channel_kernels(channel).launches == []
    with pytest.raises(CapabilityError, match="warp_width"):
        from halma.hal.capabilities import UNKNOWN

        fake_channel(backend=fake_backend(warp_width=UNKNOWN))


def test_records_are_read_and_reset() -> None:
    channel = fake_channel(first_epoch=41)
    block = channel._control
    assert channel.epoch() == 41 and channel.error() is None
    where = record_of(channel).address
    assert int(block[control.BOUND : control.BOUND + 8].view(torch.int64)) == 10**9
    channel.set_bound(77)
    assert int(block[control.BOUND : control.BOUND + 8].view(torch.int64)) == 77
    write_fault(channel, Fault.TIMEOUT)
    found = channel.error()
    assert found is not None
    assert (found.fault, found.peer, found.call, found.digest) == (Fault.TIMEOUT, 1, 42, 7)
    assert (found.expected, found.seen, found.algorithm, found.waited_ns) == (42, 40, 1, 123)
    own, layout = channel.site.own.tensor, channel.site.layout
    for lane in layout.lanes.values():
        own[lane.offset : lane.offset + lane.nbytes].fill_(0x3C)
    channel.rearm(0xFFFFFFF0)
    assert record_of(channel).address == where and not block[control.FAULT : control.FAULT_PLACE].any()
    assert channel.error() is None and channel.epoch() == 0xFFFFFFF0
    cells = block[control.EPOCH_CELLS : control.BOUND].view(torch.int32)
    assert (cells == -16).all()
    assert int(block[control.BOUND : control.BOUND + 8].view(torch.int64)) == 77
    for lane in layout.lanes.values():
        assert (own[lane.offset : lane.offset + lane.nbytes] == lane.fill).all()


@pytest.mark.nightly  # 18 s; the communicator's own is a pull request's
def test_ten_thousand_shapes_take_no_more_memory_than_a_thousand() -> None:
    channel = fake_channel()
    operands = Operands(aligned(1 << 16), aligned(1 << 16))
    calls = [Call(Kind.ALL_REDUCE, 16 * count, "bfloat16", descriptor=f"step {count}") for count in range(1, 4097)]

    def grown(of: list[Call]) -> int:
        before = tracemalloc.get_traced_memory()[0]
        for call in of:
            channel.launch(replace(call), WORDS, operands, None, NotedStream())
            channel_kernels(channel).launches.clear()
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        first, later = grown(calls[: 2 * MOST]), grown(calls[2 * MOST :]) + grown(calls) + grown(calls)
    finally:
        tracemalloc.stop()
    assert first > 100 * MOST  # so it would be seen
    assert later < first / 10
    assert len(channel._plans) == MOST


def test_a_call_that_was_forgotten_is_launched_as_before() -> None:
    channel = fake_channel()
    operands = Operands(aligned(8192), aligned(8192))
    call = Call(Kind.ALL_REDUCE, 8192, "bfloat16")
    (before,) = launched(channel, call, WORDS, operands=operands)
    plan = channel._plans[id(call)]
    for count in range(MOST + 1):
        launched(channel, Call(Kind.ALL_REDUCE, 64, "bfloat16", descriptor=f"{count}"), WORDS)
    assert id(call) not in channel._plans
    (after,) = launched(channel, call, WORDS, operands=operands)
    assert after == before and channel._plans[id(call)] is not plan
    (other,) = launched(channel, call, SENTINEL, operands=operands)
    assert other.kernel == "all_reduce_sentinel_one_bfloat16"


@dataclass
class Place:
    """Where device code writes the record's words."""

    address: int
    words: torch.Tensor


def record_of(channel) -> Place:
    """As a kernel finds it: through the control block."""
    block = channel._control
    address = int(block[control.FAULT_PLACE : control.FAULT_PLACE + 8].view(torch.int64))
    memory = (ctypes.c_uint8 * 40).from_address(address)
    return Place(address, torch.frombuffer(memory, dtype=torch.uint8))


def write_fault(channel, fault: Fault) -> None:
    """What device code does: the fault in the control block, the record's words in host memory, the fault word last."""
    record = struct.pack("<8IQ", fault, 1, 42, 7, 42, 40, 1, 0, 123)
    write(channel._control, control.FAULT, record[:4])
    words = record_of(channel).words
    write(words, 4, record[4:])
    assert channel.error() is None  # the fault word is not there yet
    write(words, 0, record[:4])


@pytest.mark.invariant("C7")
def test_a_poll_asks_nothing_of_the_device() -> None:
    channel = fake_channel()
    before = NotedStream.entered
    assert channel.error() is None
    write_fault(channel, Fault.MISMATCH)
    found = channel.error()
    assert found is not None and found.fault is Fault.MISMATCH
    assert NotedStream.entered == before


@pytest.mark.invariant("C7", control=True)
def test_other_reads_do() -> None:
    channel = fake_channel()
    before = NotedStream.entered
    channel.epoch()
    assert NotedStream.entered == before + 1


def write(block: torch.Tensor, at: int, raw: bytes) -> None:
    block[at : at + len(raw)].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


def test_the_flight_recorder_is_read_in_order_and_torn_entries_are_left_out() -> None:
    channel = fake_channel(entries=4)
    recorder = channel.site.recorder
    for call in (5, 6, 7, 8):
        write(recorder, call % 4 * 32, struct.pack("<IIQIIII", call, 10 * call, 1000 + call, 64, 1, 2, 0))
    assert [entry.call for entry in channel.flight()] == [5, 6, 7, 8]
    write(recorder, 2 * 32, struct.pack("<I", 7))  # entry 2 says call 7, whose place is 3
    assert [entry.call for entry in channel.flight()] == [5, 7, 8]
    last = channel.flight()[-1]
    assert (last.digest, last.time_ns, last.nbytes, last.kind, last.algorithm) == (80, 1008, 64, 1, 2)
