"""All sources in MUSA spelling use nothing but names that public code for Moore Threads GPUs uses, for every declared
architecture (K4); what there is no known spelling for is an error that says so (K2). No code is made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files

import pytest

from halma.backends.simt import row_sources
from halma.backends.simt.expert_sources import BITS, products_source, rows_source
from halma.backends.simt.many_sources import SIZES, many_source
from halma.backends.simt.sources import UNITS, Target, source
from halma.hal.backend import KernelSource
from halma.hal.collectives.contract import WORLD_SIZES
from tests.compile.musa_spelling import ARCHITECTURES, NAMES, musa, read_as_musa

pytestmark = [pytest.mark.torchfree, pytest.mark.evidence("contract")]

SHARED = 192 << 10
"""Bytes of shared memory that a block of an S5000 may ask for (MooreThreads/mate, mqa_logits_metadata_kern.j2)."""


def experts(target: Target) -> Iterator[KernelSource]:
    yield from (products_source(bits, SHARED, target) for bits in sorted(BITS.values()))


SOURCES = {
    **{unit.file: "test_every_unit_is_spelt_with_known_names" for unit in UNITS.values()},
    "expert_rows.cu": "test_so_are_the_small_kernels_of_the_experts",
    "rows.cu": "test_so_are_the_kernels_of_the_reported_policy",
    "experts.cu": "test_so_are_the_products_of_few_rows",
    "experts_fp4.cu": "test_so_are_the_products_of_few_rows",
    "experts_many.cu": "test_what_has_no_spelling_on_an_architecture_is_this_and_nothing_else",
}
"""Every source of the dialect, and the test here that reads it."""


@pytest.mark.invariant("K4")
def test_no_source_is_left_out() -> None:
    there = {path.name for path in files("halma.backends.simt.kernels").iterdir() if path.name.endswith(".cu")}
    assert there == set(SOURCES)
    assert all(callable(globals()[test]) for test in SOURCES.values())


def refused(unit: KernelSource, arch: str, said: str, **more: str) -> None:
    found = read_as_musa(unit, arch, more)
    assert not found.ok and said in found.log, found.log


@pytest.mark.invariant("K4")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_is_spelt_with_known_names(unit: str, arch: str) -> None:
    found = read_as_musa(source(unit, 2, musa(arch)), arch)
    assert found.ok, found.log


@pytest.mark.invariant("K4")
@pytest.mark.nightly
@pytest.mark.parametrize("size", WORLD_SIZES[1:])
@pytest.mark.parametrize("unit", UNITS)
def test_so_is_every_world_size(unit: str, size: int) -> None:
    for arch in ARCHITECTURES:
        found = read_as_musa(source(unit, size, musa(arch)), arch)
        assert found.ok, found.log


@pytest.mark.invariant("K4")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_so_are_the_kernels_of_the_reported_policy(arch: str) -> None:
    found = read_as_musa(row_sources.rows_source(musa(arch)), arch)
    assert found.ok, found.log


@pytest.mark.invariant("K4")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_so_are_the_small_kernels_of_the_experts(arch: str) -> None:
    found = read_as_musa(rows_source(musa(arch)), arch)
    assert found.ok, found.log


@pytest.mark.invariant("K4")
@pytest.mark.parametrize("bits", sorted(BITS.values()))
def test_so_are_the_products_of_few_rows(bits: int) -> None:
    found = read_as_musa(products_source(bits, SHARED, musa("mp_31")), "mp_31")
    assert found.ok, found.log


@pytest.mark.invariant("K2")
def test_what_has_no_spelling_on_an_architecture_is_this_and_nothing_else() -> None:
    """Fragments lie on 32 lanes, and warp groups are one vendor's: routes refuse both with that reason."""
    for unit in experts(musa("mp_22")):
        refused(unit, "mp_22", "fragments of a product lie on warps of another width")
    for arch in ARCHITECTURES:
        refused(many_source(SIZES[0], musa(arch)), arch, "products of warp groups")


@pytest.mark.invariant("K2")
@pytest.mark.parametrize(
    "unit,target,said",
    [
        ("staged", musa(dependent_launch=True), "grid-dependency wait"),
        ("staged", musa(clock_khz=None), "rate of clock64"),
    ],
    ids=["dependent-launch", "clock"],
)
def test_what_is_not_known_of_a_device_is_an_error(unit: str, target: Target, said: str) -> None:
    refused(source(unit, 2, target), "mp_31", said)


@pytest.mark.invariant("K1")
def test_the_warp_of_another_architecture_is_an_error() -> None:
    for arch, width in (("mp_31", 128), ("mp_22", 32)):
        refused(source("staged", 2, musa(arch, warp_width=width)), arch, "not the warp of the architecture")


@pytest.mark.invariant("C19")
def test_a_push_without_a_probe_is_an_error() -> None:
    for name, unit in UNITS.items():
        if unit.push:
            refused(source(name, 2, musa(atomicity=0)), "mp_31", "nobody has probed")


@pytest.mark.invariant("K1", control=True)
@pytest.mark.invariant("C19", control=True)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_units_without_a_push_need_no_probe(arch: str) -> None:
    for name, unit in UNITS.items():
        if not unit.push:
            found = read_as_musa(source(name, 2, musa(arch, atomicity=0)), arch)
            assert found.ok, found.log


@pytest.mark.invariant("K2")
def test_fast_arithmetic_and_fp8_where_there_is_none_are_errors() -> None:
    refused(source("norm_alone", 2, musa("mp_22")), "mp_22", "no conversion to fp8", HALMA_FP8_CONVERSIONS="1")
    refused(source("norm_alone", 2, musa()), "mp_31", "without -ffast-math", __FAST_MATH__="1")


@pytest.mark.invariant("K2", control=True)
def test_fp8_conversions_of_the_device_are_spelt_where_it_has_them() -> None:
    found = read_as_musa(source("norm_alone", 2, musa()), "mp_31", {"HALMA_FP8_CONVERSIONS": "1"})
    assert found.ok, found.log


PLANTED = {
    "assembly": 'asm volatile("fence.acq_rel.sys;" ::: "memory");',
    "assembly spelt otherwise": '__asm__("");',
    "a match": "__match_any_sync(~0u, threadIdx.x);",
    "a reduction": "__reduce_or_sync(~0u, threadIdx.x);",
    "a shuffle without lanes": "__shfl_xor(1, 1);",
    "a ballot": "__ballot_sync(~0u, 1);",
    "the warp's width": "if (warpSize != HALMA_WARP) return;",
    "a cached load": "__ldg((const float*)0);",
    "rounded arithmetic": "__fmaf_rn(1.0f, 1.0f, 1.0f);",
    "an address space": "__cvta_generic_to_shared((void*)0);",
    "a sleep": "__nanosleep(10);",
    "an atomic of another scope": "atomicAdd_system((unsigned*)0, 1u);",
    "a type": "__nv_bfloat16 number;",
    "a header": "\n#include <cuda_bf16.h>\n",
    "an atomic of another type": "atomicExch((unsigned long long*)0, 1ull);",
}


def planted(body: str, arch: str) -> bool:
    """Whether a kernel of the dialect with this in it is read without complaint."""
    unit = source("norm_alone", 2, musa(arch))
    text = f'#define HALMA_USES_PUSH 1\n#include "dialect.h"\nDEVICE void planted() {{ {body} }}\n'
    return read_as_musa(replace(unit, text=text), arch).ok


@pytest.mark.invariant("K4")
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_name_is_found(what: str) -> None:
    assert not planted(PLANTED[what], "mp_31")


@pytest.mark.invariant("K4", control=True)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_planted_function_of_known_names_is_not(arch: str) -> None:
    assert planted("__threadfence_system(); __syncwarp(); atomicExch((u32*)0, 1u);", arch)


@pytest.mark.invariant("K4")
@pytest.mark.parametrize(
    "arch,body",
    [
        ("mp_22", "volatile_load((u32*)0);"),
        ("mp_22", "__shfl_xor_sync(~0u, 1u, 1, 32);"),
        ("mp_22", "\n#include <musa_fp8.h>\n"),
        ("mp_31", "__musa_shfl_xor_sync_i32(1, 1, 127);"),
    ],
)
def test_a_name_of_another_architecture_is_found(arch: str, body: str) -> None:
    other = next(one for one in ARCHITECTURES if one != arch)
    assert not planted(body, arch) and (planted(body, other) or "include" in body)


def test_every_declared_name_has_its_source() -> None:
    """A line that declares something ends in where it is from, or the comment above speaks for its block."""
    sources = r"\[(torch_musa|vllm-musa|mate|tilelang|tutorial)\]"
    for text in (path.read_text(encoding="utf-8") for path in sorted(NAMES.glob("*.h"))):
        said = False
        for line in text.splitlines():
            if not line.strip() or line.startswith(("#if", "#else", "#pragma")):
                said = False if not line.strip() else said
            said = said or bool(re.search(sources, line)) or "// same" in line or "// the same" in line
            if re.match(r"(extern|struct|void|int|unsigned|float|long)\b.*;", line):
                assert said, line
