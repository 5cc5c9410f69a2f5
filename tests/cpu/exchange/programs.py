"""Programs of ranks that show what the CPU driver alone, or torch.distributed's way, does."""

# pyright: basic
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as distributed

from halma.hal.collectives import exchange_opening, group
from halma.hal.collectives.exchange import Exchange
from halma.hal.collectives.exchange_tuning import Key, Tuning
from halma.hal.collectives.report import ChannelFault
from halma.hal.testing.conformance.collective_setup import BRIEF, PATIENT, same
from halma.hal.testing.conformance.exchange_kept_programs import old_against_kept
from halma.hal.testing.conformance.exchange_programs import items_of, replays_and_eager, slots_and_sums, step
from halma.hal.testing.conformance.exchange_setup import exchange_set_up, identity_sums


def by_the_vendor(why: str | None) -> dict[str, Any]:
    """Slots, sums, replays and eager steps where torch.distributed moves the data.

    Args:
        why: a reason to have no shared memory that all ranks are given; None: whatever the group has.
    """
    with pytest.MonkeyPatch.context() as patch:
        if why is not None:
            patch.setattr(exchange_opening, "_why_vendor", lambda group, geometry: why)
        with exchange_set_up("cpu") as side:
            reason = side.exchange.why_vendor
        return {
            "why": reason,
            "bf16": slots_and_sums("cpu", "bf16", 1, ("random", "holes", "one")),
            "fp8": slots_and_sums("cpu", "fp8", 16, ("random",)),
            "fp64": slots_and_sums("cpu", "fp64", 1, ("random",)),
            "replays": replays_and_eager("cpu", "bf16", 6, (6, 0, 3)),
            "kept": [*old_against_kept("cpu", "bf16", 1), *old_against_kept("cpu", "fp8", 16)],
        }


def on_two_machines() -> tuple[str, str, Tuning]:
    """(why torch.distributed moves the data, the key, the launch numbers) of ranks that say they are on two machines,
    with a table that has a row for as many ranks of one."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    table = {Key(1, size, ""): Tuning(77, 3, 5)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "machine", lambda: f"machine {2 * rank // size}")
        made = group.Group(distributed.group.WORLD, __import__("halma").backend("cpu"))
        exchange = Exchange.open(made, max_tokens=4, hidden=64, top_k=2, experts=8, table=table)
        found = (exchange.why_vendor, str(exchange.key), exchange.tuning)
        exchange.close()
    return found


def one_alone() -> bool:
    """A group of one rank: dispatch is a copy, combine a sum."""
    made = group.Group(distributed.new_group([0]), __import__("halma").backend("cpu"))
    exchange = Exchange.open(made, max_tokens=4, hidden=64, top_k=2, experts=8, payload="fp32")
    x = torch.randn(3, 64)
    ids = torch.tensor([[0, 7], [3, -1], [-1, -1]])
    weights = torch.full((3, 2), 0.5)
    handed = exchange.dispatch(x, ids, weights)
    parts = handed.rows[handed.index.clamp_min(0).long()] * handed.weights.unsqueeze(1)
    out = exchange.combine(parts, handed)
    exchange.close()
    return torch.equal(out, torch.stack([x[0], 0.5 * x[1], torch.zeros(64)]))


def stale_flags() -> tuple[list[int], list[int], bool]:
    """Flags that stand in the lanes after a large step, and a small one in whose dispatch old ones are scrubbed."""
    with exchange_set_up("cpu", first_epoch=(1 << 20) - 3) as side:
        exchange, right = side.exchange, True
        for tokens in (24, 2):
            mine = items_of(side, (tokens,), tokens)[exchange.rank]
            right = right and same(side.done(step(side, mine)), identity_sums(exchange.geometry, mine))
        side.group.ranks.exchange("all are done", None)
        driver: Any = exchange._driver
        memory, places = driver._memory, exchange.geometry.places
        peer = 1 - exchange.rank
        words = memory.u64(exchange.rank, places.choices.at(peer), places.choices.stride // 8) >> np.uint64(32)
        flags = memory.u32(exchange.rank, places.flags.at(peer), places.flags.stride // 4)
        return sorted({int(word) for word in words}), sorted({int(flag) for flag in flags}), right


def interrupted(how: str) -> dict[str, Any]:
    """An interrupt leaves rank 0's dispatch half way; what both are told then, and whether rearm() mends it."""
    with exchange_set_up("cpu", bound=BRIEF) as side:
        exchange, found = side.exchange, {"left": False, "fault": ""}
        driver: Any = exchange._driver
        mine = items_of(side, (4,), 1)[exchange.rank]

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        if exchange.rank == 0 and how == "waiting":
            driver._wait = interrupt
        try:
            step(side, mine)
            exchange.wait()
        except KeyboardInterrupt:
            found["left"] = True
        except ChannelFault as fault:
            found["fault"] = fault.record.fault.name
        driver.__dict__.pop("_wait", None)
        side.group.ranks.exchange("both have seen it", None)
        exchange.set_bound(PATIENT)
        exchange.rearm()
        found["after"] = same(side.done(step(side, mine)), identity_sums(exchange.geometry, mine))
        return found


def guard_zone() -> str:
    """What close() says in checked mode after a byte of a guard zone was written."""
    text = ""
    try:
        with exchange_set_up("cpu", environment={"HALMA_CHECKED": "1"}) as side:
            exchange: Any = side.exchange
            if exchange.rank == 0:
                exchange._memory.own.tensor[exchange.geometry.places.channel.guards[2]] = 0
            mine = items_of(side, (4,), 1)[exchange.rank]
            step(side, mine)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return text


def unlike_rows() -> str:
    """Ranks whose tables differ, one of them with a row that no device can have."""
    rank = distributed.get_rank()
    made = group.Group(distributed.group.WORLD, __import__("halma").backend("cpu"))
    table = {Key(1, made.size, ""): Tuning(2, 3 if rank else 4)}
    try:
        Exchange.open(made, max_tokens=4, hidden=64, top_k=2, experts=8, table=table).close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
