"""The driver over the kernels, on a device whose launches are only noted: reasons, grids, arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.virtual_exchange import VirtualExchange
from halma.backends.simt.exchange import exchange_blocks, no_exchange
from halma.backends.simt.geometry import MOST_THREADS
from halma.backends.simt.sources import COMBINE_THREADS
from halma.hal.capabilities import Capabilities
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.exchange_limits import COMBINE_UNITS
from halma.hal.collectives.exchange_tuning import Tuning
from halma.hal.errors import CollectiveError
from tests.cpu.simt.fake_device import fake_backend

V4 = Geometry(2, 4096, 4096, 6, 256, "bf16")
H200 = Capabilities(warp_width=32, remote_store_atomicity=16, resident_threads=132 * 2048, dependent_launch=True)


@pytest.mark.parametrize(
    ("geometry", "capabilities", "said"),
    [
        (V4, replace(H200, remote_store_atomicity=4), "stores of 8 bytes"),
        (V4, Capabilities(), "remote_store_atomicity is unknown"),
        (replace(V4, payload="fp64"), H200, "bf16, fp8 and fp32"),
        (replace(V4, hidden=4100), H200, "no multiple of 16 bytes"),
        (replace(V4, hidden=4096 + 64, payload="fp8"), H200, "128 columns in fp8"),
        (V4, replace(H200, resident_threads=2048), "two grids of two blocks"),
    ],
)
def test_what_the_kernels_cannot_do_has_a_reason(geometry: Geometry, capabilities: Capabilities, said: str) -> None:
    assert said in (no_exchange(geometry, capabilities) or "")


@pytest.mark.invariant("C16")
def test_two_grids_fit_the_device() -> None:
    """Blocks of 544 threads: two share a multiprocessor up to four ranks, one has it alone beyond."""
    assert no_exchange(V4, H200) is None
    assert exchange_blocks(2, H200) == exchange_blocks(4, H200) == 132
    assert exchange_blocks(8, H200) == 66


def lab(payload: str = "bf16", tuning: Tuning | None = None, **fields: int) -> VirtualExchange:
    device = fake_backend()
    device.device.synchronize = lambda: None
    shape = {"max_tokens": 64, "hidden": 1024, "top_k": 6, "experts": 256, **fields}
    return VirtualExchange(device, Geometry(2, payload=payload, **shape), tuning=tuning)


def launched(made: VirtualExchange, rank: int, tokens: int, bound: int) -> list[tuple[str, int]]:
    made.backend.kernels.launches.clear()  # type: ignore[attr-defined]
    x, ids = torch.zeros((tokens, 1024), dtype=torch.bfloat16), torch.zeros((tokens, 6), dtype=torch.int64)
    layout = made.dispatch(rank, x, ids, torch.zeros((tokens, 6)), bound)
    parts = torch.zeros((layout.index.shape[0], 1024))
    made.combine(rank, parts, torch.zeros((tokens, 1024)), bound)
    return [(one.kernel, one.grid) for one in made.backend.kernels.launches]  # type: ignore[attr-defined]


@pytest.mark.invariant("C5")
def test_grids_follow_from_the_bound_and_not_from_a_ranks_tokens() -> None:
    """Else a rank could wait for what its peer sends behind something that it waits for itself."""
    made = lab(tuning=Tuning(66))
    whole = launched(made, 0, 64, 64)
    assert [name for name, _ in whole] == ["dispatch_plain", "combine_bfloat16_wide"]
    assert launched(made, 1, 3, 64) == whole == launched(made, 0, 0, 64)
    assert [grid for _, grid in launched(made, 0, 3, 3)] == [3, 1]
    # 64 rows of 128 units: 4 parts each, a warp a part; 384 choices; one block sorts. 8,192 units on the way back.
    assert [grid for _, grid in whole] == [64 * 4 // 16 + 1 + 1, 64 * 128 // 512]


@pytest.mark.invariant("C5")
def test_of_many_rows_several_blocks_sort() -> None:
    """2,048 choices are one block's."""
    driver: Any = lab(tuning=Tuning(132), hidden=4096, max_tokens=8).ranks[0].driver
    sizes = (170, 171, 264, 265, 4096)
    assert [driver._sorters(most) for most in sizes] == [1, 2, 2, 2, 16]
    small: Any = lab(tuning=Tuning(7)).ranks[0].driver
    assert small._sorters(4096) == 1  # a quarter of the grid at most


@pytest.mark.invariant("C5")
def test_of_many_rows_a_thread_of_combine_has_several_units() -> None:
    """Where rows are whole pieces and every warp has two tokens or more; of the bound and agreed numbers alone."""
    made = lab(tuning=Tuning(4, units=2))
    threads = COMBINE_THREADS[2]
    twice = 2 * (4 * threads // 32 // 2)  # a row of 128 units is two pieces of 64
    assert twice <= 64
    assert launched(made, 0, 3, twice)[1] == ("combine_2_bfloat16_wide", 4) == launched(made, 1, 64, twice)[1]
    assert launched(made, 0, 3, twice - 1)[1] == ("combine_bfloat16_wide", 4)
    assert made.backend.kernels.loaded.count("combine_2_bfloat16") == 2  # type: ignore[attr-defined]
    assert "combine_4_bfloat16" not in made.backend.kernels.loaded  # type: ignore[attr-defined]
    odd: Any = lab(tuning=Tuning(4, units=2), hidden=1024 + 8).ranks[0].driver
    assert odd._combine_units(4096) == 1  # 129 units
    few: Any = lab(tuning=Tuning(2, units=4), hidden=1 << 14).ranks[0].driver
    assert few._combine_units(4096) == 1  # 16 pieces for 12 warps: some would be nobody's
    assert lab().tuning.units == 2  # what is computed for two ranks


@pytest.mark.invariant("C16")
def test_threads_of_combine_leave_room_for_a_second_grid() -> None:
    assert set(COMBINE_THREADS) == set(COMBINE_UNITS)
    assert all(threads <= MOST_THREADS and threads % 32 == 0 for threads in COMBINE_THREADS.values())


@pytest.mark.invariant("C5")
def test_a_dispatch_by_a_kept_layout_has_no_blocks_that_sort() -> None:
    made = lab(tuning=Tuning(66))
    made.backend.kernels.launches.clear()  # type: ignore[attr-defined]
    for rank, tokens in enumerate((64, 3)):
        made.dispatch(rank, torch.zeros((tokens, 1024), dtype=torch.bfloat16), None, None, 64)
    first, second = made.backend.kernels.launches  # type: ignore[attr-defined]
    assert (first.kernel, first.grid) == ("dispatch_kept_plain", 64 * 4 // 16) == (second.kernel, second.grid)


def test_kernels_by_payload_and_types() -> None:
    made = lab("fp8")
    assert launched(made, 0, 5, 8)[0][0] == "dispatch_fp8"
    assert made.backend.kernels.loaded.count("dispatch_fp8") == 2  # type: ignore[attr-defined]
    assert made.errors() == [None, None] and made.guards_hold()


def test_memory_off_a_boundary_of_16_bytes_is_refused_before_a_launch() -> None:
    made = lab()
    made.backend.kernels.launches.clear()  # type: ignore[attr-defined]
    x = torch.zeros(2 * 1024 + 1, dtype=torch.bfloat16)[1:].view(2, 1024)
    with pytest.raises(CollectiveError, match="no multiple of 16"):
        made.dispatch(0, x, torch.zeros((2, 6), dtype=torch.int64), torch.zeros((2, 6)), 8)
    assert made.backend.kernels.launches == []  # type: ignore[attr-defined]
