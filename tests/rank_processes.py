"""What becomes of rank processes when one of them dies, stands still, does something else or never comes.

Programs that ranks run, and checks of what they saw. Shared by processes on the CPU and processes with a GPU each.
"""

# pyright: basic
from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed

from halma.hal.arena.plan import plan_channels
from halma.hal.collectives.group import Group
from halma.hal.graph.breakable import BreakableGraph
from halma.hal.registry import default_registry
from halma.hal.testing.conformance.collective_faults import fault_of, header_flags, leaving, left_behind
from halma.hal.testing.conformance.collective_setup import (
    BRIEF,
    PATIENT,
    Setup,
    default_lanes,
    expected_sum,
    ranks_set_up,
    refusal,
    same,
    values,
)
from halma.hal.testing.ranks import Lost, RankPools
from halma.hal.workspace import Workspace

NUMEL = 40
MARGIN = 20.0
"""Seconds that a busy machine may add to a bound."""


class Step:
    """One captured all-reduce, and its replays with values that tell steps apart."""

    def __init__(self, setup: Setup, numel: int = NUMEL) -> None:
        self.setup, self.numel = setup, numel
        self.x = torch.empty(numel, dtype=torch.bfloat16, device=setup.device)
        self.out = torch.empty_like(self.x)
        self.graph: BreakableGraph = setup.capture(self._program)

    def _program(self, _: Workspace) -> None:
        self.setup.comm.all_reduce(self.x, self.out)

    def replay(self, seed: int = 0) -> None:
        self.x.copy_(values(self.setup.comm.rank, self.numel, torch.bfloat16, seed=seed))
        self.graph.replay()

    def right(self, seed: int = 0) -> bool:
        """Replays; whether the sum has the defined bits."""
        self.replay(seed)
        return same(
            self.setup.done(self.out), expected_sum(self.setup.comm.size, self.numel, torch.bfloat16, seed=seed)
        )

    def nan(self) -> bool:
        return bool(self.setup.done(self.out).isnan().all())


def state_of(pid: int) -> str:
    """A process's state letter, or "X" once it is gone (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (OSError, IndexError):
        return "X"


def wait_until(what: str, holds: Any) -> None:
    end = time.monotonic() + PATIENT
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"never seen: {what}")
        time.sleep(0.001)


def meet(stage: str, ranks: Iterable[int]) -> None:
    """Wait for ``ranks``, and for nobody else, through the pool's own store."""
    store: Any = distributed.distributed_c10d._get_default_store()
    _meetings[stage] += 1  # a pool lives on from test to test
    keys = {rank: f"rank_processes/{stage}/{_meetings[stage]}/{rank}" for rank in ranks}
    store.set(keys[distributed.get_rank()], "")
    store.wait(list(keys.values()))


_meetings: Counter[str] = Counter()


# -- what ranks run -------------------------------------------------------------------------------------


def killed_in_replay(backend: str, victim: int) -> dict[str, Any]:
    """Rank ``victim`` is killed while its replay waits for the others, as its header in their memory shows."""
    with ranks_set_up(backend, bound=PATIENT) as setup:
        assert setup is not None
        comm, step = setup.comm, Step(setup)
        before = [step.right(seed) for seed in range(3)]
        pid = setup.group.ranks.exchange("who is who", os.getpid())[victim]
        if comm.rank == victim:
            step.replay()
            setup.backend.device.synchronize()  # nobody answers: it dies in here
            return {"fault": "it was not killed"}
        peers = [rank for rank in range(comm.size) if rank != comm.rank]
        wait_until("the victim's fourth call", lambda: header_flags(setup)[peers.index(victim)] == 4)
        if comm.rank == (victim + 1) % comm.size:
            os.kill(pid, signal.SIGKILL)
        wait_until("the victim's end", lambda: state_of(pid) in "ZX")
        comm.set_bound(BRIEF)
        began = time.monotonic()
        step.replay()  # of this one the victim may have done its part
        step.replay()
        found = {"before": before, "nan": step.nan(), "seconds": time.monotonic() - began, **fault_of(comm)}
        ranks: Any = setup.group.ranks
        ranks._seconds = BRIEF
        found["rearm"] = refusal(comm.rearm)
        found["usable"] = (step.x.fill_(2.0) + 1).flatten()[0].item() == 3.0
        comm.close()
        return left_behind(setup, found)


def stopped(backend: str, victim: int) -> dict[str, Any]:
    """Rank ``victim``'s process is stopped between two replays, and goes on after the others have found it out."""
    with ranks_set_up(backend, bound=PATIENT) as setup:
        assert setup is not None
        comm, step = setup.comm, Step(setup)
        before = [step.right(seed) for seed in range(3)]
        setup.backend.device.synchronize()
        pid = setup.group.ranks.exchange("who is who", os.getpid())[victim]
        found: dict[str, Any] = {"before": before, "fault": "NONE"}
        if comm.rank != victim:
            if comm.rank == (victim + 1) % comm.size:
                os.kill(pid, signal.SIGSTOP)
            wait_until("the victim's standstill", lambda: state_of(pid) == "T")
            comm.set_bound(BRIEF)
            began = time.monotonic()
            step.replay()
            step.replay()
            found |= {"nan": step.nan(), "seconds": time.monotonic() - began, **fault_of(comm)}
            comm.set_bound(PATIENT)
            meet("found out", [rank for rank in range(comm.size) if rank != victim])
            if comm.rank == (victim + 1) % comm.size:
                os.kill(pid, signal.SIGCONT)
        setup.group.ranks.exchange("all are back", None)
        comm.rearm()
        found["after"] = [step.right(seed) for seed in range(3)]
        comm.poll()
        return found


def other_shape(backend: str, odd: int) -> dict[str, Any]:
    """Rank ``odd`` replays a graph with another size of message than the rest."""
    with ranks_set_up(backend, bound=PATIENT) as setup:
        assert setup is not None
        comm = setup.comm
        alike, unlike = Step(setup), Step(setup, NUMEL + 8 if comm.rank == odd else NUMEL)
        before = [alike.right(seed) for seed in range(3)]
        began = time.monotonic()
        unlike.replay()
        setup.done(unlike.out)
        found = {"before": before, "seconds": time.monotonic() - began, **fault_of(comm)}
        alike.replay()
        found["nan"] = alike.nan()
        comm.rearm()
        found["after"] = [alike.right(seed) for seed in range(3)]
        comm.poll()
        return found


def never_started(backend: str, absent: int, stage: str) -> dict[str, Any]:
    """Rank ``absent`` does not come to a group's making, or to a channel's; a fresh group of all works then."""
    device, rank, size = default_registry().select(backend), distributed.get_rank(), distributed.get_world_size()
    world = distributed.new_group(list(range(size)))
    os.environ["HALMA_COLLECTIVE_BOUND"] = str(BRIEF) if stage == "group" else str(PATIENT)
    try:
        said, began = "", time.monotonic()
        if stage == "group":
            if rank != absent:
                said = refusal(lambda: Group(world, device))
        else:
            group = Group(world, device)
            arena: Any = group.arena(plan_channels(largest=1024, lanes=default_lanes(device)))
            ranks: Any = group.ranks
            ranks._seconds = BRIEF
            if rank != absent:
                began = time.monotonic()
                said = refusal(lambda: group.communicator(arena))
        seconds = time.monotonic() - began
    finally:
        del os.environ["HALMA_COLLECTIVE_BOUND"]
    meet("never started", range(size))
    with ranks_set_up(backend, members=range(size)) as setup:
        assert setup is not None
        return {"rank": rank, "said": said, "seconds": seconds, "after": [Step(setup).right()]}


def a_sum(backend: str) -> bool:
    with ranks_set_up(backend) as setup:
        assert setup is not None
        return Step(setup).right()


# -- what they must see ---------------------------------------------------------------------------------


def check_killed(pools: RankPools, size: int, victim: int) -> None:
    found = pools[size].run(leaving, killed_in_replay, pools.backend, victim, lost=[victim], seconds=3 * PATIENT)
    assert isinstance(found[victim], Lost) and "exit status -9" in found[victim].why
    for rank, one in enumerate(found):
        if rank == victim:
            continue
        assert one["before"] == [True] * 3
        assert one["fault"] == "TIMEOUT" and victim in one["stragglers"] and one["nan"], one
        assert f"no answer from rank {victim}" in one["text"] and one["seconds"] < BRIEF + MARGIN
        assert "RankError" in one["rearm"] and f"rank {victim} (global rank {victim} on " in one["rearm"]
        assert one["usable"], "the device and the process live on"
    assert pools[size].run(a_sum, pools.backend) == [True] * size, "a fresh group works"


def check_stopped(pools: RankPools, size: int, victim: int) -> None:
    found = pools[size].run(stopped, pools.backend, victim, seconds=3 * PATIENT)
    for rank, one in enumerate(found):
        assert one["before"] == one["after"] == [True] * 3, "the same graph, without another capture"
        if rank == victim:
            continue
        assert (one["fault"], one["peer"], one["stragglers"]) == ("TIMEOUT", victim, [victim]), one
        assert f"rank {victim} (global rank {victim} on " in one["text"] and one["nan"]
        assert BRIEF <= one["seconds"] < BRIEF + MARGIN, "one bound for all that was queued"


def check_other_shape(pools: RankPools, size: int, odd: int) -> None:
    found = pools[size].run(other_shape, pools.backend, odd, seconds=3 * PATIENT)
    for rank, one in enumerate(found):
        assert one["before"] == one["after"] == [True] * 3
        assert one["fault"] == "MISMATCH" and one["expected"] != one["seen"], one
        assert one["peer"] == odd if rank != odd else one["peer"] != odd
        assert "makes another call" in one["text"] and one["nan"]
        assert one["seconds"] < MARGIN, "at once: the bound is a minute here"


def check_never_started(pools: RankPools, size: int, absent: int, stage: str) -> None:
    for one in pools[size].run(never_started, pools.backend, absent, stage, seconds=3 * PATIENT):
        assert one["after"] == [True], "a fresh group of the same processes works"
        if one["rank"] == absent:
            continue
        assert "RankError" in one["said"] and f"rank {absent} " in one["said"], one
        assert "did not come to" in one["said"] and BRIEF <= one["seconds"] < BRIEF + MARGIN
