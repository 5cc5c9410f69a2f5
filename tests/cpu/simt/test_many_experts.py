"""Where the kernels for many rows an expert keep tokens, how they are cut, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halma.backends.simt import many_experts
from halma.backends.simt.expert_routes import register_for
from halma.backends.simt.many_experts import fits_share
from halma.backends.simt.many_sources import (
    FROM_ROWS,
    SIZES,
    first_eight,
    group_product,
    size_of,
    staged_bytes,
    why_not_sizes,
)
from halma.hal.collectives.expert_rows import slot_capacity
from halma.hal.routes import Call, RouteSpec
from halma.ops.weight import FP4_BLOCK32, FP8_BLOCK128
from tests.cpu.simt.test_experts import weight

SHARED, OWN = 232_448, 4096
"""Bytes of shared memory of a block on Hopper, and what the kernels' own tables take."""


@given(st.lists(st.integers(0, 70), min_size=1, max_size=40), st.sampled_from([1, 4, 8, 16, 128]), st.integers(0, 9))
def test_staged_tokens_of_two_experts_share_no_eight_and_all_fit(
    counts: list[int], alignment: int, skipped: int
) -> None:
    offset, end = 0, 0
    for expert, count in enumerate(counts):
        begin = first_eight(expert, offset)
        assert begin >= end
        end = begin + -(-count // 8)
        offset += -(-count // alignment) * alignment
    slots = slot_capacity(sum(counts) + skipped, len(counts), alignment)
    assert end * 8 * 256 * 2 <= staged_bytes(slots, len(counts), 256)


def test_the_ring_fits_a_block() -> None:
    for size in SIZES:
        assert size.stage_bytes % 1024 == 0 and size.shared_bytes + OWN <= SHARED
        assert size.shared_bytes + size.stage_bytes + OWN > SHARED or size.stages == 8


def test_more_slots_an_expert_make_larger_items() -> None:
    assert [size_of(slots, 128).most for slots in (100, 12288, 24576, 49152)] == [64, 64, 128, 256]


@pytest.mark.parametrize("n", [16, 192, 256])
def test_a_product_names_every_register_once(n: int) -> None:
    text = group_product(n)
    assert f"m64n{n}k16.f32.bf16.bf16" in text
    assert text.count('"+f"') == n // 2
    assert all(text.count(f"%{i}{end}") == 1 for i in range(n // 2 + 4) for end in (",", "}") if f"%{i}{end}" in text)
    assert f"%{n // 2 + 4}, 1, 1, 1, 0;" in text


def test_whole_tiles_of_weight_rows() -> None:
    assert why_not_sizes(4096, 2048) is None
    assert why_not_sizes(4096 + 64, 2048) == "D = 4160 is no multiple of 128"
    assert why_not_sizes(4096, 192) == "I = 192 is no multiple of 128"


class _Device:
    def __init__(self, arch: str) -> None:
        self._arch = arch

    def properties(self) -> dict[str, str]:
        return {"arch": self._arch}


class _Registry:
    def __init__(self, arch: str) -> None:
        self.device = _Device(arch)

    def select(self, name: str) -> _Registry:
        return self


def _refusal(monkeypatch: pytest.MonkeyPatch, format: str = FP4_BLOCK32, arch: str = "sm_90", inner: int = 2048) -> Any:
    monkeypatch.setattr(many_experts, "default_registry", lambda: _Registry(arch))
    arguments = {
        "rows": torch.empty(9, 4096, dtype=torch.bfloat16, device="meta"),
        "slot_weights": torch.empty(9, device="meta"),
        "dtype": None,
        "gate_up": weight(format, 128, 2 * inner, 4096),
        "down": weight(format, 128, 4096, inner),
    }
    return many_experts.fits_many(Call("grouped_ffn", arguments, "cuda"))


def test_a_hopper_device_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _refusal(monkeypatch) is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"arch": "sm_100"}, "the device is sm_100, products of warp groups are sm_90a's own"),
        ({"arch": "sm_80"}, "the device is sm_80"),
        ({"format": FP8_BLOCK128}, "it decodes e2m1"),
        ({"inner": 320}, "I = 320 is no multiple"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], said: str
) -> None:
    assert said in (_refusal(monkeypatch, **asked) or "taken")


def test_from_many_rows_on_it_comes_before_every_other_route(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[RouteSpec] = []
    register_for("cuda", found.append)
    many = {route.name: route.priority for route in found if route.name.startswith("simt_many")}
    assert many.pop("simt_many") > max(route.priority for route in found if route.name != "simt_many")
    assert many == dict.fromkeys(("simt_many_64", "simt_many_128", "simt_many_256"), -1)  # to measure
    share = {"gate_up": torch.empty(4, 1), "index": torch.empty(4 * FROM_ROWS)}
    assert fits_share(Call("grouped_ffn", share, "cuda")) is None
    fewer = {**share, "index": torch.empty(4 * FROM_ROWS - 1)}
    assert "slots an expert at most" in (fits_share(Call("grouped_ffn", fewer, "cuda")) or "taken")
