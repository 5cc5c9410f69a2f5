"""Captures of torch_musa 2.7.1: what its reset() leaves undone, and the ceiling of executables."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from halma.backends.musa import graphs
from halma.backends.musa.graphs import EXECUTABLES, LiveGraphs, MusaRecipe
from halma.hal.errors import CaptureError
from tests.cpu.musa.fakes import fake_torch_musa, use


@pytest.fixture
def musa(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = fake_torch_musa()
    use(monkeypatch, module=module)
    monkeypatch.setattr(graphs, "live_graphs", LiveGraphs(EXECUTABLES))
    return module


def capture(recipe: MusaRecipe, pool: Any) -> Any:
    graph = recipe.new_graph(pool)
    graph.capture_begin(pool=pool.id, capture_error_mode=recipe.mode)
    graph.capture_end()
    return graph


def template(graph: Any) -> Any:
    return SimpleNamespace(graph=graph)


@pytest.mark.invariant("G22")
def test_each_capture_gives_its_share_of_the_pool_back_once(musa: Any) -> None:
    recipe = MusaRecipe(0)
    pool = recipe.new_pool()
    made = [capture(recipe, pool) for _ in range(3)]
    first = pool.id
    assert musa.allocator.uses == {first: 3} and pool.nbytes() == 3 << 20
    for graph in (made[0], made[0], made[1]):  # the second time is nothing
        recipe.retire(template(graph))
    assert musa.allocator.uses == {first: 1} and pool.id == first
    del graph, made
    gc.collect()  # dropped without a word: given back all the same
    assert musa.allocator.uses == {first: 0} and pool.nbytes() == 0
    capture(recipe, pool)  # the allocator refuses a pool that nobody uses any more: it has another name now
    assert pool.id != first


@pytest.mark.invariant("G22", control=True)
def test_torch_musas_own_reset_keeps_the_pool(musa: Any) -> None:
    recipe = MusaRecipe(0)
    pool = recipe.new_pool()
    graph = capture(recipe, pool)
    graph._graph.reset()
    assert musa.allocator.uses == {pool.id: 1}


@pytest.mark.invariant("G22")
def test_what_is_dropped_amid_a_capture_is_destroyed_behind_it(musa: Any) -> None:
    """A garbage collection can come at any time; the driver refuses to destroy an executable amid a capture."""
    recipe = MusaRecipe(0)
    pool = recipe.new_pool()
    old = capture(recipe, pool)
    graph = recipe.new_graph(pool)
    graph.capture_begin(pool=pool.id, capture_error_mode=recipe.mode)
    del old
    gc.collect()
    assert musa.allocator.uses == {pool.id: 2}, "nothing was given back amid the capture"
    graph.capture_end()
    graphs.destroy_dropped()
    assert musa.allocator.uses == {pool.id: 1}
    recipe.retire(template(graph))


@pytest.mark.invariant("G22")
def test_a_capture_is_under_way_until_its_end_has_returned(musa: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may drop a graph while the driver still ends this capture; a failed end is over as well."""
    recipe = MusaRecipe(0)
    pool = recipe.new_pool()
    old = [capture(recipe, pool)]
    graph = recipe.new_graph(pool)
    graph.capture_begin(pool=pool.id, capture_error_mode=recipe.mode)
    seen: list[int] = []

    def end() -> None:
        old.clear()
        gc.collect()
        seen.append(musa.allocator.uses[pool.id])
        raise RuntimeError("the driver ends it badly")

    monkeypatch.setattr(graph._graph, "capture_end", end, raising=False)
    with pytest.raises(RuntimeError, match="badly"):
        graph.capture_end()
    assert seen == [2], "nothing was given back amid the end"
    graphs.destroy_dropped()
    assert musa.allocator.uses == {pool.id: 1}


@pytest.mark.invariant("G21")
def test_captures_beyond_the_drivers_ceiling_are_refused_before_they_begin(
    musa: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "live_graphs", LiveGraphs(5))
    recipe = MusaRecipe(0)
    pool = recipe.new_pool()
    made = [capture(recipe, pool) for _ in range(5)]
    begun = len(musa.calls)
    with pytest.raises(CaptureError, match="no more graphs can be captured"):
        capture(recipe, pool)
    assert len(musa.calls) == begun
    recipe.retire(template(made.pop()))
    made.append(capture(recipe, pool))
    assert graphs.live_graphs.count == 5


@pytest.mark.invariant("G21", control=True)
def test_below_the_ceiling_nothing_is_refused_and_the_count_falls_with_the_graphs(musa: Any) -> None:
    assert 1000 < EXECUTABLES < 2043
    recipe = MusaRecipe(0)
    pool = recipe.new_pool()
    for _ in range(50):
        capture(recipe, pool)
    gc.collect()
    assert graphs.live_graphs.count == 0


def test_a_template_has_one_executable(musa: Any) -> None:
    recipe = MusaRecipe(0)
    made = template(capture(recipe, recipe.new_pool()))
    assert recipe.instantiate(made) is None
    with pytest.raises(CaptureError, match="one executable"):
        recipe.instantiate(made)


def test_after_a_failed_end_the_allocator_records_no_more_and_the_graph_does_not_count(musa: Any) -> None:
    recipe = MusaRecipe(0)
    pool = recipe.new_pool()
    musa.MUSAGraph.fails = True
    graph = recipe.new_graph(pool)
    graph.capture_begin(pool=pool.id, capture_error_mode=recipe.mode)
    with pytest.raises(RuntimeError):
        graph.capture_end()
    assert musa.allocator.recording == {pool.id}
    recipe.stop_recording(graph, pool)
    assert not musa.allocator.recording and graphs.live_graphs.count == 0


def test_what_a_capture_does_is_counted_from_the_recorded_calls(musa: Any) -> None:
    names = ["aten.add.out", "aten.copy_.default", "aten._to_copy.default", "push_words", "aten.copysign.out"]
    watch: Any = SimpleNamespace(nodes=[SimpleNamespace(name=name) for name in names], uses=[object()])
    found = MusaRecipe(0).counts(None, watch)  # pyright: ignore[reportArgumentType]
    assert (found.kernels, found.copies, found.allocations) == (3, 2, 1)
