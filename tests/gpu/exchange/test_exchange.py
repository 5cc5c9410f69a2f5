"""Dispatch and combine kernels, ranks as streams of one GPU: slots, sums, graphs, faults, the wrap.

What two GPUs add, the link and its order, is looked at by the conformance suite's own tests of exchanges on rank
processes, and by ``python -m benchmarks.exchange``.
"""

from __future__ import annotations

import random

import pytest
import torch

from halma.hal.backend import Backend
from halma.hal.collectives.contract import Fault
from halma.hal.collectives.control import EPOCH_LAST, next_epoch
from halma.hal.collectives.exchange_contract import Stage
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.exchange_tuning import Tuning
from halma.hal.testing.conformance.exchange_programs import RAGGED, ROUTINGS
from halma.hal.testing.conformance.exchange_setup import Item, identity_sums, item
from tests.gpu.exchange.lab import MILLISECOND, Lab

SMALL = {"max_tokens": 24, "hidden": 512, "top_k": 4, "experts": 20}
WIDE = {"max_tokens": 300, "hidden": 4096, "top_k": 6, "experts": 256}


def geometry(size: int, payload: str, alignment: int = 1, **fields: int) -> Geometry:
    return Geometry(size, payload=payload, alignment=alignment, **{**SMALL, **fields})


def items(shape: Geometry, tokens: tuple[int, ...], seed: int, routing: str = "random") -> list[Item]:
    return [item(shape, rank, tokens[rank % len(tokens)], seed, routing) for rank in range(shape.ranks)]


def end(lab: Lab) -> None:
    lab.synchronize()
    assert lab.errors() == [None] * lab.geometry.ranks and lab.guards_hold()
    back = lab.geometry.places.back
    for region in lab.regions:  # whoever reads a word empties it
        assert bool((region.tensor[back.offset : back.offset + back.nbytes] == 0xFF).all())


@pytest.mark.invariant("F2")
@pytest.mark.invariant("F3")
@pytest.mark.invariant("F4")
@pytest.mark.invariant("F12")
@pytest.mark.parametrize(("payload", "alignment"), [("bf16", 1), ("fp8", 16), ("fp32", 128)])
def test_slots_and_sums(gpu: Backend, size: int, payload: str, alignment: int) -> None:
    lab = Lab(gpu, geometry(size, payload, alignment))
    for seed, routing in enumerate(ROUTINGS):
        for tokens in ((5,), RAGGED, (0,), (0, 3)):
            these = items(lab.geometry, tokens, seed, routing)
            bound = 24 if seed % 2 else max(1, *(len(one.x) for one in these))
            places = lab.places(these, bound)
            for place, one in zip(places, these, strict=True):
                place.put(one)
            for place in places:
                place.dispatch()
            assert lab.wrong_slots(bound, these) == [], (routing, tokens)
            for place in places:
                place.combine()
            assert lab.wrong(places, these) == [], (routing, tokens)
    end(lab)


@pytest.mark.invariant("F2")
@pytest.mark.invariant("F13")
@pytest.mark.invariant("F12")
@pytest.mark.parametrize(("payload", "alignment"), [("bf16", 1), ("fp8", 128)])
@pytest.mark.parametrize(
    "tuning",
    [None, Tuning(3, 1, 1), Tuning(16, 8, 4096), Tuning(7, units=2), Tuning(16, units=4)],
    ids=["rule", "few", "many", "two units", "four units"],
)
def test_the_shapes_of_a_real_model(gpu: Backend, payload: str, alignment: int, tuning: Tuning | None) -> None:
    """Rows in several parts, one sorter and several, choices in several rounds, all ways of combining."""
    lab = Lab(gpu, geometry(2, payload, alignment, **WIDE), tuning=tuning)
    for seed, tokens in enumerate(((300,), (128,), (1,), (300, 7))):
        these, bound = items(lab.geometry, tokens, seed), max(tokens) if seed % 2 else 300
        places = lab.places(these, bound)
        for place, one in zip(places, these, strict=True):
            place.put(one)
        for place in places:
            place.dispatch()
        assert lab.wrong_slots(bound, these) == []
        for place in places:
            place.combine()
        assert lab.wrong(places, these) == []
    end(lab)


@pytest.mark.invariant("F2")
@pytest.mark.invariant("F3")
@pytest.mark.parametrize("payload", ["bf16", "fp8"])
@pytest.mark.parametrize("shape", [SMALL, WIDE], ids=["few", "many"])
def test_another_payload_by_a_kept_layout(gpu: Backend, size: int, payload: str, shape: dict[str, int]) -> None:
    """Rows, slots and sums of a dispatch that sorts nothing, with NaN in every row that nobody sent."""
    if size == 8 and shape is WIDE:
        pytest.skip("300 tokens of 8 ranks on one device")
    lab = Lab(gpu, geometry(size, payload, 8, **shape))
    most = shape["max_tokens"]
    cases = (("random", (most, 3)), ("holes", RAGGED), ("idle", (4,)), ("random", (0, 2)))
    for seed, (routing, tokens) in enumerate(cases):
        these, others = items(lab.geometry, tokens, seed, routing), []
        places = lab.places(these, most)
        for place, one in zip(places, these, strict=True):
            place.put(one)
        for place in places:
            place.step()
        for rank, one in enumerate(these):
            others.append(Item(item(lab.geometry, rank, len(one.x), 50 + seed).x, one.ids, one.weights))
        lab.poison()
        for place, one in zip(places, others, strict=True):
            place.put(one)
        lab.synchronize()
        for place in places:
            place.dispatch_kept()
        assert lab.wrong_slots(most, others) == [], (routing, tokens)
        for place in places:
            place.combine()
        assert lab.wrong(places, others) == [], (routing, tokens)
    end(lab)


@pytest.mark.invariant("F13")
@pytest.mark.parametrize("payload", ["bf16", "fp8"])
def test_replays_with_fresh_routing(gpu: Backend, size: int, payload: str) -> None:
    """Each followed, without a sync, by an eager step with other tokens; the same memory orders on every call."""
    lab = Lab(gpu, geometry(size, payload))
    graphed = lab.places(items(lab.geometry, (6, 0, 3), 0), 24)
    eager = lab.places(items(lab.geometry, RAGGED, 0), 24)
    for places in (graphed, eager):  # first use of every shape
        for place in places:
            place.step()
    lab.synchronize()
    graphs = [one.capture(graphed[one.rank].step) for one in lab.ranks]
    replays = 200 if size == 2 else 30
    for turn in range(replays):
        routing = ROUTINGS[turn % len(ROUTINGS)] if turn % 2 else "random"
        first = items(lab.geometry, (6, 0, 3), turn, routing)
        second = items(lab.geometry, RAGGED, 1000 + turn)
        for one in lab.ranks:
            graphed[one.rank].put(first[one.rank])
            eager[one.rank].put(second[one.rank])
        for one in lab.ranks:
            with one.stream:
                graphs[one.rank].replay()
        for place in eager:
            place.step()
        assert lab.wrong(graphed, first) == [], turn
        assert lab.wrong(eager, second) == [], turn
    end(lab)


@pytest.mark.invariant("F13")
def test_graphs_of_three_sizes_back_to_back(gpu: Backend) -> None:
    """Forty replays are queued before one is waited for; ranks enter late in turn."""
    lab = Lab(gpu, geometry(2, "bf16"))
    order, sizes = random.Random(7), (1, 7, 24)
    these = {tokens: items(lab.geometry, (tokens,), tokens) for tokens in sizes}
    places = {tokens: lab.places(these[tokens], tokens) for tokens in sizes}
    for tokens in sizes:
        for place, one in zip(places[tokens], these[tokens], strict=True):
            place.put(one)
        for place in places[tokens]:
            place.step()
    lab.synchronize()
    graphs = {tokens: [one.capture(places[tokens][one.rank].step) for one in lab.ranks] for tokens in sizes}
    for turn in range(40):
        tokens = order.choice(sizes)
        for one in lab.ranks:
            with one.stream:
                if turn % 5 == one.rank:
                    torch.cuda._sleep(200_000)
                graphs[tokens][one.rank].replay()
    for tokens in sizes:
        assert lab.wrong(places[tokens], these[tokens]) == []
    end(lab)


@pytest.mark.invariant("C2")
def test_epochs_wrap(gpu: Backend) -> None:
    lab = Lab(gpu, geometry(2, "fp8"), first_epoch=EPOCH_LAST - 5)
    epoch = EPOCH_LAST - 5
    for seed in range(6):
        these = items(lab.geometry, (9, 4), seed)
        places = lab.places(these, 24)
        for place, one in zip(places, these, strict=True):
            place.put(one)
        for place in places:
            place.step()
        assert lab.wrong(places, these) == [], seed
        epoch = next_epoch(next_epoch(epoch))
    assert [one.driver.epoch() for one in lab.ranks] == [epoch] * 2
    end(lab)


@pytest.mark.invariant("C2")
def test_old_flags_are_scrubbed(gpu: Backend) -> None:
    """The dispatch of one of two epochs in 2^20 zeroes what it does not use itself."""
    lab = Lab(gpu, geometry(2, "bf16"), first_epoch=(1 << 20) - 3)
    region, places = lab.regions[0].tensor, lab.geometry.places
    for tokens in (24, 2):  # epochs 2^20 - 2 and, with the scrub, 2^20
        these = items(lab.geometry, (tokens,), tokens)
        spots = lab.places(these, 24)
        for place, one in zip(spots, these, strict=True):
            place.put(one)
        for place in spots:
            place.step()
        assert lab.wrong(spots, these) == []
    words = region[places.choices.at(1) :][: places.choices.stride].view(torch.int64) >> 32
    flags = region[places.flags.at(1) :][: places.flags.stride].view(torch.int32)
    assert set(words.unique().tolist()) == {0, 1 << 20} and set(flags.unique().tolist()) <= {0, 1 << 20}
    end(lab)


@pytest.mark.invariant("F16")
@pytest.mark.parametrize("shape", [SMALL, WIDE], ids=["few", "many"])
@pytest.mark.parametrize("where", ["dispatch", "combine"])
def test_a_rank_that_stays_away_is_named(gpu: Backend, where: str, shape: dict[str, int]) -> None:
    """Of many tokens several blocks sort: all of them end, and none hands out a slot."""
    lab = Lab(gpu, geometry(2, "bf16", **shape), bound_ns=50 * MILLISECOND)
    most = shape["max_tokens"]
    these = items(lab.geometry, (most // 6,), 1)
    places = lab.places(these, most)
    for place, one in zip(places, these, strict=True):
        place.put(one)
    for place in places if where == "combine" else places[:1]:
        place.dispatch()
    lab.synchronize()
    places[0].combine()
    lab.synchronize()
    error = lab.errors()[0]
    assert error is not None and error.fault is Fault.TIMEOUT and error.peer == 1
    assert error.algorithm in ((0, Stage.CHOICES, Stage.ROWS) if where == "dispatch" else (0, Stage.BACK))
    assert error.expected == (1 if where == "dispatch" else 2)
    # A token all of whose experts are rank 0's own lacks nothing in a combine; every other one is void.
    lacking = (these[0].ids >= lab.geometry.first(1)).any(1) | (where == "dispatch")
    out, wanted = places[0].out.cpu(), identity_sums(lab.geometry, these[0])
    assert lacking.sum() > 1 and bool(out[lacking].isnan().all())
    assert bool((out.isnan() | (out == wanted)).all())
    if where == "dispatch":
        assert int(lab.ranks[0].layout.total) == 0 and bool((lab.layout(0, most).index == -1).all())
    for one in lab.ranks:
        one.driver.rearm(10)
        one.driver.set_bound(20_000 * MILLISECOND)
    for place in places:
        place.step()
    assert lab.wrong(places, these) == []
    end(lab)


@pytest.mark.invariant("F16", control=True)
def test_nobody_stays_away(gpu: Backend) -> None:
    lab = Lab(gpu, geometry(2, "bf16"), bound_ns=2000 * MILLISECOND)
    these = items(lab.geometry, (4,), 1)
    places = lab.places(these, 24)
    for place, one in zip(places, these, strict=True):
        place.put(one)
    for place in places:
        place.step()
    assert lab.wrong(places, these) == []
    end(lab)


@pytest.mark.invariant("F3")
@pytest.mark.parametrize("payload", ["bf16", "fp8"])
def test_poison_in_rows_that_nobody_sent_changes_no_bit(gpu: Backend, payload: str) -> None:
    lab = Lab(gpu, geometry(2, payload, 8))
    these = items(lab.geometry, (7, 2), 4, "holes")
    places = lab.places(these, 24)
    for byte in (0xFF, 0x7F, 0x7E, 0x00):
        lab.poison(byte)
        for place, one in zip(places, these, strict=True):
            place.put(one)
        for place in places:
            place.step()
        assert lab.wrong(places, these) == [], byte
    end(lab)
