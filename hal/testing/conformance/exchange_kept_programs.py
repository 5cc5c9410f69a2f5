"""Programs that ranks run: dispatches by kept layouts against dispatches that sort, and what guards them."""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from halma.hal.collectives.contract import Fault
from halma.hal.collectives.exchange import Exchange
from halma.hal.collectives.exchange_kept import KeptLayout
from halma.hal.collectives.report import ChannelFault
from halma.hal.testing.conformance.collective_setup import BRIEF, PATIENT, refusal, same
from halma.hal.testing.conformance.exchange_programs import RAGGED, items_of, step
from halma.hal.testing.conformance.exchange_setup import (
    Experts,
    Item,
    Side,
    exchange_set_up,
    identity_sums,
    wrong_slots,
)

ITEMS: Final = (
    ("random", (5,), None),
    ("holes", RAGGED, None),
    ("last", (0, 3), 3),
    ("idle", (4,), 7),
    ("one", (24,), 24),
)
"""Routing, tokens by rank, bound."""


def _second(first: Item, seed: int) -> Item:
    """Another payload of the same routing."""
    generator = torch.Generator().manual_seed(seed)
    return Item(torch.randn(first.x.shape, generator=generator).to(first.x.dtype), first.ids, first.weights)


def _filled(side: Side, mine: Item, **options: Any) -> KeptLayout:
    """A layout that one eager step has filled."""
    kept = side.exchange.new_layout()
    step(side, mine, keep=kept, **options)
    return kept


def old_against_kept(backend: str, payload: str, alignment: int) -> list[str]:
    """What was wrong: every bit of rows that count, slots and sums, of a kept layout against a dispatch that sorts."""
    found: list[str] = []
    with exchange_set_up(backend, payload=payload, alignment=alignment) as side:
        exchange, me = side.exchange, side.exchange.rank
        for seed, (routing, tokens, bound) in enumerate(ITEMS):
            items = items_of(side, tokens, seed, routing)
            kept = _filled(side, items[me], bound=bound)
            step(side, items_of(side, RAGGED, 77 + seed)[me])  # another routing in between
            others = [_second(one, 1000 * seed + rank) for rank, one in enumerate(items)]
            side.poison()
            handed = exchange.dispatch(others[me].x.to(side.device), layout=kept)
            found += [f"{routing}: {text}" for text in wrong_slots(side, handed, others)]
            sums = side.done(exchange.combine(side.experts(handed), handed))
            side.poison()
            sorted_again = side.done(step(side, others[me], bound=bound))
            if not same(sums, sorted_again) or not same(sums, identity_sums(exchange.geometry, others[me])):
                found.append(f"{routing}: sums")
            kept.free()
    return found


def another_exchange(backend: str) -> list[str]:
    """A layout of one exchange used by another one of the same routing: small rows of another payload."""
    found: list[str] = []
    with exchange_set_up(backend) as side:
        items = items_of(side, (5,), 1)
        kept = _filled(side, items[side.exchange.rank])
        geometry = side.exchange.geometry
        names = ("max_tokens", "top_k", "experts")
        shape: dict[str, Any] = {name: getattr(geometry, name) for name in names}
        other = Exchange.open(side.group, hidden=128, payload="fp32", **shape)
        small = Side(side.backend, side.group, other, Experts(side.backend, other.geometry))
        mine = items[other.rank]
        rows = [Item(one.x[:, :128].float(), one.ids, one.weights) for one in items]
        handed = other.dispatch(rows[other.rank].x.to(side.device).contiguous(), layout=kept)
        found += wrong_slots(small, handed, rows)
        sums = small.done(other.combine(small.experts(handed), handed))
        if not same(sums, identity_sums(other.geometry, rows[other.rank])):
            found.append("sums of the other exchange")
        if not same(side.done(step(side, mine)), identity_sums(geometry, mine)):
            found.append("sums")
        other.close()
    return found


class _Twice:
    """A graph of a step and another one by its layout, or by a stable one alone."""

    def __init__(self, side: Side, mine: Item, stable: KeptLayout | None = None) -> None:
        second = _second(mine, 1)
        self.inputs = [tensor.clone() for tensor in mine.on(side.device)]
        self.other = second.x.to(side.device).clone()
        shape = (mine.x.shape[0], side.exchange.geometry.hidden)
        self.outs = [torch.empty(shape, dtype=mine.weights.dtype, device=side.device) for _ in range(2)]
        kept = side.exchange.new_layout()

        def program(_: Any) -> None:
            if stable is None:
                handed = side.exchange.dispatch(*self.inputs, keep=kept)
                side.exchange.combine(side.experts(handed), handed, out=self.outs[0])
            handed = side.exchange.dispatch(self.other, layout=stable or kept)
            side.exchange.combine(side.experts(handed), handed, out=self.outs[1])

        step(side, mine)
        self.kept, self.graph = kept, side.capture(program)

    def replay(self, mine: Item, other: Item) -> None:
        """Not waited for."""
        for place, tensor in zip(self.inputs, (mine.x, mine.ids, mine.weights), strict=True):
            place.copy_(tensor, non_blocking=True)
        self.other.copy_(other.x, non_blocking=True)
        self.graph.replay()


def replays(backend: str, count: int) -> list[str]:
    """Replays with fresh routing of a graph that sorts once and dispatches twice; then of one by a stable layout."""
    found: list[str] = []
    with exchange_set_up(backend, payload="fp8") as side:
        me, geometry = side.exchange.rank, side.exchange.geometry
        first = items_of(side, (6, 3), 0)[me]
        twice = _Twice(side, first)
        for turn in range(count):
            mine = items_of(side, (6, 3), turn, ("random", "holes", "one")[turn % 3])[me]
            other = _second(mine, 50 + turn)
            twice.replay(mine, other)
            eager = items_of(side, RAGGED, 500 + turn)[me]
            if not same(side.done(step(side, eager)), identity_sums(geometry, eager)):
                found.append(f"eager step {turn}")
            for name, out, one in zip(("sorted", "kept"), twice.outs, (mine, other), strict=True):
                if not same(side.done(out), identity_sums(geometry, one)):
                    found.append(f"replay {turn}, {name}")
        stable = _filled(side, first)
        side.exchange.wait()
        stable.declare_stable()
        alone = _Twice(side, first, stable)
        for turn in range(count):
            step(side, items_of(side, RAGGED, 900 + turn)[me])
            other = _second(first, 90 + turn)
            alone.replay(first, other)
            if not same(side.done(alone.outs[1]), identity_sums(geometry, other)):
                found.append(f"replay {turn} by a stable layout")
    return found


def refusals(backend: str) -> dict[str, str]:
    """What a layout that cannot be used is refused with; a good use behind shows that nothing was sent."""
    found: dict[str, str] = {}
    with exchange_set_up(backend) as side:
        exchange, device, me = side.exchange, side.device, side.exchange.rank
        mine = items_of(side, (4,), 1)[me]
        x, ids, weights = mine.on(device)
        kept, empty, freed = _filled(side, mine), exchange.new_layout(), exchange.new_layout()
        freed.free()
        shape: dict[str, Any] = {"max_tokens": 24, "hidden": 256, "top_k": 3, "experts": 20}
        unlike = Exchange.open(side.group, **shape)
        foreign = unlike.new_layout()
        twice = _Twice(side, mine)
        stable = _filled(side, mine)
        stable.declare_stable()
        alone = _Twice(side, mine, stable)

        def captured(work: Callable[[], Any]) -> str:
            return refusal(lambda: side.capture(lambda _: work()))

        bad: dict[str, Callable[[], str]] = {
            "tokens": lambda: refusal(lambda: exchange.dispatch(x[:3].contiguous(), layout=kept)),
            "empty": lambda: refusal(lambda: exchange.dispatch(x, layout=empty)),
            "freed": lambda: refusal(lambda: exchange.dispatch(x, layout=freed)),
            "fill freed": lambda: refusal(lambda: exchange.dispatch(x, ids, weights, keep=freed)),
            "geometry": lambda: refusal(lambda: exchange.dispatch(x, ids, weights, keep=foreign)),
            "ids": lambda: refusal(lambda: exchange.dispatch(x, ids, weights, layout=kept)),
            "bound": lambda: refusal(lambda: exchange.dispatch(x, layout=kept, bound=24)),
            "host": lambda: refusal(lambda: exchange.dispatch(x, layout=kept, host_counts=True)),
            "keep host": lambda: refusal(lambda: exchange.dispatch(x, ids, weights, keep=empty, host_counts=True)),
            "nothing": lambda: refusal(lambda: exchange.dispatch(x)),
            "captured": lambda: captured(lambda: exchange.dispatch(x, layout=kept)),
            "eager of a graph": lambda: refusal(lambda: exchange.dispatch(x, layout=twice.kept)),
            "other graph": lambda: captured(lambda: exchange.dispatch(x, layout=twice.kept)),
            "fill of a graph": lambda: refusal(lambda: exchange.dispatch(x, ids, weights, keep=twice.kept)),
            "fill stable": lambda: refusal(lambda: exchange.dispatch(x, ids, weights, keep=stable)),
            "stable of a graph": lambda: refusal(twice.kept.declare_stable),
            "free": lambda: refusal(stable.free),
            "dtype": lambda: refusal(lambda: exchange.dispatch(x.float(), layout=kept)),
        }
        for name, work in bad.items():
            found[name] = work()
        handed = exchange.dispatch(x, layout=kept)
        found["turn"] = refusal(lambda: exchange.dispatch(x, layout=kept))
        sums = exchange.combine(side.experts(handed), handed)
        found["good"] = str(same(side.done(sums), identity_sums(exchange.geometry, mine)))
        alone.graph.reset()
        stable.free()
        unlike.close()
    return found


def other_layouts(backend: str) -> tuple[str, str, str, bool]:
    """Ranks that use layouts of different dispatches: what each is told, what a layout is worth after rearm(), and
    whether a step is right then."""
    with exchange_set_up(backend, bound=BRIEF) as side:
        exchange, me = side.exchange, side.exchange.rank
        mine = items_of(side, (4,), 1)[me]
        exchange.set_bound(PATIENT)
        two = [_filled(side, mine), _filled(side, items_of(side, (4,), 2)[me])]
        exchange.wait()
        exchange.set_bound(BRIEF)
        text = ""
        try:
            exchange.dispatch(mine.x.to(side.device), layout=two[me % 2])
            exchange.wait()
        except ChannelFault as fault:
            text = f"{Fault(fault.record.fault).name}: {fault}"
        side.group.ranks.exchange("all have seen it", None)
        exchange.set_bound(PATIENT)
        exchange.rearm()
        forgotten = refusal(lambda: exchange.dispatch(mine.x.to(side.device), layout=two[0]))
        kept = _filled(side, mine)
        handed = exchange.dispatch(mine.x.to(side.device), layout=kept)
        sums = side.done(exchange.combine(side.experts(handed), handed))
        return text, forgotten, str(kept), same(sums, identity_sums(exchange.geometry, mine))
