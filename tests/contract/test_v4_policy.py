"""The reported policy for DeepSeek-V4 on Moore Threads GPUs: exact guards, the seven MTP steps, and the known numbers.

Shows that the data says what was reported and that guards close. Shows nothing of speed: no such device was used.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halma.backends.musa.v4_policy import (
    DESCRIPTORS,
    DEVICE,
    EXECUTION,
    HEADROOM,
    IDENTITY,
    MOST_EAGER_TOKENS,
    OUTCOMES,
    ROUTES,
    arena_plan,
    prefill_headroom,
)
from halma.backends.simt.row_routes import OPS, register_for
from halma.hal.arena.coverage import check_ladder, coverage
from halma.hal.decisions import decisions
from halma.hal.dispatch import Ops, OpTable, table
from halma.hal.errors import ArenaError
from halma.hal.policy import headroom_for
from halma.hal.workspace import Workspace
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.experts import OWN_EXPERTS
from halma.models.deepseek_v4.identity import device_facts, model_facts, program_facts
from halma.models.deepseek_v4.presets import tiny_v4, v4_flash
from halma.models.deepseek_v4.runner import RunnerOptions
from halma.ops import families as _families  # noqa: F401  (defines the ops)
from halma.ops.weight import FP8_BLOCK128, Weight

pytestmark = pytest.mark.evidence("contract")
MIB = 1 << 20


def flash_base() -> V4Config:
    """V4-Flash-Base: experts in fp8."""
    return replace(v4_flash(), quantised=True, expert_dtype="fp8")


def device(arch: str = "mp_31", processors: str = "56", cannot_capture: str | None = None) -> Any:
    found = {"arch": arch, "multiprocessors": processors}
    graphs = SimpleNamespace(unsupported=lambda: cannot_capture)
    return SimpleNamespace(device=SimpleNamespace(properties=lambda: found), graphs=graphs, headroom=HEADROOM)


SERVED = RunnerOptions(max_requests=64, max_context=4096, chunk=8192, arithmetic="shipping")


def facts_of(
    config: V4Config | None = None,
    backend: Any = None,
    options: RunnerOptions = SERVED,
    ranks: int = 8,
    experts: Any = OWN_EXPERTS,
) -> dict[str, Any]:
    ranked: Any = SimpleNamespace(size=ranks)
    return program_facts(config or flash_base(), backend or device(), options, torch.bfloat16, ranked, experts)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def fp8(n: int, k: int) -> Weight:
    return Weight(
        meta(n, k, dtype=torch.float8_e4m3fn), meta(n // 128, k // 128, dtype=torch.float8_e8m0fnu), FP8_BLOCK128, "fp8"
    )


CALLS = {
    "linear": (meta(1, 4096), fp8(512, 4096)),
    "grouped_linear": (meta(4, 8, 4096), fp8(8 * 1024, 4096)),
    "linear_fp8": (
        meta(4, 256, dtype=torch.float8_e4m3fn),
        meta(4, 2, dtype=torch.float32),
        fp8(4096, 256),
        torch.bfloat16,
    ),
    "swiglu": (meta(1, 4096), 10.0),
    "swiglu_fp8": (meta(4, 512), 10.0),
    "rope": (meta(4, 64, 512), meta(4, 32, 2, dtype=torch.float32), True),
    "rms_norm": (meta(1, 4096), None, 1e-6),
}
"""Calls of a step; the last op has no guarded route."""


def chosen(facts: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Op to the route that is chosen under the policy, and the guarded one's reason."""
    own = OpTable()
    own.ops = {name: replace(spec, routes=[]) for name, spec in table.ops.items()}
    register_for("musa", own.add_route, ROUTES)
    ops = Ops(Workspace(), backend="musa", ops=own, facts=facts)
    found = {name: ops.explain(name, *arguments) for name, arguments in CALLS.items()}
    return {name: (one.chosen, one.candidates[0].reason) for name, one in found.items()}


ON = {name: "simt" if name in OPS else "reference" for name in CALLS}
OFF = dict.fromkeys(CALLS, "reference")


def test_the_model_and_the_device_that_it_is_for_turn_every_guarded_route_on() -> None:
    assert {name: route for name, (route, _) in chosen(facts_of()).items()} == ON


@pytest.mark.parametrize("name", ROUTES.names)
def test_one_field_that_differs_turns_exactly_the_guarded_routes_off_and_is_named(name: str) -> None:
    facts = facts_of()
    other = facts[name] + 1 if isinstance(facts[name], (int, float)) else f"not {facts[name]}"
    found = chosen({**facts, name: other})
    assert {op: route for op, (route, _) in found.items()} == OFF
    assert {reason for op, (_, reason) in found.items() if op in OPS} == {
        f"{name} is {other}, it is for {dict(ROUTES.wanted)[name]}"
    }
    del facts[name]
    assert all(reason.startswith(f"{name} is not known") for op, (_, reason) in chosen(facts).items() if op in OPS)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"expert_dtype": "fp4"}, "model.expert_dtype is fp4"),
        ({"quantised": False}, "model.quantization is none"),
        ({"index_topk": 1024}, "model.index_topk is 1024"),
        ({"n_routed_experts": 384}, "model.experts is 384"),
    ],
)
def test_another_models_configuration_is_refused_by_its_field(change: dict[str, Any], field: str) -> None:
    assert (IDENTITY.refusal(facts_of(replace(flash_base(), **change))) or "").startswith(field)


def test_the_tiny_model_keeps_its_references_and_hears_why() -> None:
    found = chosen({**model_facts(tiny_v4(), torch.bfloat16), **device_facts(device())})
    assert {op: route for op, (route, _) in found.items()} == OFF
    assert {reason for op, (_, reason) in found.items() if op in OPS} == {"model.hidden_size is 256, it is for 4096"}


@pytest.mark.parametrize(
    ("backend", "field"),
    [
        (device("mp_22"), "device.arch is mp_22"),
        (device(processors="64"), "device.multiprocessors is 64, it is for 48 or 56 or 60"),
        (device(processors="unknown"), "device.multiprocessors is not known"),
        (SimpleNamespace(device=SimpleNamespace(properties=dict)), "device.arch is not known"),
    ],
)
def test_another_device_is_refused(backend: Any, field: str) -> None:
    assert (DEVICE.refusal(device_facts(backend)) or "").startswith(field)


# -- how it is run -------------------------------------------------------------------------------------------


@pytest.mark.invariant("B8", control=True)
def test_eight_ranks_with_decode_graphs_and_the_packed_cache_are_what_it_was_calibrated_for() -> None:
    assert EXECUTION.refusal(facts_of()) is None
    assert EXECUTION.refusal(facts_of(options=replace(SERVED, mtp=4, index_format="index_fp8"))) is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"ranks": 1}, "execution.tensor_parallel is 1, it is for 8"),
        ({"ranks": 4}, "execution.tensor_parallel is 4, it is for 8"),
        ({"experts": SimpleNamespace(held=False)}, "execution.experts is of other ranks, it is for own"),
        ({"experts": SimpleNamespace(held=(0, 32))}, "execution.experts is of other ranks, it is for own"),
        ({"options": replace(SERVED, arithmetic="exact")}, "execution.cache is plain, it is for kv_fp8"),
        ({"options": replace(SERVED, graph=False)}, "execution.decode is eager, it is for captured"),
        ({"options": replace(SERVED, eager_roles=frozenset({"decode"}))}, "execution.decode is eager"),
        ({"options": replace(SERVED, mtp=4, eager_roles=frozenset({"verify"}))}, "execution.decode is eager"),
        ({"backend": device(cannot_capture="it has no graphs")}, "execution.decode is eager"),
        ({"options": replace(SERVED, capture_prefill=True)}, "execution.prefill is captured, it is for eager"),
        ({"options": replace(SERVED, strict=True)}, "execution.prefill is captured, it is for eager"),
    ],
)
def test_another_execution_turns_the_guarded_routes_off_by_its_field(change: dict[str, Any], field: str) -> None:
    found = chosen(facts_of(**change))
    assert {op: route for op, (route, _) in found.items()} == OFF
    assert all(reason.startswith(field) for op, (_, reason) in found.items() if op in OPS)


@pytest.mark.invariant("B8")
@pytest.mark.parametrize("name", EXECUTION.names)
def test_a_program_that_does_not_say_how_it_is_run_gets_nothing(name: str) -> None:
    facts = facts_of()
    del facts[name]
    assert {op: route for op, (route, _) in chosen(facts).items()} == OFF
    kept = headroom_for(device(), facts, MOST_EAGER_TOKENS)
    assert [(one.nbytes, one.reason.partition(",")[0]) for one in kept] == [(0, f"{name} is not known")]


# -- the seven steps of MTP ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 8])
def test_both_reported_outcomes_are_plans_of_the_known_size(size: int) -> None:
    assert [(one.num_tokens, one.num_requests) for one in DESCRIPTORS] == [
        (5, 1), (10, 2), (20, 4), (40, 8), (80, 16), (160, 32), (320, 64),
    ]  # fmt: skip
    every, narrow = arena_plan("all", size=size).need(), arena_plan("narrow", size=size).need()
    assert (every.nbytes, narrow.nbytes) == (512 * MIB, 184 * MIB)
    assert every.slots is not None and narrow.slots is not None
    assert (every.slots.count, narrow.slots.count) == (609, 435)
    assert all("reported by MooreThreads/vllm-musa#17" in source for _, source in OUTCOMES.values())


def test_the_widest_two_fall_back_by_name_or_are_an_error() -> None:
    narrow, every = arena_plan("narrow", size=8), arena_plan("all", size=8)
    assert coverage(every, DESCRIPTORS).uncovered == ()
    decisions.clear()
    left = check_ladder(narrow, DESCRIPTORS, "fall back").uncovered
    assert [one.num_tokens for one, _ in left] == [160, 320] and all(reason for _, reason in left)
    assert sorted(one.subject for one, _ in decisions.all("collective")) == sorted(str(one) for one, _ in left)
    with pytest.raises(ArenaError, match="160 tokens"):
        check_ladder(narrow, DESCRIPTORS)


def test_a_smaller_bound_refuses_all_seven() -> None:
    assert "bytes needed" in arena_plan("all", size=8, limit=512 * MIB - 1).reason
    assert arena_plan("narrow", size=8, limit=184 * MIB).reason == ""


def test_the_headroom_of_a_sparse_prefill_is_the_reported_one() -> None:
    assert prefill_headroom(MOST_EAGER_TOKENS) == 537_067_520
    assert prefill_headroom(MOST_EAGER_TOKENS, arena_bytes=512 * MIB) == 1_073_938_432


@pytest.mark.parametrize("name", ROUTES.names)
def test_one_field_that_differs_keeps_nothing_free_and_is_named(name: str) -> None:
    facts = facts_of()
    (kept,) = headroom_for(device(), facts, MOST_EAGER_TOKENS)
    assert (kept.name, kept.nbytes) == ("sparse prefill", 537_067_520) and "reported by vllm-musa" in kept.reason
    assert kept.decision().chosen == "kept free" and kept.decision().reason == kept.reason
    (none,) = headroom_for(device(), {**facts, name: None}, MOST_EAGER_TOKENS)
    assert none.nbytes == 0 and none.reason.startswith(f"{name} is None, it is for ")
    assert none.decision().chosen == "nothing" and none.decision().reason == none.reason


def test_the_backend_says_what_it_wants_free() -> None:
    from halma.backends.musa.backend import MusaBackend

    assert MusaBackend.headroom is HEADROOM
