"""Programs that ranks run: dispatch, toy experts, combine. Each returns plain data for the test to look at."""

# pyright: basic
from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any, Final

import torch

from halma.hal.collectives.contract import Fault
from halma.hal.collectives.report import ChannelFault
from halma.hal.device_value import unwrap
from halma.hal.testing.conformance.collective_setup import BRIEF, PATIENT, refusal, same
from halma.hal.testing.conformance.exchange_setup import (
    MOST,
    Item,
    Side,
    exchange_set_up,
    identity_sums,
    item,
    wrong_slots,
)

ROUTINGS: Final = ("random", "idle", "one", "last", "one rank", "holes")
RAGGED: Final = (23, 1, 0, 1, 12, 24, 2, 7)
"""Tokens by rank: one rank far above the others, one with none, as in a public list that wedged a server."""


def items_of(side: Side, tokens: Sequence[int], seed: int, routing: str = "random") -> list[Item]:
    """Every rank's item."""
    ranks = range(side.exchange.size)
    return [item(side.exchange.geometry, rank, tokens[rank % len(tokens)], seed, routing) for rank in ranks]


def step(side: Side, mine: Item, *, out: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """One eager step: dispatch, identity experts, combine."""
    handed = side.exchange.dispatch(*mine.on(side.device), **options)
    return side.exchange.combine(side.experts(handed), handed, out=out)


def slots_and_sums(
    backend: str, payload: str, alignment: int, routings: Sequence[str] = ROUTINGS, **geometry: Any
) -> list[str]:
    """What was wrong, of every routing, with even and ragged tokens, in both modes and with a bound of its own."""
    found: list[str] = []
    with exchange_set_up(backend, payload=payload, alignment=alignment, **geometry) as side:
        exchange, me = side.exchange, side.exchange.rank
        for seed, routing in enumerate(routings):
            for tokens in ((5,), RAGGED, (0,), (0, 3)):
                items = items_of(side, tokens, seed, routing)
                wanted = identity_sums(exchange.geometry, items[me])
                most = max(1, *(len(one.x) for one in items))
                for host, bound in ((False, None), (True, None), (False, most)):
                    what = f"{routing} {tokens} host {host} bound {bound}"
                    handed = exchange.dispatch(*items[me].on(side.device), host_counts=host, bound=bound)
                    found += [f"{what}: {text}" for text in wrong_slots(side, handed, items)]
                    sizes = handed.sizes
                    if (sizes is not None) != host:
                        found.append(f"{what}: sizes {sizes}")
                    if sizes and list(sizes.counts) != side.done(unwrap(handed.counts)).tolist():
                        found.append(f"{what}: sizes {sizes.counts}")
                    sums = exchange.combine(side.experts(handed), handed)
                    if not same(side.done(sums), wanted):
                        found.append(f"{what}: sums")
        carried = torch.empty((5, exchange.geometry.hidden), dtype=items[me].x.dtype, device=side.device)
        mine = items_of(side, (5,), 99)[me]
        step(side, mine, out=carried)
        if not same(side.done(carried), identity_sums(exchange.geometry, mine).to(carried.dtype)):
            found.append("sums in the carrier's dtype")
    return found


def even_step(backend: str) -> list[str]:
    """What was wrong of one step with as many experts for every rank."""
    with exchange_set_up(backend, experts=16) as side:
        items = items_of(side, (5,), 1)
        handed = side.exchange.dispatch(*items[side.exchange.rank].on(side.device))
        found = wrong_slots(side, handed, items)
        sums = side.done(side.exchange.combine(side.experts(handed), handed))
        right = same(sums, identity_sums(side.exchange.geometry, items[side.exchange.rank]))
        return found + ([] if right else ["sums"])


def swaps_are_seen(backend: str) -> list[bool]:
    """Whether the oracle tells a step's sums from those of another item: two rows swapped, two weights, the tokens'
    order."""
    with exchange_set_up(backend) as side:
        mine = items_of(side, (6,), 3)[side.exchange.rank]
        mine.ids[1] = mine.ids[0]
        sums = side.done(step(side, mine))
        swapped = Item(mine.x[[1, 0, 2, 3, 4, 5]], mine.ids, mine.weights)
        weights = Item(mine.x, mine.ids, mine.weights.flip(1))
        order = Item(mine.x.flip(0), mine.ids.flip(0), mine.weights.flip(0))
        others = [identity_sums(side.exchange.geometry, one) for one in (swapped, weights, order)]
        return [not same(sums, other) for other in others]


def poisoned(backend: str, payload: str) -> dict[str, bool]:
    """Whether a step's bits stay, whatever bytes stand in landing rows and scales beforehand."""
    found: dict[str, bool] = {}
    with exchange_set_up(backend, payload=payload, alignment=8) as side:
        mine = items_of(side, (7, 2), 4, "holes")[side.exchange.rank]
        wanted = identity_sums(side.exchange.geometry, mine)
        for name, byte in (("NaN", 0xFF), ("infinity", 0x7F), ("huge", 0x7E), ("zero", 0x00)):
            side.poison(byte)
            found[name] = same(side.done(step(side, mine)), wanted)
    return found


def poison_is_seen(backend: str) -> bool:
    """Whether a NaN in a landing row that has a slot shows in the sums of somebody."""
    with exchange_set_up(backend) as side:
        exchange = side.exchange
        mine = item(exchange.geometry, exchange.rank, 4, 1, "one rank")
        handed = exchange.dispatch(*mine.on(side.device))
        handed.rows[exchange.rank * MOST].fill_(float("nan"))
        handed.rows[(exchange.size - 1 - exchange.rank) * MOST].fill_(float("nan"))
        return bool(side.done(exchange.combine(side.experts(handed), handed))[0].isnan().all())


def one_rank_dies(backend: str, victim: int) -> str:
    """What the others are told when a rank's process ends between dispatch and combine."""
    try:
        with exchange_set_up(backend, bound=BRIEF) as side:
            exchange = side.exchange
            mine = items_of(side, (4,), 1)[exchange.rank]
            handed = exchange.dispatch(*mine.on(side.device))
            side.backend.device.synchronize()
            side.group.ranks.exchange("all have dispatched", None)
            if exchange.rank == victim:
                os._exit(7)
            exchange.combine(side.experts(handed), handed)
            exchange.wait()
    except ChannelFault as fault:
        return str(fault)
    return ""


class Graphed:
    """A captured step of ``tokens`` tokens with inputs at fixed addresses."""

    def __init__(self, side: Side, tokens: int, bound: int | None = None) -> None:
        geometry, device = side.exchange.geometry, side.device
        zero = item(geometry, side.exchange.rank, tokens, 12345)
        self.inputs = [tensor.clone() for tensor in zero.on(device)]
        self.out = torch.empty((tokens, geometry.hidden), dtype=zero.weights.dtype, device=device)

        def program(_: Any) -> None:
            handed = side.exchange.dispatch(*self.inputs, bound=bound)
            side.exchange.combine(side.experts(handed), handed, out=self.out)

        step(side, zero, bound=bound)  # first use of every shape, and of the toy experts' memory
        self.graph = side.capture(program)

    def replay(self, mine: Item) -> None:
        """With this item; not waited for."""
        for place, tensor in zip(self.inputs, (mine.x, mine.ids, mine.weights), strict=True):
            place.copy_(tensor, non_blocking=True)
        self.graph.replay()


def replays_and_eager(backend: str, payload: str, replays: int, tokens: Sequence[int]) -> list[str]:
    """Replays with fresh routing, each followed without a sync by an eager step of another size, in either mode."""
    found: list[str] = []
    with exchange_set_up(backend, payload=payload) as side:
        exchange, me = side.exchange, side.exchange.rank
        mine_tokens = tokens[me % len(tokens)]
        graphed = Graphed(side, mine_tokens)
        for turn in range(replays):
            routing = ROUTINGS[turn % len(ROUTINGS)] if turn % 2 else "random"
            one = items_of(side, tokens, turn, routing)[me]
            other = items_of(side, RAGGED[turn % 8 :] + RAGGED[: turn % 8], 1000 + turn)[me]
            graphed.replay(one)
            sums = step(side, other, host_counts=turn % 3 == 0)
            if not same(side.done(graphed.out), identity_sums(exchange.geometry, one)):
                found.append(f"replay {turn}, {routing}")
            if not same(side.done(sums), identity_sums(exchange.geometry, other)):
                found.append(f"eager step {turn}")
        if exchange.epoch() != 2 * (2 * replays + 1) and not exchange.why_vendor:
            found.append(f"epoch {exchange.epoch()}")
    return found


def shuffled_graphs(backend: str, replays: int, first_epoch: int) -> list[str]:
    """Graphs of three sizes on one exchange, in a shuffled order that all ranks share, idle steps among them."""
    found: list[str] = []
    with exchange_set_up(backend, first_epoch=first_epoch) as side:
        exchange, me = side.exchange, side.exchange.rank
        graphs = {tokens: Graphed(side, tokens, tokens) for tokens in (1, 7, MOST)}
        order = random.Random(5)
        for turn in range(replays):
            tokens, idle = order.choice(list(graphs)), order.random() < 0.2
            mine = item(exchange.geometry, me, tokens, turn, "idle" if idle else "random")
            graphs[tokens].replay(mine)
            if turn % 3 == 2:
                eager = items_of(side, RAGGED, 500 + turn)[me]
                if not same(side.done(step(side, eager, host_counts=True)), identity_sums(exchange.geometry, eager)):
                    found.append(f"eager step {turn}")
            if not same(side.done(graphs[tokens].out), identity_sums(exchange.geometry, mine)):
                found.append(f"replay {turn} of {tokens}, idle {idle}")
    return found


def one_rank_stays_away(backend: str, absent: int, where: str) -> dict[str, Any]:
    """Rank ``absent`` leaves out a call. What the others say, what they got, and whether all go on after rearm().

    Args:
        where: ``dispatch`` or ``combine``; ``nowhere`` for a run in which nobody is missed.
    """
    found: dict[str, Any] = {"fault": ""}
    with exchange_set_up(backend, bound=BRIEF if where != "nowhere" else PATIENT) as side:
        exchange, ranks = side.exchange, side.group.ranks
        mine = items_of(side, (4,), 1)[exchange.rank]
        absent_here = exchange.rank == absent and where != "nowhere"
        try:
            if not (absent_here and where == "dispatch"):
                handed = exchange.dispatch(*mine.on(side.device))
                parts = side.experts(handed)
                if not absent_here:
                    out = exchange.combine(parts, handed)
                    found["nan"] = bool(side.done(out).isnan().all())
            if not absent_here:
                exchange.wait()
        except ChannelFault as fault:
            found.update(fault=str(fault), record=fault.record, stragglers=fault.stragglers)
        ranks.exchange("all have seen it", None)
        exchange.set_bound(PATIENT)
        exchange.rearm()
        again = step(side, mine)
        found["after"] = same(side.done(again), identity_sums(exchange.geometry, mine))
    return found


def other_calls(backend: str) -> list[str]:
    """Ranks whose bounds differ: every one's fault."""
    with exchange_set_up(backend, bound=BRIEF) as side:
        exchange = side.exchange
        mine = items_of(side, (4,), 1)[exchange.rank]
        try:
            exchange.dispatch(*mine.on(side.device), bound=4 + exchange.rank)
            exchange.wait()
            text = ""
        except ChannelFault as fault:
            text = f"{Fault(fault.record.fault).name}: {fault}"
        side.group.ranks.exchange("both have seen it", None)
        exchange.rearm()
        return [text, str(same(side.done(step(side, mine)), identity_sums(exchange.geometry, mine)))]


def refusals(backend: str) -> dict[str, str]:
    """What bad calls are refused with; a good one behind each shows that nothing was sent."""
    found: dict[str, str] = {}
    with exchange_set_up(backend) as side:
        exchange, device = side.exchange, side.device
        mine = items_of(side, (4,), 1)[exchange.rank]
        x, ids, weights = mine.on(device)
        many = items_of(side, (MOST + 1,), 1)[exchange.rank].on(device)
        wide = torch.full_like(ids, exchange.geometry.experts)
        bad = {
            "too many": lambda: exchange.dispatch(*many),
            "above the bound": lambda: exchange.dispatch(x, ids, weights, bound=3),
            "no bound": lambda: exchange.dispatch(x, ids, weights, bound=0),
            "a bound above": lambda: exchange.dispatch(x, ids, weights, bound=MOST + 1),
            "dtype": lambda: exchange.dispatch(x.float(), ids, weights),
            "hidden": lambda: exchange.dispatch(x[:, :8].contiguous(), ids, weights),
            "choices": lambda: exchange.dispatch(x, ids[:, :1].contiguous(), weights),
            "strided": lambda: exchange.dispatch(x, ids.t().contiguous().t(), weights),
            "ids outside": lambda: exchange.dispatch(x, wide, weights, host_counts=True),
            "ids below": lambda: exchange.dispatch(x, ids - 9, weights, host_counts=True),
        }
        for name, work in bad.items():
            found[name] = refusal(work)
        handed = exchange.dispatch(x, ids, weights)
        parts = side.experts(handed)
        found["twice"] = refusal(lambda: exchange.dispatch(x, ids, weights))
        found["short"] = refusal(lambda: exchange.combine(parts[:-1], handed))
        found["wrong out"] = refusal(lambda: exchange.combine(parts, handed, out=torch.empty_like(x[:3])))
        found["parts dtype"] = refusal(lambda: exchange.combine(parts.half(), handed))
        found["no struct"] = refusal(lambda: exchange.combine(parts, parts))  # type: ignore[arg-type]
        sums = exchange.combine(parts, handed)
        found["again"] = refusal(lambda: exchange.combine(parts, handed))
        found["good"] = str(same(side.done(sums), identity_sums(exchange.geometry, mine)))
    found["closed"] = refusal(lambda: exchange.dispatch(x, ids, weights))
    return found


def captured_wrong(backend: str) -> dict[str, str]:
    """A capture whose dispatch has no combine, one in host-synced mode, and a replay between dispatch and combine."""
    found: dict[str, str] = {}
    with exchange_set_up(backend) as side:
        exchange = side.exchange
        graphed = Graphed(side, 4)
        mine = items_of(side, (4,), 1)[exchange.rank]
        inputs = mine.on(side.device)
        found["half"] = refusal(lambda: side.capture(lambda _: exchange.dispatch(*inputs)))
        found["host"] = refusal(lambda: side.capture(lambda _: exchange.dispatch(*inputs, host_counts=True)))
        handed = exchange.dispatch(*inputs)
        found["between"] = refusal(lambda: graphed.replay(mine))
        exchange.combine(side.experts(handed), handed)
        graphed.replay(mine)
        found["good"] = str(same(side.done(graphed.out), identity_sums(exchange.geometry, mine)))
    return found


def unlike(backend: str, field: str, values: Sequence[Any]) -> str:
    """What a rank is told whose value of a field is ``values[rank]``."""
    import torch.distributed as distributed

    def work() -> None:
        with exchange_set_up(backend, **{field: values[distributed.get_rank()]}):
            pass

    return refusal(work)


def host_reads(backend: str) -> dict[str, int]:
    """How often the device is waited for and tensors are read in a step of each mode, by stand-ins that count."""
    with exchange_set_up(backend) as side:
        exchange = side.exchange
        mine = items_of(side, (4,), 1)[exchange.rank]
        counts = {"worst": 0, "host": 0}
        device, real, name = side.backend.device, side.backend.device.synchronize, "worst"

        def noted() -> None:
            counts[name] += 1
            real()

        device.synchronize = noted  # type: ignore[method-assign]
        try:
            step(side, mine)
            name = "host"
            step(side, mine, host_counts=True)
        finally:
            del device.synchronize  # type: ignore[attr-defined]
        layouts = exchange._layouts
        shared = {one.data_ptr() for one in layouts[False].tensors()} & {
            one.data_ptr() for one in layouts[True].tensors()
        }
        return {**counts, "shared": len(shared)}
