"""Rules of the dialect that can be checked in its text: no width, no mask, no hole, one table (K1, K2, C13)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halma.backends.simt import memory_order
from halma.backends.simt.expert_sources import products_source, rows_source
from halma.backends.simt.memory_order import CUDA, MUSA, TABLE
from halma.backends.simt.sources import HEADERS, RING_FIELDS, SITE_FIELDS, UNITS, Target, headers, source

pytestmark = pytest.mark.torchfree

ROOT = Path(__file__).parents[3]
CUDA_TARGET = Target("cuda", 32, True, 16)
EXPERTS = (
    products_source(4, 232448, CUDA_TARGET),
    products_source(16, 232448, CUDA_TARGET),
    rows_source(CUDA_TARGET),
)
KERNELS = {
    **headers(),
    **{unit.file: source(name, 2, CUDA_TARGET).text for name, unit in UNITS.items()},
    **{name: text for unit in EXPERTS for name, text in (*unit.headers.items(), (unit.name, unit.text))},
}
SPELT = ("dialect.h", "matrix.h")
"""Where primitives are spelt for each vendor."""


def code(text: str) -> str:
    """Without comments, so that words about a rule do not break it."""
    return re.sub(r"//[^\n]*", "", text)


def hard_coded(text: str) -> list[str]:
    """Warp widths and lane masks written as numbers. A 32 that shifts or packs 64-bit words is no width."""
    text = re.sub(r"(<<|>>)\s*32u?\b", "", code(text))
    found = re.findall(r"\bwarpSize\b|__activemask|__ballot|(?<![\w.])32u?\b|(?<![\w.])0[xX][fF]{8}u?\b", text)
    return found + re.findall(r"__shfl\w*\(\s*(?:~0u|-1)", text)


@pytest.mark.invariant("K1")
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_no_width_and_no_mask_is_written_down(name: str) -> None:
    text = KERNELS[name]
    if name in SPELT:  # the places that say what is not known
        text = text.replace("#if HALMA_WARP > 32", "").replace("#if HALMA_WARP != 32", "")
    assert hard_coded(text) == []


@pytest.mark.invariant("K1", control=True)
def test_the_search_finds_what_it_should() -> None:
    assert hard_coded("lane = threadIdx.x % 32;") == ["32"]
    assert hard_coded("x = __shfl_sync(0xffffffff, x, 0);") == ["0xffffffff"]
    assert hard_coded("x = __shfl_xor_sync(~0u, x, 1);") != [] and hard_coded("if (lane < warpSize)") == ["warpSize"]
    assert hard_coded("u64 both = low | high << 32; // 32 lanes") == []


@pytest.mark.invariant("C13")
def test_the_table_is_the_only_place_that_chooses() -> None:
    """Kernels reach shared memory through the table's names alone; the dialect alone spells primitives."""
    primitives = {order.cuda for order in TABLE}
    for name, text in KERNELS.items():
        if name in SPELT:
            continue
        for primitive in primitives:
            assert not re.search(rf"\b{primitive}\b", code(text)), (name, primitive)
        assert "asm" not in code(text) and "volatile" not in code(text) and "__threadfence" not in code(text), name


@pytest.mark.invariant("C13")
def test_every_use_has_one_row_and_every_row_a_use() -> None:
    used = {use for text in KERNELS.values() for use in re.findall(r"HALMA_ORDER_(\w+)", code(text))}
    rows = [order.use for order in TABLE]
    assert len(set(rows)) == len(rows)
    assert used == set(rows)


@pytest.mark.invariant("C13")
def test_every_row_says_why_and_names_a_test_that_is_there() -> None:
    for order in TABLE:
        assert len(order.why) > 20, order.use
        path, _, test = order.test.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), order


def branches(text: str) -> tuple[set[str], set[str]]:
    """Functions that the CUDA and the MUSA branch of the dialect define."""
    body = text.split("#if defined(HALMA_CUDA)\n", 1)[1]
    cuda, rest = body.split("MUSA\n#else", 1)
    musa = rest.split("same for both vendors", 1)[0]
    names = re.compile(r"^DEVICE [\w:]+ (\w+)\(", re.MULTILINE)
    return set(names.findall(cuda)), set(names.findall(musa))


CUDA_ONLY = {
    "barrier_arrive", "barrier_await", "barrier_among", "settle_address", "load8_now", "load16_now", "native_e4m3",
    "warp_or", "warp_alike", "count_bits", "lowest_bit", "shared_add",
}  # fmt: skip
"""Of push kernels, which do not compile for MUSA; and the conversion that has a portable form beside it."""


@pytest.mark.invariant("K2")
def test_both_spellings_define_the_same_primitives() -> None:
    cuda, musa = branches(KERNELS["dialect.h"])
    assert cuda - musa == CUDA_ONLY
    assert musa - cuda == {"round_bf16"}  # a helper of pack_bf16
    for order in TABLE:
        assert order.cuda in cuda, order
        assert order.musa is None or order.musa in musa, order


@pytest.mark.invariant("K2")
def test_only_the_grid_dependency_may_be_empty_and_only_by_capability() -> None:
    empty = re.findall(r"^DEVICE \w+ (\w+)\([^)]*\) \{\s*\}", KERNELS["dialect.h"], re.MULTILINE)
    assert set(empty) == {"grid_wait", "grid_trigger"}
    assert "#if HALMA_DEPENDENT_LAUNCH" in KERNELS["dialect.h"]


@pytest.mark.invariant("C19")
def test_what_is_not_known_of_musa_is_listed() -> None:
    unknown = {order.use for order in memory_order.unknown(MUSA)}
    assert {"WORD_LOAD", "WORD_STORE", "SENTINEL_LOAD", "CHUNK_LOAD", "HEADER_LOAD"} <= unknown
    assert memory_order.unknown(CUDA) == ()
    staged = code(KERNELS["staged.cu"])
    assert not any(f"HALMA_ORDER_{use}" in staged for use in unknown)


def all_wait(text: str) -> bool:
    """Whether each entry's body calls a function that begins with start() or grid_wait()."""
    waits = set(re.findall(r"DEVICE \w+ (\w+)\([^)]*\) \{[^}]*?(?:start\(|enter\(|grid_wait\()", text))
    bodies = re.findall(r"KERNEL \w+(?:##\w+)?\([^)]*\) \{(.*?)\n?\}", text, re.DOTALL)
    assert bodies
    calls = [*("start(", "enter(", "grid_wait("), *(f"{name}{end}" for name in waits for end in "<(")]
    return all(any(call in body for call in calls) for body in bodies)


@pytest.mark.invariant("C17")
@pytest.mark.parametrize("unit,wait", [("norm_alone", "grid_wait("), ("move", "start("), ("staged", "enter(")])
def test_a_kernel_that_does_not_wait_is_found(unit: str, wait: str) -> None:
    text = code(source(unit, 2, CUDA_TARGET).text)
    assert wait in text and not all_wait(text.replace(wait, "go_on("))


@pytest.mark.invariant("C17", control=True)
@pytest.mark.parametrize("unit", UNITS)
def test_every_kernel_waits_before_anything(unit: str) -> None:
    assert all_wait(code(source(unit, 2, CUDA_TARGET).text))


def test_the_sites_fields_are_those_of_the_header() -> None:
    listed = re.search(r"enum SiteField \{(.*?)SITE_FIELDS", KERNELS["channel.h"], re.DOTALL)
    assert listed is not None
    assert [name.strip().removeprefix("SITE_").lower() for name in listed[1].split(",")][:-1] == list(SITE_FIELDS)


def test_the_rings_fields_are_those_of_the_kernels() -> None:
    listed = re.search(r"enum RingField \{(.*?)RING_FIELDS", code(KERNELS["ring.cu"]), re.DOTALL)
    assert listed is not None
    assert [name.strip().removeprefix("RING_").lower() for name in listed[1].split(",")][:-1] == list(RING_FIELDS)


def test_a_unit_is_self_contained() -> None:
    for name in UNITS:
        unit = source(name, 4, CUDA_TARGET)
        included = {
            found for text in (unit.text, *unit.headers.values()) for found in re.findall(r'#include "(.*)"', text)
        }
        assert included <= set(HEADERS) and "#include <" not in unit.text
        assert unit.defines["HALMA_SIZE"] == "4" and unit.defines["HALMA_CUDA"] == "1"
