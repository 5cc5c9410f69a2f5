"""The FFN program: every replay equals an eager run of the same item; what is counted, refused and left eager."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from halma.hal.backend import Backend, MemoryInfo
from halma.hal.errors import CaptureError, ModelError, RequestError, StaleInputError
from halma.hal.graph.ladder import doubling
from halma.hal.settings import GraphSwitch
from halma.models.deepseek_v4.ffn.costs import CostTable, Span
from halma.models.deepseek_v4.ffn.items import Item, check_counts, check_hash_tokens
from halma.models.deepseek_v4.ffn.ladder import Bucket, Ladder, item_ladder
from halma.models.deepseek_v4.ffn.program import FfnProgram
from halma.ops.weight import FP4_BLOCK32, FP8_BLOCK128
from tests.cpu.ffn.small import SIZES, layers_of, payload, program_of, wanted
from tests.cpu.ops.checks import same_bits

HALF = dataclasses.replace(SIZES, max_shared=6, every_row_shared=False)
"""Two FFN ranks: half of the rows are this rank's shared ones."""
NONE = dataclasses.replace(SIZES, max_shared=0, every_row_shared=False)


@pytest.fixture
def backend(halma_backend: Backend) -> Backend:
    return halma_backend


def prepared(backend: Backend, *args: Any, measure: bool = False, **options: Any) -> FfnProgram:
    program = program_of(backend, *args, **options)
    program.prepare(measure=measure)
    return program


def bucket_for(program: FfnProgram, rows: int, shared: int) -> Bucket:
    found = program.ladder.pick(rows * program.sizes.top_k, shared)
    assert found is not None
    return found


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("sizes", [SIZES, HALF, NONE], ids=["1", "2", "none"])
def test_every_replay_equals_an_eager_run_and_the_model(backend: Backend, sizes: Any, by_layer: bool) -> None:
    layers = layers_of(sizes, backend)
    program = prepared(backend, sizes, layers=layers, by_layer=by_layer)
    for turn, rows in enumerate((12, 1, 5, 2, 9, 12, 3)):
        shared = min(rows, sizes.max_shared)
        item = Item(turn % sizes.layers, rows, shared, min(turn, rows - shared))
        given = payload(sizes, rows, seed=turn)
        given.put(program)
        eager = program.run_eagerly(item).clone()
        assert same_bits(eager, program.run_eagerly(item, program.ladder.buckets[-1]))
        replayed = program.replay_in(item, bucket_for(program, rows, shared)).clone()
        largest = program.replay_in(item, program.ladder.buckets[-1]).clone()
        assert same_bits(eager, replayed)
        assert same_bits(eager, largest)
        torch.testing.assert_close(eager, wanted(layers[item.layer], given, item), rtol=0, atol=2e-6)


@pytest.mark.parametrize("format", [FP8_BLOCK128, FP4_BLOCK32])
def test_packed_weights_in_one_ladder_for_all_layers(backend: Backend, format: str) -> None:
    sizes = dataclasses.replace(SIZES, hidden=128)
    layers = layers_of(sizes, backend, format=format, inner=128)
    program = prepared(backend, sizes, layers=layers, ladder=Ladder((Bucket(36, 12),), 36, 12, 1.05, ()))
    assert not program.by_layer
    for layer, rows in ((0, 12), (2, 5)):
        given, item = payload(sizes, rows, seed=layer), Item(layer, rows, rows)
        given.put(program)
        eager = program.run_eagerly(item).clone()
        assert same_bits(eager, program.replay_in(item, program.ladder.buckets[-1]))
        torch.testing.assert_close(eager, wanted(layers[layer], given, item), rtol=0, atol=1e-4)


def test_layers_of_different_formats_have_graphs_of_their_own(backend: Backend) -> None:
    sizes = dataclasses.replace(SIZES, hidden=128)
    layers = layers_of(sizes, backend, inner=128)
    layers[1] = layers_of(sizes, backend, inner=128, format=FP8_BLOCK128)[1]
    program = prepared(backend, sizes, layers=layers, ladder=Ladder((Bucket(36, 12),), 36, 12, 1.05, ()))
    assert program.by_layer.startswith("layer 1 has fp8_block128")
    for layer, rows in ((0, 12), (1, 12), (1, 5), (2, 3)):
        given, item = payload(sizes, rows, seed=layer), Item(layer, rows, rows)
        given.put(program)
        eager = program.run_eagerly(item).clone()
        assert same_bits(eager, program.replay_in(item, program.ladder.buckets[-1]))
        torch.testing.assert_close(eager, wanted(layers[layer], given, item), rtol=0, atol=1e-4)


@pytest.mark.invariant("F3")
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -3e38])
def test_rows_behind_the_item_and_stale_ids_change_no_bit(backend: Backend, poison: float) -> None:
    program = prepared(backend, HALF)
    given, item = payload(HALF, 5, seed=1), Item(1, 5, 2, 2)
    given.put(program, poison=0.0)
    clean = program.replay_in(item, program.ladder.buckets[-1]).clone()
    given.put(program, poison=poison)
    assert same_bits(clean, program.replay_in(item, program.ladder.buckets[-1]))
    assert same_bits(clean, program.run_eagerly(item))


@pytest.mark.invariant("F3", control=True)
def test_a_change_of_a_real_row_does_show(backend: Backend) -> None:
    program = prepared(backend, HALF)
    given, item = payload(HALF, 5, seed=1), Item(1, 5, 2, 2)
    given.put(program)
    clean = program.replay_in(item, program.ladder.buckets[-1]).clone()
    program.buffers.rows[4, 0] += 1
    assert not same_bits(clean, program.replay_in(item, program.ladder.buckets[-1]))


@pytest.mark.invariant("F9")
@pytest.mark.invariant("F8")
def test_all_buckets_and_layers_reply_from_one_place_and_the_workspace_does_not_grow(backend: Backend) -> None:
    program = prepared(backend)
    before = program.workspace.report()
    assert before.sealed
    places = set()
    for bucket in program.ladder.buckets:
        rows = bucket.routed // SIZES.top_k
        for layer in range(SIZES.layers):
            payload(SIZES, rows, seed=rows).put(program)
            places.add(program.replay_in(Item(layer, rows, rows), bucket).data_ptr())
            places.add(program.run_eagerly(Item(layer, rows, rows)).data_ptr())
    assert len(places) == 1
    assert program.workspace.report() == before
    assert len(program.session) == len(program.ladder.buckets), "one graph a bucket, not one a layer"


@pytest.mark.invariant("F8")
def test_scratch_is_planned_up_to_the_last_size_of_every_route(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another route takes other scratch: of one that ends between two buckets neither would plan enough."""
    program = program_of(backend, ladder=Ladder((Bucket(6, 2), Bucket(36, 12)), 36, 12, 1.05, ()))
    planned: list[int] = []
    eager = program._eager

    def watched(rows: int, shared: int, layer: int) -> Any:
        planned.append(rows)
        return eager(rows, shared, layer)

    monkeypatch.setattr(program, "_routes_of", lambda rows, layer: ("few" if rows <= 7 else "many",))
    monkeypatch.setattr(program, "_eager", watched)
    program.prepare(measure=False)
    assert {1, 2, 7, 11, 12} <= set(planned)


@pytest.mark.invariant("F8", control=True)
@pytest.mark.invariant("F9", control=True)
def test_graphs_by_layer_are_more_and_still_share_one_place(backend: Backend) -> None:
    program = prepared(backend, by_layer=True, ladder=Ladder((Bucket(6, 2), Bucket(36, 12)), 36, 12, 1.05, ()))
    assert program.by_layer == "asked for"
    assert len(program.session) == 2 * SIZES.layers
    sealed = program.workspace.report()
    payload(SIZES, 2, seed=0).put(program)
    places = {program.replay_in(Item(layer, 2, 2), Bucket(6, 2)).data_ptr() for layer in range(SIZES.layers)}
    assert len(places) == 1
    assert program.workspace.report() == sealed


@pytest.mark.invariant("F7")
def test_warm_ups_see_counts_spread_over_all_experts(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(backend)
    program.buffers.ids.fill_(SIZES.experts - 1)  # as the last item may have left them
    seen: list[torch.Tensor] = []
    dry_run = backend.graphs.dry_run

    def watched(work: Any, workspace: Any) -> None:
        seen.append(program.buffers.ids.clone())
        dry_run(work, workspace)

    monkeypatch.setattr(backend.graphs, "dry_run", watched)
    program.prepare(measure=False)
    largest_first = [bucket.routed for bucket in reversed(program.ladder.buckets)]
    totals: list[int] = []
    for ids in seen:
        counts = torch.stack([(ids == expert).sum() for expert in range(SIZES.experts)])
        totals.append(int(counts.sum()))
        assert int(counts.max() - counts.min()) <= 1
    assert totals[-len(largest_first) :] == largest_first  # behind the eager items
    assert len(totals) > len(largest_first)


@pytest.mark.invariant("F7", control=True)
def test_an_item_whose_rows_all_choose_the_last_experts_is_served_as_it_is(backend: Backend) -> None:
    program, rows = prepared(backend), 4
    last = torch.arange(SIZES.experts - SIZES.top_k, SIZES.experts)
    payload(SIZES, rows, seed=3).put(program)
    program.buffers.ids[:rows].copy_(last)
    item, bucket = Item(0, rows, rows), program.ladder.pick(rows * SIZES.top_k, rows)
    assert bucket is not None
    eager = program.run_eagerly(item, bucket).clone()
    assert torch.equal(program.replay_in(item, bucket), eager) and bool(eager.any())
    assert torch.equal(program.buffers.ids[:rows], last.expand(rows, -1))


@pytest.mark.invariant("F5")
def test_the_measured_cost_decides_and_is_counted(backend: Backend) -> None:
    program = prepared(backend, ladder=Ladder((Bucket(18, 6), Bucket(36, 12)), 36, 12, 1.05, ()))

    def run(rows: int) -> None:
        payload(SIZES, rows, seed=rows).put(program)
        program.run(Item(0, rows, rows))

    def costs(bucket: float, eager: float, worst: float) -> CostTable:
        small = Span(3, 18, {"worst case": (worst, worst), "bucket": (bucket, bucket), "eager": (eager, eager)})
        return CostTable({18: small, 36: Span(21, 36, {"worst case": (worst, worst), "eager": (eager, eager)})})

    counted = program.statistics
    program.costs = costs(2.0, 1.0, 3.0)
    run(5)
    assert (counted.replays, counted.eager_items) == (0, 1)
    assert counted.reasons == {"an eager item was measured to cost less": 1}
    program.costs = costs(1.0, 2.0, 3.0)
    run(5)
    assert (counted.replays, counted.real_rows, counted.charged_rows) == (1, 15, 18)
    assert not program.headerless
    program.costs = costs(1.0, 2.0, 1.0)
    run(5)
    assert (counted.replays, counted.real_rows, counted.charged_rows) == (2, 30, 54)
    assert program.headerless
    assert counted.histogram == {15: 3}


@pytest.mark.invariant("F5")
def test_without_a_measurement_the_gate_decides(backend: Backend) -> None:
    program = prepared(backend, ladder=Ladder((Bucket(18, 6), Bucket(36, 12)), 36, 12, 1.05, ()))
    for rows in (6, 5, 12, 11):
        payload(SIZES, rows, seed=rows).put(program)
        program.run(Item(0, rows, rows))
    assert (program.statistics.replays, program.statistics.eager_items) == (2, 2)
    assert "pads by more than 1.05" in next(iter(program.statistics.reasons))


@pytest.mark.invariant("F5", control=True)
def test_costs_are_measured_for_every_bucket(backend: Backend) -> None:
    program = prepared(backend, ladder=Ladder((Bucket(6, 2), Bucket(36, 12)), 36, 12, 1.05, ()), measure=True)
    assert sorted(program.costs.spans) == [6, 36]
    small, large = program.costs.spans[6], program.costs.spans[36]
    assert set(small.cost) == {"bucket", "eager", "worst case"}
    assert set(large.cost) == {"eager", "worst case"}
    assert (small.low, small.high, large.low, large.high) == (3, 6, 9, 36)
    assert all(seconds > 0 for span in program.costs.spans.values() for ends in span.cost.values() for seconds in ends)


@pytest.mark.invariant("F6")
def test_an_item_without_rows_is_eager_and_one_beyond_the_bound_is_refused(backend: Backend) -> None:
    program = prepared(backend, HALF, ladder=Ladder((Bucket(36, 6),), 36, 6, 1.05, ()))
    assert program.run(Item(0, 0)).shape == (0, 64)
    assert program.statistics.reasons == {"the item is empty": 1}
    for item, why in (
        (Item(0, 13), "13 rows, at most 12"),
        (Item(3, 1), "layer 3 of 3"),
        (Item(-1, 1), "layer -1 of 3"),
        (Item(0, 12, 7), "7 shared of 12 rows, at most 6"),
        (Item(0, 2, 3), "3 shared of 2 rows"),
        (Item(0, 4, 2, 3), "shared rows 3 to 5 of 4"),
        (Item(0, -1), "-1 rows"),
    ):
        with pytest.raises(RequestError, match=why):
            program.run(item)
    assert (program.statistics.replays, program.statistics.eager_items) == (0, 1)
    with pytest.raises(RequestError, match="3 of 4 rows are shared, here all"):
        SIZES.check(Item(0, 4, 3))
    with pytest.raises(RequestError, match="cannot all be shared"):
        dataclasses.replace(HALF, every_row_shared=True)


@pytest.mark.invariant("F2")
def test_counts_and_tokens_that_cannot_be_are_refused() -> None:
    check_counts([3, 0, 2], 3, 2)
    for counts, why in (([3, 0, 4], "sum to 7"), ([1, 1, 0], "sum to 2"), ([5, -1, 0], "the least is -1")):
        with pytest.raises(RequestError, match=why):
            check_counts(counts, 3, 2)
    table = torch.zeros(30, 4, dtype=torch.int64)
    check_hash_tokens([0, 29], table)
    with pytest.raises(RequestError, match="the table has 30 tokens"):
        check_hash_tokens([3, 30, -1], table)


@pytest.mark.invariant("F10")
def test_layers_that_would_cut_into_the_reserve_stay_eager(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = Ladder((Bucket(6, 2), Bucket(36, 12)), 36, 12, 1.05, ())
    program = program_of(backend, by_layer=True, ladder=ladder, reserve=1000, transport=500)
    looks: list[int] = []

    def memory_info() -> MemoryInfo:  # each look finds 100 bytes less
        looks.append(1)
        return MemoryInfo(free=2300 - 100 * len(looks), total=10_000)

    monkeypatch.setattr(backend.device, "memory_info", memory_info)
    program.prepare(measure=False)
    find, name = program.session.find, program.descriptor
    graphs = [[find(name(bucket, layer)) is not None for bucket in ladder.buckets] for layer in (0, 1, 2)]
    assert graphs[0] == [True, True]
    assert graphs[2] == [False, False]
    payload(SIZES, 12, seed=3).put(program)
    program.run(Item(2, 12, 12))
    assert "1,500 bytes are reserved" in next(iter(program.statistics.reasons))
    program.run(Item(0, 12, 12))
    assert (program.statistics.replays, program.statistics.eager_items) == (1, 1)


@pytest.mark.invariant("F10", control=True)
def test_with_memory_enough_every_layer_is_captured(backend: Backend) -> None:
    program = prepared(backend, by_layer=True, ladder=Ladder((Bucket(36, 12),), 36, 12, 1.05, ()))
    assert len(program.session) == SIZES.layers


@pytest.mark.invariant("F10")
def test_a_reserve_larger_than_the_device_is_refused(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    total = backend.device.memory_info().total
    with pytest.raises(CaptureError, match="more than the device has"):
        program_of(backend, reserve=total, transport=1)
    monkeypatch.setenv("HALMA_FFN_GRAPH_RESERVE", "900TiB")
    with pytest.raises(CaptureError, match="lower HALMA_FFN_GRAPH_RESERVE"):
        program_of(backend, reserve=None)
    monkeypatch.setenv("HALMA_FFN_GRAPH_RESERVE", "0")
    program_of(backend, reserve=None)


def test_switched_off_items_run_eagerly_and_say_so(backend: Backend) -> None:
    program = prepared(backend, switch=GraphSwitch(True, frozenset({"ffn"})))
    given = payload(SIZES, 4, seed=0)
    given.put(program)
    found = program.run(Item(0, 4, 4)).clone()
    assert program.statistics.reasons == {"capture of ffn is switched off": 1}
    on = prepared(backend)
    given.put(on)
    assert same_bits(found, on.run(Item(0, 4, 4)))


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.invariant("G17")
def test_any_order_of_capture_takes_the_same_memory(backend: Backend, order: str) -> None:
    program = program_of(backend)
    program.prepare(order=order, measure=False)
    other = prepared(backend)
    assert program.workspace.report() == other.workspace.report()


@pytest.mark.invariant("G13")
def test_rows_behind_the_item_choose_nobody_and_cost_nothing(backend: Backend) -> None:
    program = prepared(backend)
    payload(SIZES, 5, seed=1).put(program, poison=0.0)  # and expert 0 for all rows behind
    program.replay_in(Item(0, 5, 5), program.ladder.buckets[-1])
    assert bool((program.buffers.ids[5:] == -1).all())
    assert int(program.buffers.shared_count) == 5


@pytest.mark.invariant("G12")
def test_a_graph_is_not_replayed_on_the_item_before(backend: Backend) -> None:
    program = prepared(backend)
    payload(SIZES, 12, seed=0).put(program)
    program.replay_in(Item(0, 12, 12), program.ladder.buckets[-1])
    graph = program.session.find(program.descriptor(program.ladder.buckets[-1], 0))
    assert graph is not None
    with torch.no_grad(), pytest.raises(StaleInputError, match="not set since"):
        graph.replay()


def test_layers_or_ladders_that_do_not_fit_are_refused(backend: Backend) -> None:
    with pytest.raises(CaptureError, match="the ladder ends at"):
        program_of(backend, ladder=item_ladder(13, 3, 1, 6))
    with pytest.raises(CaptureError, match="no multiple of 3"):
        program_of(backend, ladder=Ladder((Bucket(7, 12), Bucket(36, 12)), 36, 12, 1.05, ()))
    layers = layers_of(SIZES, backend)
    with pytest.raises(CaptureError, match="2 layers are given"):
        program_of(backend, layers=layers[:2])
    with pytest.raises(ModelError, match="layer 2 has"):
        program_of(backend, layers=[*layers[:2], layers_of(SIZES, backend, inner=16)[0]])


def test_an_item_ladder_counts_rows_times_choices() -> None:
    ladder = item_ladder(2048, 6, 2, 256)
    assert ladder.buckets[-1] == Bucket(12288, 1024)
    assert all(bucket.routed % 6 == 0 for bucket in ladder.buckets)
    cluster = round(2048 * (1 - 0.5**6))
    for rows in range(int(cluster * 0.9) + 1, 2048, 5):
        bucket = ladder.pick(rows * 6, 1024)
        assert bucket is not None
        assert bucket.routed <= rows * 6 * 1.06
    assert {bucket.routed // 6 for bucket in ladder.buckets} >= set(doubling(1, 8))
