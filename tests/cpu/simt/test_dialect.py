"""Rules of the dialect that can be checked in its text: no width, no mask, no hole, one table (K1, K2, C13)."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from halma.backends.simt import memory_order
from halma.backends.simt.expert_sources import products_source, rows_source
from halma.backends.simt.memory_order import CUDA, MUSA, TABLE
from halma.backends.simt.row_sources import rows_source as small_rows_source
from halma.backends.simt.sources import HEADERS, RING_FIELDS, SITE_FIELDS, UNITS, Target, headers, source

pytestmark = pytest.mark.torchfree

ROOT = Path(__file__).parents[3]
CUDA_TARGET = Target("cuda", 32, True, 16)
EXPERTS = (
    products_source(4, 232448, CUDA_TARGET),
    products_source(16, 232448, CUDA_TARGET),
    rows_source(CUDA_TARGET),
    small_rows_source(CUDA_TARGET),
)
KERNELS = {
    **headers(),
    **{unit.file: source(name, 2, CUDA_TARGET).text for name, unit in UNITS.items()},
    **{name: text for unit in EXPERTS for name, text in (*unit.headers.items(), (unit.name, unit.text))},
}
SPELT = ("dialect.h", "dialect_musa.h", "matrix.h", "matrix_musa.h")
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
        text = text.replace("(HALMA_WARP > 32)", "").replace("#if HALMA_WARP != 32", "")
    assert hard_coded(text) == []
    if name not in SPELT:
        assert lane_masks(text) == []


def lane_masks(text: str) -> list[str]:
    """Lanes as bits of a word, which a wide warp has not enough of: the dialect counts them instead (``Alike``)."""
    return re.findall(r"<<\s*(?:lane|HALMA_WARP)\b", code(text))


@pytest.mark.invariant("K1", control=True)
def test_the_search_finds_what_it_should() -> None:
    assert hard_coded("lane = threadIdx.x % 32;") == ["32"]
    assert hard_coded("x = __shfl_sync(0xffffffff, x, 0);") == ["0xffffffff"]
    assert hard_coded("x = __shfl_xor_sync(~0u, x, 1);") != [] and hard_coded("if (lane < warpSize)") == ["warpSize"]
    assert hard_coded("u64 both = low | high << 32; // 32 lanes") == []
    assert lane_masks("before = count(alike & ((1u << lane) - 1u));") and lane_masks("mask = (1ull << HALMA_WARP) - 1;")
    assert lane_masks("bool mine = to >> lane & 1u;") == []


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


NAME = re.compile(r"^(?:template <[^>]*> )?DEVICE [\w:<>]+\*? (\w+)\(", re.MULTILINE)


def spellings(cuda: str, musa: str) -> tuple[set[str], set[str]]:
    """Functions that a header defines for CUDA alone, and its MUSA part."""
    body = KERNELS[cuda].split("same for both vendors")[0]
    return set(NAME.findall(body)) - {"bits_of", "float_of"}, set(NAME.findall(KERNELS[musa]))


HELPERS = {
    *("look", "put", "round_bf16", "round_f16"),
    *("load8_fresh", "load16_fresh", "store8_sent", "store16_sent"),  # of the table, where CUDA's are relaxed
    *("barrier_counts", "barriers_begin", "await_count"),
    *("copy", "half_of", "product", "widened_e4m3"),
}


@pytest.mark.invariant("K2")
def test_both_spellings_define_the_same_primitives() -> None:
    cuda, musa = spellings("dialect.h", "dialect_musa.h")
    assert cuda - musa == {"no_fence"}
    assert musa - cuda <= HELPERS
    for order in TABLE:
        assert order.cuda in cuda, order
        assert order.musa is None or order.musa in musa, order
    cuda, musa = spellings("matrix.h", "matrix_musa.h")
    assert cuda - musa == {"shared_address"}  # of warpgroup.h
    assert musa - cuda <= HELPERS


EMPTY = {
    "dialect.h": {"grid_wait", "grid_trigger", "no_fence"},
    "dialect_musa.h": {"grid_wait", "grid_trigger", "settle_address"},
    "matrix_musa.h": {"copies_commit", "copies_await", "prefetch_line"},
}
"""By capability (the grid's dependency), because nothing is left to do (a fence, a copy that is done), or hints."""


def empty_bodies(text: str) -> set[str]:
    return set(re.findall(r"DEVICE \w+ (\w+)\([^)]*\) \{\s*\}", code(text)))


@pytest.mark.invariant("K2")
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_nothing_is_empty_but_what_needs_no_doing(name: str) -> None:
    assert empty_bodies(KERNELS[name]) == EMPTY.get(name, set())


@pytest.mark.invariant("K2", control=True)
def test_an_empty_body_is_found() -> None:
    assert empty_bodies("DEVICE void fence_system() {}  // later") == {"fence_system"}
    assert empty_bodies("DEVICE void fence_system() { __threadfence_system(); }") == set()
    assert "#if HALMA_DEPENDENT_LAUNCH" in KERNELS["dialect.h"]


def empty_branches(text: str) -> list[str]:
    """Conditions whose branch has nothing in it: what a primitive looks like that a vendor lacks and nobody minds."""
    lines = [line.strip() for line in code(text).splitlines() if line.strip()]
    return [
        one
        for one, two in itertools.pairwise(lines)
        if re.match(r"#\s*(if|el)", one) and re.match(r"#\s*(el|endif)", two)
    ]


@pytest.mark.invariant("K2")
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_no_branch_is_empty(name: str) -> None:
    assert empty_branches(KERNELS[name]) == []


@pytest.mark.invariant("K2", control=True)
def test_an_empty_branch_is_found() -> None:
    assert empty_branches("#if A\n#else\nx\n#endif") == ["#if A"]
    assert empty_branches("#if A\nx\n#elif B\n// later\n#endif") == ["#elif B"]


FOREIGN = r"\basm\b|__asm|griddepcontrol|__cvta|__match|__reduce_|__nanosleep|__nv_|\bcu[A-Z]\w+|\bcuda\w*|_sync\(0x"


@pytest.mark.invariant("K2")
@pytest.mark.parametrize("name", sorted(set(KERNELS) - {"dialect.h", "matrix.h"}))
def test_no_word_of_one_vendor_is_outside_its_branch(name: str) -> None:
    """Assembly and intrinsics of CUDA are in dialect.h, matrix.h and warpgroup.h alone."""
    assert re.findall(FOREIGN, code(KERNELS[name])) == []


@pytest.mark.invariant("K2", control=True)
def test_a_word_of_one_vendor_is_found() -> None:
    assert re.findall(FOREIGN, KERNELS["dialect.h"]) and re.findall(FOREIGN, KERNELS["matrix.h"])
    assert re.findall(FOREIGN, "cudaMalloc(") == ["cudaMalloc"]


@pytest.mark.invariant("C19")
def test_every_use_is_spelt_and_polls_pass_the_cache() -> None:
    """On MUSA a word that is awaited is read past the first-level cache, and one that a peer awaits is sent on."""
    assert memory_order.unknown(CUDA) == memory_order.unknown(MUSA) == ()
    musa = memory_order.defines(MUSA)
    for use in ("WORD_LOAD", "SENTINEL_LOAD", "PART_LOAD", "HEADER_LOAD"):
        assert musa[f"HALMA_ORDER_{use}"].endswith("_fresh"), use
    for use in ("WORD_STORE", "SENTINEL_STORE", "PART_STORE", "HEADER_STORE"):
        assert musa[f"HALMA_ORDER_{use}"].endswith("_sent"), use
    assert musa["HALMA_ORDER_BEFORE_PUBLISH"] == musa["HALMA_ORDER_BEFORE_EXCHANGE"] == "fence_system"


def all_wait(text: str) -> bool:
    """Whether each entry's body calls a function that begins with start() or grid_wait()."""
    waits = set(re.findall(r"DEVICE \w+ (\w+)\([^)]*\) \{[^}]*?(?:start\(|enter\(|grid_wait\()", text))
    entry = r"(?:KERNEL \w+(?:##\w+)?|__global__ void __launch_bounds__\(.*\) \w+)\([^)]*\) \{((?s:.*?))\n?\s*\}"
    bodies = re.findall(entry, text)
    assert bodies
    calls = [*("start(", "enter(", "grid_wait("), *(f"{name}{end}" for name in waits for end in "<(")]
    return all(any(call in body for call in calls) for body in bodies)


def entries_of(unit: str) -> str:
    """A unit's code, with that of a header whose macro makes its entries."""
    text = source(unit, 2, CUDA_TARGET).text
    made = [KERNELS[name] for name in re.findall(r'#include "(.*)"', text) if " __global__ " in KERNELS[name]]
    return code("\n".join([text, *(one.replace("\\\n", "\n") for one in made if "#define KERNEL" not in one)]))


@pytest.mark.invariant("C17")
@pytest.mark.parametrize(
    "unit,wait",
    [("norm_alone", "grid_wait("), ("move", "start("), ("staged", "enter("), ("combine_2", "start(")],
)
def test_a_kernel_that_does_not_wait_is_found(unit: str, wait: str) -> None:
    text = entries_of(unit)
    assert wait in text and not all_wait(text.replace(wait, "go_on("))


@pytest.mark.invariant("C17", control=True)
@pytest.mark.parametrize("unit", UNITS)
def test_every_kernel_waits_before_anything(unit: str) -> None:
    assert all_wait(entries_of(unit))


def test_the_sites_fields_are_those_of_the_header() -> None:
    listed = re.search(r"enum SiteField \{(.*?)SITE_FIELDS", KERNELS["channel.h"], re.DOTALL)
    assert listed is not None
    assert [name.strip().removeprefix("SITE_").lower() for name in listed[1].split(",")][:-1] == list(SITE_FIELDS)


def test_the_rings_fields_are_those_of_the_kernels() -> None:
    listed = re.search(r"enum RingField \{(.*?)RING_FIELDS", code(KERNELS["ring.h"]), re.DOTALL)
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
