"""All-reduce into mixed residual streams: who may, who refuses and how that shows, and what its tensors must be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halma.hal.arena.plan import plan_channels
from halma.hal.capabilities import UNKNOWN, Capabilities
from halma.hal.collectives.choice import ORDER, choose
from halma.hal.collectives.contract import (
    WORLD_SIZES,
    Algorithm,
    Call,
    Choice,
    ErrorRecord,
    Fault,
    Kind,
    Refusal,
    StreamMix,
    Wire,
)
from halma.hal.collectives.deciding import PARTS, Deciding
from halma.hal.collectives.mix_operands import stream_call, stream_operands
from halma.hal.collectives.mixing import PART_BYTES, blocks_of
from halma.hal.collectives.report import Answers, channel_fault
from halma.hal.decisions import decisions
from halma.hal.errors import CollectiveError
from halma.hal.testing.ranks import RankPools
from tests.cpu.collectives import programs

V4_FLASH = 320 * 4096 * 2
H200 = 132 * 2048
BF16, F32 = torch.bfloat16, torch.float32


def layout(size: int, lanes: str = "push", largest: int = V4_FLASH) -> Any:
    return plan_channels(largest=largest, size=size, atomicity=8, lanes=lanes).layout("main")


LAYOUTS = {size: layout(size) for size in WORLD_SIZES}


def chosen(call: Call, size: int = 2, where: Any = None, **more: Any) -> Choice | Refusal:
    given: dict[str, Any] = {"threads_there": H200, "mixing": True, **more}
    return choose(call, LAYOUTS[size] if where is None else where, size, given.pop("atomicity", 8), **given)


@pytest.mark.invariant("C5")
@given(
    rows=st.integers(0, 12), columns=st.integers(1, 9000), dtype=st.sampled_from([BF16, torch.float16, F32]),
    size=st.sampled_from(WORLD_SIZES), threads=st.sampled_from([None, 2048, 40960, H200]), mixing=st.booleans(),
)  # fmt: skip
def test_streams_are_mixed_within_declared_ranges_alone(rows, columns, dtype, size, threads, mixing) -> None:
    call = stream_call(rows, columns, dtype)
    choice = chosen(call, size, threads_there=threads, mixing=mixing)
    assert choice == chosen(replace(call, descriptor="another"), size, threads_there=threads, mixing=mixing)
    if isinstance(choice, Refusal):
        assert choice.why
        return
    assert (choice.algorithm, choice.wire) == (Algorithm.ONE_SHOT, Wire.SENTINEL)
    assert mixing and dtype is not F32 and 1 <= rows <= 8 and columns % 32 == 0
    assert columns <= 64 * 16 * max(1, (threads or 1) // 4096)


@pytest.mark.invariant("C5", control=True)
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_the_published_widths_are_mixed_at_every_world_size(size: int) -> None:
    for columns in (4096, 7168):
        for rows in range(1, 9):
            assert isinstance(chosen(stream_call(rows, columns, BF16), size), Choice)


@pytest.mark.parametrize(
    ("call", "more", "why"),
    [
        (stream_call(1, 4096, BF16), {"mixing": False}, "capability stream_mixing"),
        (stream_call(9, 4096, BF16), {}, "9 rows: 1 to 8 are mixed in one call"),
        (stream_call(0, 4096, BF16), {}, "0 rows"),
        (stream_call(1, 4080, BF16), {}, "multiple of 32"),
        (stream_call(1, 4096, F32), {}, "float32 streams are not mixed"),
        (stream_call(1, 4096, BF16), {"threads_there": 4096}, "1 blocks, of which two calls' fit the device together"),
        (stream_call(1, 4096, BF16), {"threads_there": H200, "channels": 40}, "fit the device together"),
        (stream_call(1, 4096, BF16), {"atomicity": UNKNOWN}, "seen whole"),
        (stream_call(1, 4096, BF16), {"where": layout(2, "staged")}, "has no lane for what blocks tell each other"),
        (replace(stream_call(1, 4096, BF16), row_length=0), {}, "rows of 0"),
    ],
)
def test_every_refusal_says_why(call: Call, more: dict[str, Any], why: str) -> None:
    found = chosen(call, 2, more.pop("where", None), **more)
    assert isinstance(found, Refusal) and why in found.why


def test_every_other_way_is_refused_for_the_same_reason() -> None:
    found = chosen(stream_call(1, 4096, BF16), atomicity=2)
    assert isinstance(found, Refusal)
    assert found.why.count("streams are mixed by one_shot/sentinel alone") == len(ORDER) - 1


@pytest.mark.invariant("A1")
def test_the_exchange_has_room_in_every_plan_that_pushes() -> None:
    for size in WORLD_SIZES:
        plan = plan_channels(largest=V4_FLASH, size=size, atomicity=8)
        parts = plan.layout("main").parts
        assert not plan.reason and plan.nbytes <= 32 << 20
        assert parts is not None and parts.nbytes == parts.largest == PART_BYTES == 8 * 34 * 64 * 8
    assert blocks_of(4096, 132) == 64 and blocks_of(4096, 60) == 32 and blocks_of(32, 132) == 1


def test_a_refusal_is_a_decision_and_strict_mode_allows_it() -> None:
    """It is not the vendor's call: its caller makes it of calls that are decided each by itself."""
    here = Capabilities(remote_store_atomicity=8, resident_threads=H200, stream_mixing=UNKNOWN)
    terms: dict[str, Any] = {"channels": 1, "table": (), "strict": True, "why_vendor": ""}
    call = stream_call(8, 4096, BF16)
    found = Deciding("main", 2, LAYOUTS[2], here, **terms).choice(call)
    assert isinstance(found, Refusal) and "stream_mixing" in found.why
    last = [one for one, _ in decisions.all("collective") if one.subject == call.describe()][-1]
    assert last.chosen == PARTS
    able = Deciding("main", 2, LAYOUTS[2], replace(here, stream_mixing=True), **terms)
    assert isinstance(able.choice(call), Choice)
    detailed = replace(call, detail="rows of 4096, eps 1e-06")  # asked before, made after: one decision
    assert able.choice(detailed) is able.choice(call)


def test_a_channel_of_the_cpu_says_no_and_a_call_all_the_same_is_refused(halma_rank_pools: RankPools) -> None:
    for why, refused, flights in halma_rank_pools[2].run(programs.streams_refused):
        assert "capability stream_mixing" in why and "no channel can do this call as a whole" in refused
        assert why in refused and flights == 0


# -- tensors ------------------------------------------------------------------------------------------------


def tensors(rows: int = 2, columns: int = 64, dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    return {
        "x": torch.zeros(rows, columns, dtype=dtype),
        "out": torch.zeros(rows, columns, dtype=dtype),
        "weight": torch.zeros(columns),
        "streams": torch.zeros(rows, 4, columns, dtype=dtype),
        "mixes": torch.zeros(rows, 20),
        "base": torch.zeros(24),
        "scale": torch.zeros(3),
        "fn": torch.zeros(24, 4 * columns),
        "next_base": torch.zeros(24),
        "next_scale": torch.zeros(3),
    }


def operands_of(eps: Any = 1e-6, hc_eps: Any = 1e-6, iterations: Any = 20, **changed: torch.Tensor) -> Any:
    made = {**tensors(), **changed}
    x, out, weight = (made.pop(name) for name in ("x", "out", "weight"))
    return stream_operands(x, StreamMix(**made, hc_eps=hc_eps, iterations=iterations), weight, eps, out, x.device)


def test_tensors_that_fit_are_taken_in_place() -> None:
    operands, detail = operands_of()
    assert operands.mix is not None and operands.out is operands.mix.streams and operands.row_length == 64
    assert detail == "rows of 64, eps 1e-06, mixed with eps 1e-06, 20 rounds, weight float32"
    narrow, other = operands_of(weight=torch.zeros(64, dtype=BF16))
    assert narrow.weight is not None and other.endswith("weight bfloat16")


SHARED = tensors()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"x": torch.zeros(2, 1, 64, dtype=BF16)}, r"rows \[M, D\]"),
        ({"streams": torch.zeros(2, 3, 64, dtype=BF16)}, "cannot take streams"),
        ({"streams": torch.zeros(2, 4, 64)}, "cannot take streams"),
        ({"mixes": torch.zeros(2, 24)}, "cannot take mixes"),
        ({"fn": torch.zeros(24, 64)}, "cannot take fn"),
        ({"next_scale": torch.zeros(1)}, "cannot take next_scale"),
        ({"base": torch.zeros(24, dtype=torch.float64)}, "cannot take base"),
        ({"weight": torch.zeros(64, dtype=torch.float16)}, "cannot take weight"),
        ({"fn": torch.zeros(256, 24).t()}, "not contiguous"),
        ({"x": SHARED["x"], "out": SHARED["x"]}, "x and out that share memory"),
        ({"mixes": torch.zeros(2, 20, requires_grad=True)}, "requires a gradient"),
        ({"eps": -1.0}, "cannot take eps"),
        ({"hc_eps": 0.0}, "cannot mix with these"),
        ({"hc_eps": float("nan")}, "cannot mix with these"),
        ({"iterations": 0}, "cannot mix with these"),
        ({"iterations": True}, "cannot mix with these"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(CollectiveError, match=says):
        operands_of(**changed)


def test_a_weight_in_memory_that_is_written_is_refused() -> None:
    memory = torch.zeros(2 * 20 + 24)
    with pytest.raises(CollectiveError, match="mixes and base that share memory"):
        operands_of(mixes=memory[:40].view(2, 20), base=memory[30:54])
    operands_of(mixes=memory[:40].view(2, 20), base=memory[40:])


@pytest.mark.invariant("C7")
@pytest.mark.parametrize(("peer", "says"), [(0, "a block of rank 0 (zero)'s own call"), (1, "rank 1 (one) did not do")])
def test_a_report_tells_a_block_of_this_rank_from_a_peer(peer: int, says: str) -> None:
    record = ErrorRecord(Fault.TIMEOUT, peer, 7, 1, 7, 5, 1, 10**9)
    error = channel_fault("main", 0, ("zero", "one"), record, Answers(2, {}), {1: "all_reduce_streams"})
    assert says in str(error) and ("all must fit" in str(error)) == (peer == 0)


def test_the_kind_has_its_number_for_good() -> None:
    assert [int(kind) for kind in Kind] == [1, 2, 3, 4, 5, 6] and Kind.ALL_REDUCE_STREAMS == 6
    assert replace(stream_call(1, 64, BF16), row_length=0).digest == stream_call(1, 64, BF16).digest
    assert Call(Kind.ALL_REDUCE, 8192, "bfloat16").digest == 0xA78AFA02
