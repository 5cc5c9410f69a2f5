"""Kernels in MUSA spelling run on the host, on warps of 128 lanes and of 32, against plain arithmetic: simulated.

A block is fibers, blocks and ranks run side by side; names are defined in host_prelude.h, so nothing is said of a
device."""

# pyright: basic
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.virtual_exchange import VirtualExchange
from benchmarks.virtual_ranks import VirtualRanks, lay_out
from halma.backends.simt import experts
from halma.backends.simt.sources import headers
from halma.hal.backend import KernelSource
from halma.hal.collectives.contract import Call, Choice, Kind, Operands
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.exchange_tuning import Tuning
from halma.hal.dispatch import Ops
from halma.hal.testing.conformance.exchange_setup import identity_sums, item
from halma.hal.workspace import Workspace
from halma.ops import families  # noqa: F401  (the ops have names)
from halma.ops.weight import Weight
from tests.cpu.simt.host_kernels import CLOCK_KHZ, COMPILER, HostKernels, host_backend
from tests.gpu.collectives import lab
from tests.gpu.collectives.streams_lab import Problem

pytestmark = [
    pytest.mark.evidence("simulated"),
    pytest.mark.skipif(COMPILER is None, reason="the stand-in for a device needs g++"),
]
WARPS = (32, 128)
SIZE = 2

# ------------------------------------------------------------------------------------------------ primitives
PROBE = """#define HALMA_USES_PUSH 1
#include "dialect.h"
#define KERNEL extern "C" __global__ void
KERNEL lanes(u64 words, u64 out) {
  barriers_begin();
  u32 t = threadIdx.x, mine = reinterpret_cast<const u32*>(words)[t];
  u32* to = reinterpret_cast<u32*>(out) + 6u * t;
  to[0] = shuffle_xor(mine, HALMA_WARP / 2u);
  to[1] = shuffle_from(mine, mine % HALMA_WARP);
  Alike alike = warp_alike(mine);
  to[2] = alike.all, to[3] = alike.before;
  to[4] = warp_or(mine);
  __shared__ u32 sum;
  if (t == 0u) sum = 0u;
  if (t >= blockDim.x - HALMA_WARP) {  // the spare warp, which awaits the others
    barrier_await(blockDim.x);
    to[5] = sum;
    return;
  }
  barrier_among(blockDim.x - HALMA_WARP);
  add_shared(&sum, mine);
  barrier_among(blockDim.x - HALMA_WARP);
  to[5] = sum;
  barrier_among(blockDim.x - HALMA_WARP);
  barrier_arrive(blockDim.x);
}
KERNEL numbers(u64 words, u64 out, u64 count) {
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
    float value = float_of(reinterpret_cast<const u32*>(words)[i]);
    u32* to = reinterpret_cast<u32*>(out) + 3u * i;
    to[0] = pack_bf16(value, -value), to[1] = pack_f16(value, -value), to[2] = to_e4m3(value);
  }
}
KERNEL halves(u64 out) {
  for (u32 i = threadIdx.x; i < 65536u; i += blockDim.x)
    reinterpret_cast<u32*>(out)[i] = bits_of(f16_to_float(static_cast<u16>(i)));
}
"""


def probe(warp: int) -> tuple[HostKernels, Any]:
    kernels = HostKernels()
    defines = {
        "HALMA_MUSA": "1",
        "HALMA_WARP": f"{warp}u",
        "HALMA_DEPENDENT_LAUNCH": "0",
        "HALMA_STORE_ATOMICITY": "8",
        "HALMA_CLOCK_KHZ": f"{CLOCK_KHZ}ull",
    }
    unit = KernelSource("probe", PROBE, headers(), defines)
    return kernels, kernels.load(unit, ("lanes", "numbers", "halves"))


@pytest.fixture(scope="module", params=WARPS, ids=lambda warp: f"warp{warp}")
def primitives(request: pytest.FixtureRequest) -> tuple[int, HostKernels, Any]:
    return request.param, *probe(request.param)


@pytest.mark.invariant("K1")
def test_lanes_pass_words_whatever_the_warps_width(primitives: tuple[int, HostKernels, Any]) -> None:
    warp, kernels, loaded = primitives
    threads = 3 * warp
    words = torch.randint(0, 40, (threads,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    out = torch.full((threads, 6), -1, dtype=torch.int32)
    kernels.launch(loaded["lanes"], 1, threads, (words.data_ptr(), out.data_ptr()), stream=None)
    for w, lanes in enumerate(words.view(3, warp)):
        other = lanes[torch.arange(warp) ^ warp // 2]
        same = lanes.unsqueeze(0) == lanes.unsqueeze(1)
        everybody = 0
        for word in lanes.tolist():
            everybody |= word
        found = out.view(3, warp, 6)[w]
        assert torch.equal(found[:, 0], other) and torch.equal(found[:, 1], lanes[(lanes % warp).long()])
        assert torch.equal(found[:, 2], same.sum(1).int()) and torch.equal(found[:, 3], same.tril(-1).sum(1).int())
        assert bool((found[:, 4] == everybody).all())
    assert bool((out[:, 5] == words[: 2 * warp].sum()).all()), "barriers among some warps, and for one that awaits them"


@pytest.mark.invariant("K1", control=True)
def test_lanes_of_one_word_are_alike(primitives: tuple[int, HostKernels, Any]) -> None:
    """One warp beside the spare one, whose lanes all differ: nothing to tell apart by a lane's number."""
    warp, kernels, loaded = primitives
    words = torch.arange(2 * warp, dtype=torch.int32)
    out = torch.full((2 * warp, 6), -1, dtype=torch.int32)
    kernels.launch(loaded["lanes"], 1, 2 * warp, (words.data_ptr(), out.data_ptr()), stream=None)
    assert bool((out[:, 2] == 1).all()) and bool((out[:, 3] == 0).all())


@pytest.mark.invariant("K3")
def test_numbers_have_the_bits_of_torchs(primitives: tuple[int, HostKernels, Any]) -> None:
    _, kernels, loaded = primitives
    random = torch.randint(-(1 << 31), 1 << 31, (20_000,), generator=torch.Generator().manual_seed(2)).int()
    edges = torch.tensor([0.0, 448.0, 464.0, 65519.996, 65520.0, 2.0**-24, 2.0**-25, 2.0**-14, 1e-40, float("inf")])
    near = torch.randn(20_000, generator=torch.Generator().manual_seed(3)) * torch.logspace(-9, 6, 20_000)
    values = torch.cat((random.view(torch.float32), edges, -edges, near, torch.tensor([float("nan")])))
    out = torch.zeros((len(values), 3), dtype=torch.int32)
    args = (values.data_ptr(), out.data_ptr(), len(values))
    kernels.launch(loaded["numbers"], 1, 64, args, stream=None)
    real = ~values.isnan()
    for column, dtype in ((0, torch.bfloat16), (1, torch.float16)):
        got = out[:, column].contiguous().view(dtype).view(-1, 2)
        assert torch.equal(got[real][:, 0], values[real].to(dtype)) and torch.equal(
            got[real][:, 1], -values[real].to(dtype)
        )
        assert bool(got[~real].isnan().all())
    e4m3 = out[:, 2].to(torch.uint8)
    largest = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(e4m3[real], largest[real]) and bool((e4m3[~real] == 0x7F).all())


@pytest.mark.invariant("K3", control=True)
def test_fp16_numbers_are_read_as_torch_reads_them(primitives: tuple[int, HostKernels, Any]) -> None:
    _, kernels, loaded = primitives
    halves = torch.zeros(65536, dtype=torch.int32)
    kernels.launch(loaded["halves"], 1, 64, (halves.data_ptr(),), stream=None)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    assert torch.equal(halves.view(torch.float32)[~every.isnan()], every[~every.isnan()])
    assert bool(halves.view(torch.float32)[every.isnan()].isnan().all())


# ----------------------------------------------------------------------------------------------- collectives
def ranks(warp: int, **changed: Any) -> VirtualRanks:
    """``SIZE`` ranks with every lane; two blocks a grid and more, so that blocks of a grid differ."""
    backend = host_backend(warp, 8, together=True, resident_threads=SIZE * 4 * 2048)
    return VirtualRanks(backend, SIZE, largest=1 << 14, dependent=False, **changed)


def staged(warp: int) -> VirtualRanks:
    """Where stores have not been probed there is nothing but this."""
    whole = lay_out(SIZE, 1 << 14)
    none = dict.fromkeys(("words", "sentinel", "scatter", "gather", "chunk_flags", "parts"))
    return VirtualRanks(
        host_backend(warp, 0, together=True, resident_threads=SIZE * 4 * 2048),
        SIZE,
        largest=1 << 14,
        dependent=False,
        layout=replace(whole, **none),
    )


def parts(nbytes: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    count = nbytes // dtype.itemsize
    sources = [torch.randn(count, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(SIZE)]
    return sources, [torch.zeros_like(source) for source in sources]


def check_sums(
    world: VirtualRanks, choices: Sequence[Choice], sizes: Sequence[int], dtypes: Sequence[torch.dtype]
) -> None:
    for choice in choices:
        for dtype in dtypes:
            for nbytes in sizes:
                sources, outs = parts(nbytes, dtype)
                world.launch(lab.all_reduce(nbytes, dtype), choice, lab.operands(sources, outs))
                world.synchronize()
                total = lab.in_rank_order(sources)
                assert all(lab.same_bits(out, total) for out in outs), (lab.name_of(choice), nbytes, dtype)
    assert world.errors() == [None] * SIZE and world.guards_hold()


@pytest.mark.nightly  # 15 s
@pytest.mark.invariant("K1")
def test_staged_sums_on_wide_warps() -> None:
    check_sums(staged(128), (lab.STAGED, lab.STAGED_TWO_SHOT), (6002,), (torch.bfloat16,))


@pytest.mark.invariant("K1")
@pytest.mark.nightly
@pytest.mark.parametrize("warp", WARPS)
def test_collectives_on_both_widths(warp: int) -> None:
    world = ranks(warp)
    every = (torch.bfloat16, torch.float16, torch.float32)
    check_sums(world, lab.REDUCTIONS, (64, 6004, 12_000), every)
    for choice in (lab.ONE_SHOT_WORDS, lab.ONE_SHOT_SENTINEL, lab.ONE_SHOT_CHUNKS, lab.STAGED):
        sources, _ = parts(3002, torch.bfloat16)
        outs = [torch.zeros(SIZE * 1501, dtype=torch.bfloat16) for _ in range(SIZE)]
        world.launch(Call(Kind.ALL_GATHER, 3002, "bfloat16"), choice, lab.operands(sources, outs))
        world.synchronize()
        assert all(torch.equal(out, torch.cat(sources)) for out in outs), lab.name_of(choice)
        sent = [torch.zeros(1501, dtype=torch.bfloat16) for _ in range(SIZE)]
        world.launch(Call(Kind.BROADCAST, 3002, "bfloat16", root=1), choice, lab.operands(sources, sent))
        world.synchronize()
        assert all(torch.equal(out, sources[1]) for out in sent), lab.name_of(choice)
    for rows, columns in ((1, 96), (2, 128), (8, 96), (3, 1024)):
        problem = Problem(SIZE, "cpu", rows, columns, torch.bfloat16)
        world.launch(problem.call, lab.ONE_SHOT_SENTINEL, [problem.operands(rank) for rank in range(SIZE)])
        world.synchronize()
        assert problem.wrong() == [], (rows, columns)
    assert world.errors() == [None] * SIZE and world.guards_hold()


@pytest.mark.invariant("K1")
@pytest.mark.nightly
@pytest.mark.parametrize("warp", WARPS)
def test_fused_norms_on_both_widths(warp: int) -> None:
    world = ranks(warp)
    for choice in (lab.ONE_SHOT_WORDS, lab.ONE_SHOT_SENTINEL, lab.TWO_SHOT, lab.STAGED):
        for rows, columns in ((3, 256), (1, 2048)):
            sources, outs = parts(2 * rows * columns, torch.bfloat16)
            residual, weight = torch.randn(rows * columns).bfloat16(), torch.randn(columns)
            norms = [torch.zeros_like(residual) for _ in range(SIZE)]
            call = Call(Kind.ALL_REDUCE_NORM, 2 * rows * columns, "bfloat16", row_length=columns)
            given = [
                Operands(source, out, residual, weight, norm, eps=1e-6, row_length=columns)
                for source, out, norm in zip(sources, outs, norms, strict=True)
            ]
            world.launch(call, choice, given)
            world.synchronize()
            h = (lab.in_rank_order(sources).float() + residual.float()).bfloat16()
            wide = h.float().view(rows, columns)
            wanted = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * weight
            for out, norm in zip(outs, norms, strict=True):
                assert torch.equal(norm, norms[0])
                torch.testing.assert_close(out.float(), h.float(), rtol=2**-7, atol=1e-6)
                torch.testing.assert_close(norm.float().view(rows, columns), wanted, rtol=2**-6, atol=1e-3)
    assert world.errors() == [None] * SIZE and world.guards_hold()


@pytest.mark.invariant("C7")
@pytest.mark.nightly
def test_a_rank_that_does_not_come_is_on_record() -> None:
    world = ranks(128, bound_ns=200_000_000)
    sources, outs = parts(6004, torch.bfloat16)
    world.launch(lab.all_reduce(6004, torch.bfloat16), lab.ONE_SHOT_WORDS, lab.operands(sources, outs), ranks=(0,))
    world.synchronize()
    assert world.errors()[0] is not None and bool(outs[0].isnan().all())


@pytest.mark.invariant("F12")
@pytest.mark.nightly
@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("payload", ["bf16", "fp8"])
def test_experts_that_do_nothing_give_rows_back(warp: int, payload: str) -> None:
    geometry = Geometry(SIZE, 24, 512, 4, 20, payload, 8)
    backend = host_backend(warp, 8, together=True, resident_threads=SIZE * 4 * 2048)
    world = VirtualExchange(backend, geometry, tuning=Tuning(3, 8, 8), dependent=False)
    for seed, (routing, counts) in enumerate((("random", (5, 24)), ("holes", (23, 1)), ("one", (9, 0)))):
        items = [item(geometry, rank, counts[rank], seed, routing) for rank in range(SIZE)]
        layouts = [world.dispatch(r, one.x, one.ids, one.weights, 24) for r, one in enumerate(items)]
        world.backend.device.synchronize()
        outs = []
        for rank, lay in enumerate(layouts):
            rows, scales, index = world.here(rank).rows, world.here(rank).scales, lay.index.clamp_min(0).long()
            moved = rows.view(torch.uint8)[index] if rows.itemsize == 1 else rows[index]
            given = moved.view(rows.dtype).float()
            if scales is not None:
                given = (given.view(len(index), -1, 128) * scales[index].unsqueeze(-1)).view(given.shape)
            given = given * lay.weights.unsqueeze(1)
            given[lay.index < 0] = float("nan")
            outs.append((given, torch.zeros((len(items[rank].x), geometry.hidden))))
        for rank, (given, out) in enumerate(outs):
            world.combine(rank, given, out, 24)
        world.backend.device.synchronize()
        for rank, (_, out) in enumerate(outs):
            assert torch.equal(out, identity_sums(geometry, items[rank])), (routing, rank)
    assert list(world.errors()) == [None] * SIZE and world.guards_hold()


# --------------------------------------------------------------------------------------------------- experts
def expert_kernels(warp: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    backend = host_backend(warp)
    backend.device.properties = lambda: {"multiprocessors": "3"}
    backend.device.current_stream = lambda: None
    made = experts.ExpertKernels(backend)
    monkeypatch.setitem(experts._kernels, "musa", made)
    return made


@pytest.mark.invariant("K1")
@pytest.mark.parametrize("warp", [pytest.param(32, marks=[pytest.mark.nightly]), 128])
def test_the_experts_layout_is_that_of_the_reference(warp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = expert_kernels(warp, monkeypatch)
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(40, generator=generator)[:6] for _ in range(70)])
    weights = torch.rand((70, 6), generator=generator)
    ids[3] = -1
    wanted = Ops(Workspace()).expert_layout(ids, weights, 4, 30, 8)
    got = tuple(torch.full_like(one, -7) for one in wanted)
    made.layout(ids, weights, 4, 30, 8, got)()
    index, slot_weights, counts, offsets, slots = wanted
    real = index >= 0
    assert torch.equal(got[2], counts) and torch.equal(got[3], offsets) and torch.equal(got[4], slots)
    assert torch.equal(got[0], index) and torch.equal(got[1][real], slot_weights[real])


@pytest.mark.invariant("K4")
@pytest.mark.nightly
@pytest.mark.parametrize("form", ["plain", "fp8_block128", "fp4_block32"])
def test_the_products_of_the_experts_are_near_the_reference(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = expert_kernels(32, monkeypatch)
    width, inner, number = (256, 128, 3) if form == "plain" else (512, 512, 3)
    generator = torch.Generator().manual_seed(5)
    gate_up, down = (weights_of(form, number, *sizes, generator) for sizes in ((2 * inner, width), (width, inner)))
    ids = torch.tensor([[0, 2]] if form == "fp4_block32" else [[0, 2], [2, 1], [2, 0]])  # decoded by hand, it is slow
    x = torch.randn(len(ids), width, generator=generator).bfloat16()
    factors = torch.rand(tuple(ids.shape), generator=generator)
    wanted = (
        Ops(Workspace(), routes={"expert_ffn": "reference"}).expert_ffn(x, ids, factors, gate_up, down, 2.0).clone()
    )
    assert experts._kernels["musa"] is made
    got = torch.full_like(wanted, float("nan"))
    work = experts.ffn_route("musa", None, x, ids, factors, gate_up, down, 2.0, out=got, ws=Workspace())
    work()
    assert float((got - wanted).abs().max()) <= 0.02 * float(wanted.abs().max())


def weights_of(form: str, number: int, rows: int, columns: int, generator: torch.Generator) -> Weight:
    if form == "plain":
        return Weight((torch.randn(number, rows, columns, generator=generator) * columns**-0.5).bfloat16())
    shape = Weight.scale_shape((number, rows, columns), form)
    powers = torch.randint(112, 117, shape, dtype=torch.uint8, generator=generator).view(torch.float8_e8m0fnu)
    if form == "fp4_block32":
        codes = torch.randint(0, 256, (number, rows, columns // 2), dtype=torch.uint8, generator=generator)
        return Weight(codes, powers, form, "fp8")
    codes = torch.randint(0, 254, (number, rows, columns), dtype=torch.uint8, generator=generator)
    return Weight((codes + (codes >= 127)).view(torch.float8_e4m3fn), powers, form, "fp8")
