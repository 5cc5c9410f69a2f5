"""Programs that ranks run where something is wrong on purpose: a rank that stays away, ends, or does something else."""

# pyright: basic
from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from halma.hal.collectives.choice import ORDER
from halma.hal.collectives.communicator import Communicator
from halma.hal.collectives.report import ChannelFault
from halma.hal.errors import CollectiveError, HalmaError
from halma.hal.testing.conformance.collective_setup import (
    BRIEF,
    PATIENT,
    Setup,
    expected_sum,
    ranks_set_up,
    refusal,
    same,
    values,
)
from halma.hal.workspace import Workspace


def fault_of(comm: Communicator) -> dict[str, Any]:
    """What the next poll says."""
    try:
        comm.poll()
    except ChannelFault as fault:
        record = fault.record
        return {
            "fault": record.fault.name,
            "peer": record.peer,
            "call": record.call,
            "expected": record.expected,
            "seen": record.seen,
            "algorithm": record.algorithm,
            "seconds": record.waited_ns / 1e9,
            "stragglers": fault.stragglers,
            "answered": sorted(fault.flights),
            "text": str(fault),
        }
    return {"fault": "NONE"}


def _graph(setup: Setup, x: torch.Tensor, out: torch.Tensor) -> Any:
    def program(_: Workspace) -> None:
        setup.comm.all_reduce(x, out)

    return setup.capture(program)


def stay_away(backend: str, absent: int, calls_before: int, way: int | None = None) -> dict[str, Any]:
    """Rank ``absent`` leaves out one call. The others find it out, stay sane, and go on after rearm().

    Args:
        way: position in ``ORDER``. What the others sent in the call that was left out is still in the absent rank's
            boxes; by sentinel it would be taken for a later call's data, were it not scrubbed.
    """
    with ranks_set_up(backend, bound=PATIENT, way=None if way is None else ORDER[way]) as setup:
        assert setup is not None
        comm, rank, size = setup.comm, setup.comm.rank, setup.comm.size
        x = torch.empty(40, dtype=torch.bfloat16, device=setup.device)
        out = torch.empty_like(x)
        graph = _graph(setup, x, out)
        for step in range(calls_before):
            x.copy_(values(rank, 40, torch.bfloat16, seed=step))
            graph.replay()
        setup.done(out)
        comm.set_bound(BRIEF)
        found: dict[str, Any] = {"rank": rank}
        if rank != absent:
            began = time.monotonic()
            for _ in range(3):
                graph.replay()
            found["nan"] = bool(setup.done(out).isnan().all())
            found["seconds"] = time.monotonic() - began
        found |= fault_of(comm) if rank != absent else {"fault": "NONE"}
        if rank != absent:
            found["sticky"] = refusal(lambda: comm.all_reduce(x))
        comm.set_bound(PATIENT)
        setup.group.ranks.answers("everybody is done", None, PATIENT)
        found["flags"] = header_flags(setup)
        comm.rearm()
        right: list[bool] = []
        for step in range(3):
            if way is not None and rank != absent:
                time.sleep(BRIEF)  # late, so that the absent rank looks into its boxes first
            x.copy_(values(rank, 40, torch.bfloat16, seed=step))
            graph.replay()
            right.append(same(setup.done(out), expected_sum(size, 40, torch.bfloat16, seed=step)))
        comm.poll()
        found["after"] = right
        return found


def header_flags(setup: Setup) -> list[int]:
    """The largest flag that stands in each peer's headers here: the last call that it said anything in."""
    lane, own = setup.arena.layout("main").headers, setup.done(setup.arena.own.tensor)
    flags = own[lane.offset : lane.offset + lane.nbytes].view(torch.int32).view(2, setup.comm.size, 4)[:, :, 1]
    return [int(flags[:, peer].max()) for peer in range(setup.comm.size) if peer != setup.comm.rank]


def opened_again(backend: str, faulty: bool) -> dict[str, Any]:
    """A second communicator on a channel: refused beside the first, and clean behind it, also after a fault."""
    with ranks_set_up(backend) as setup:
        assert setup is not None
        comm, arena = setup.comm, setup.arena
        x = torch.ones(20, device=setup.device)
        comm.all_reduce(x)
        comm.all_reduce(x)
        beside = refusal(lambda: setup.group.communicator(arena))
        if faulty:
            setup.group.ranks.exchange("before the fault", None)
            comm.set_bound(BRIEF)
            if comm.rank:
                comm.all_reduce(x)
            setup.backend.device.synchronize()
        comm.close()
        setup.comm = again = setup.group.communicator(arena)
        flags, epoch = header_flags(setup), again.epoch()
        setup.group.ranks.exchange("looked", None)
        messages = [torch.full((20,), float(step + again.rank), device=setup.device) for step in range(3)]
        sums = [setup.done(again.all_reduce(message)) for message in messages]
        again.poll()
        comm.close()  # twice is once: the channel is the second's
        beside_again = refusal(lambda: setup.group.communicator(arena))
        again.close()
        found: dict[str, Any] = {"beside": beside, "again": beside_again, "flags": flags, "epoch": epoch}
        return found | {"sums": [one[0].item() for one in sums]}


def arena_first(backend: str) -> dict[str, str]:
    """What a communicator says whose arena was closed before it."""
    with ranks_set_up(backend) as setup:
        assert setup is not None
        x = torch.ones(20, device=setup.device)
        graph = _graph(setup, x, torch.empty_like(x))
        setup.arena.close()
        found = {"call": refusal(lambda: setup.comm.all_reduce(x)), "rearm": refusal(setup.comm.rearm)}
        return found | {"replay": refusal(graph.replay), "open": refusal(lambda: setup.group.communicator(setup.arena))}


def end_suddenly(backend: str, victim: int) -> dict[str, Any]:
    """Rank ``victim`` is killed between two calls; the others name it and can close."""
    with ranks_set_up(backend, bound=PATIENT) as setup:
        assert setup is not None
        comm = setup.comm
        x = torch.ones(40, dtype=torch.bfloat16, device=setup.device)
        comm.all_reduce(x)
        setup.done(x)
        if comm.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.set_bound(BRIEF)
        comm.all_reduce(x)
        found = {"nan": bool(setup.done(x).isnan().all()), **fault_of(comm)}
        found["usable"] = (x.fill_(2.0) + 1).flatten()[0].item() == 3.0
        comm.close()
        return left_behind(setup, found)


def left_behind(setup: Setup, found: dict[str, Any]) -> Any:
    """Leave the set-up behind: its arena waits for a rank that will never come."""
    raise Left(found)


class Left(Exception):
    """Carries a result past the barriers of a set-up's end."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__(found)
        self.found = found


def leaving(program: Callable[..., Any], *args: Any) -> Any:
    """Run ``program``; what it left with is its result."""
    try:
        return program(*args)
    except Left as left:
        return left.found


def other_call(backend: str, odd: int, what: str, checked: bool) -> dict[str, Any]:
    """Rank ``odd`` makes another call than the rest; what everybody is told, and how soon."""
    environment = {"HALMA_CHECKED": "1"} if checked else {}
    with ranks_set_up(backend, bound=PATIENT, environment=environment) as setup:
        assert setup is not None
        comm = setup.comm
        is_odd = comm.rank == odd
        x = torch.ones(28 if is_odd and what == "shape" else 24, dtype=torch.bfloat16, device=setup.device)
        if is_odd and what == "dtype":
            x = torch.ones(24, dtype=torch.float16, device=setup.device)
        began, error = time.monotonic(), ""
        try:
            if is_odd and what == "kind":
                comm.broadcast(x, root=0)
            elif what == "step":
                with comm.step("prefill of 7" if is_odd else "decode of 7"):
                    comm.all_reduce(x)
            else:
                comm.all_reduce(x)
        except CollectiveError as refused:
            error = str(refused)
        setup.done(x)
        found = {"error": error, "seconds": time.monotonic() - began, "flight": len(comm.flight()), **fault_of(comm)}
        if found["fault"] != "NONE":
            comm.rearm()
        y = torch.ones(24, dtype=torch.bfloat16, device=setup.device)
        comm.all_reduce(y)
        found["after"] = setup.done(y).tolist() == [float(comm.size)] * 24
        return found


def waited_for(backend: str, odd: bool) -> dict[str, Any]:
    """One large call on many blocks, rank 1's of another size if ``odd``: what wait() says, and the next call's sum."""
    with ranks_set_up(backend, bound=PATIENT) as setup:
        assert setup is not None
        comm = setup.comm
        x = torch.ones(60_000 if odd and comm.rank else 64_000, dtype=torch.bfloat16, device=setup.device)
        comm.all_reduce(x)
        found: dict[str, Any] = {"fault": "NONE"}
        try:
            comm.wait()
        except ChannelFault as fault:
            found["fault"] = fault.record.fault.name
        else:
            found["right"] = bool((setup.done(x) == comm.size).all())
        graph_sum = torch.ones(64, device=setup.device)
        if odd:
            found["next"] = refusal(lambda: comm.all_reduce(graph_sum))
            comm.rearm()
        comm.all_reduce(graph_sum)
        comm.wait()
        found["after"] = setup.done(graph_sum)[0].item()
        return found


def one_rank_ahead(backend: str) -> dict[str, Any]:
    """Rank 1's epoch is two calls ahead, as only a defect can bring it about."""
    with ranks_set_up(backend, bound=PATIENT) as setup:
        assert setup is not None
        comm = setup.comm
        comm.rearm_from(8 if comm.rank == 1 else 6)
        comm.set_bound(PATIENT if comm.rank == 0 else BRIEF)
        x = torch.ones(24, dtype=torch.bfloat16, device=setup.device)
        began = time.monotonic()
        comm.all_reduce(x)
        setup.done(x)
        found = {"seconds": time.monotonic() - began, **fault_of(comm)}
        comm.rearm()
        return found


def late_but_there(backend: str, seconds: float) -> bool:
    """A rank that comes late, and within the bound, is waited for."""
    with ranks_set_up(backend, bound=PATIENT) as setup:
        assert setup is not None
        if setup.comm.rank == 1:
            time.sleep(seconds)
        x = torch.ones(24, dtype=torch.bfloat16, device=setup.device)
        setup.comm.all_reduce(x)
        right = setup.done(x).tolist() == [float(setup.comm.size)] * 24
        setup.comm.poll()
        return right


def absent_from_exchange(backend: str, absent: int) -> str:
    """Rank ``absent`` does not come to an exchange; what the others are told."""
    with ranks_set_up(backend) as setup:
        assert setup is not None
        ranks: Any = setup.group.ranks
        ranks._seconds = BRIEF
        said = "" if ranks.rank == absent else refusal(lambda: ranks.exchange("the plan", 1))
        ranks._seconds = PATIENT
        ranks.answers("the others gave up", None, PATIENT)  # so that the absent one comes behind that
        if ranks.rank == absent:
            ranks.exchange("the plan", 1)  # what the others said is still there
        stage = "one stage" if ranks.rank == absent else "another stage"
        apart = refusal(lambda: ranks.exchange(stage, 2))
        ranks.exchange("together again", 3)
        return f"{said}\n{apart}"


def two_streams(backend: str) -> dict[str, str]:
    """Calls on a second stream, eager, captured and replayed: refused, and right with a hand-over."""
    with ranks_set_up(backend) as setup:
        assert setup is not None
        comm, device = setup.comm, setup.backend.device
        x = torch.ones(24, dtype=torch.bfloat16, device=setup.device)
        other = device.new_stream("other")
        found: dict[str, str] = {}

        def on_other() -> None:
            with other:
                comm.all_reduce(x)

        def forked(hand_over: bool) -> Any:
            def program(_: Workspace) -> None:
                comm.all_reduce(x)
                home = device.current_stream()
                event, back = device.new_event("fork"), device.new_event("join")
                home.record(event)
                other.wait(event)
                if hand_over:
                    comm.hand_over(other)
                with other:
                    comm.all_reduce(x)
                if hand_over:
                    comm.hand_over(home)
                other.record(back)
                home.wait(back)
                comm.all_reduce(x)

            return program

        graph = setup.capture(forked(True))
        found["captured over"] = f"{len([n for n in graph.nodes() if n.name.startswith('collective:')])} calls"
        found["captured"] = refusal(lambda: setup.capture(forked(False)))
        comm.all_reduce(x)
        found["eager"] = refusal(on_other)
        found["replayed"] = refusal(lambda: graph.replay(other))
        comm.hand_over(other)
        on_other()
        graph.replay(other)
        device.synchronize()
        x.fill_(1.0)
        graph.replay(other)
        found["right"] = str(setup.done(x)[0].item() == comm.size**3)
        comm.poll()
        return found


def unordered_calls(backend: str) -> str:
    """Two calls of one channel on streams that nothing orders, past the communicator's own check."""
    with ranks_set_up(backend) as setup:
        assert setup is not None
        comm: Any = setup.comm
        home = setup.backend.device.current_stream()
        side = setup.backend.device.new_stream("side")
        tensors = [torch.ones(24, dtype=torch.bfloat16, device=setup.device) for _ in range(3)]

        def program(_: Workspace) -> None:
            comm.all_reduce(tensors[0])
            fork, join = setup.backend.device.new_event("fork"), setup.backend.device.new_event("join")
            home.record(fork)
            side.wait(fork)
            comm._stream._captured = side
            with side:
                comm.all_reduce(tensors[1])
            comm._stream._captured = home
            comm.all_reduce(tensors[2])
            side.record(join)
            home.wait(join)

        return refusal(lambda: setup.capture(program))


def captured_lists(backend: str, odd: int | None, checked: bool) -> str:
    """What comparing captured calls says where rank ``odd`` captured one of another size; checked: at a replay."""
    with ranks_set_up(backend, environment={"HALMA_CHECKED": "1"} if checked else None) as setup:
        assert setup is not None
        x = torch.ones(24, dtype=torch.bfloat16, device=setup.device)
        y = x[: 20 if setup.comm.rank == odd else 24]

        def program(_: Workspace) -> None:
            setup.comm.all_reduce(x)
            setup.comm.all_reduce(y)

        graph = setup.capture(program)
        try:
            if checked:
                graph.replay()
                return f"{setup.done(y)[0].item()}"
            return f"{setup.comm.compare_captured()} calls"
        except HalmaError as error:
            return str(error)
        finally:
            setup.comm.close()
            assert "closed" in refusal(graph.replay)
