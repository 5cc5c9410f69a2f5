"""Programs that ranks run around order: what is loaded and exchanged before the first call, headers, sessions."""

# pyright: basic
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as distributed

from halma.hal.arena.arena import Arena
from halma.hal.arena.plan import ArenaPlan, plan_channels, plan_slots
from halma.hal.collectives.contract import Call, Kind
from halma.hal.collectives.group import Group
from halma.hal.graph.breakable import BreakableGraph
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.ladder import ladder
from halma.hal.graph.scope import GraphCaptureScope
from halma.hal.graph.session import CaptureSession
from halma.hal.registry import default_registry
from halma.hal.settings import GraphSwitch
from halma.hal.testing.conformance.collective_setup import (
    PATIENT,
    Setup,
    default_lanes,
    expected_sum,
    ranks_set_up,
    refusal,
    same,
    values,
)
from halma.hal.workspace import Workspace

WIDTH = 64


class Log:
    """A backend whose collectives tell when a channel's kernels are loaded and when a call is launched."""

    def __init__(self, backend: Any, events: list[str]) -> None:
        self._backend = backend
        self.collectives = self
        self.events = events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def unsupported(self) -> str | None:
        return self._backend.collectives.unsupported()

    def channel(self, site: Any) -> Any:
        self.events.append("load")
        driver = self._backend.collectives.channel(site)
        inner, events = driver.launch, self.events

        def launch(*args: Any) -> None:
            events.append("launch")
            inner(*args)

        driver.launch = launch
        return driver


def loaded_before_the_first_call(backend: str) -> list[str]:
    """What happened on this rank, in order: loading, the exchange behind it, the first call."""
    events: list[str] = []
    logged = Log(default_registry().select(backend), events)
    group = Group(distributed.group.WORLD, cast("Any", logged))
    arena = group.arena(plan_channels(largest=1024, lanes=default_lanes(cast("Any", logged))))
    assert isinstance(arena, Arena)
    inner = group.ranks.exchange

    def exchange(stage: str, value: Any) -> list[Any]:
        found = inner(stage, value)
        if "loaded" in stage:
            events.append("all have")
        return found

    cast("Any", group.ranks).exchange = exchange
    comm = group.communicator(arena)
    comm.barrier()
    logged.device.synchronize()
    comm.close()
    arena.close()
    return events


def headers_after(backend: str, kinds: Sequence[str]) -> list[tuple[str, list[tuple[int, int, int]]]]:
    """After each call: (kind, and for each peer its header's digest and two flags, minus what they should be). The
    second flag is of a header that is stored whole; behind a fence there is one alone."""
    with ranks_set_up(backend) as setup:
        assert setup is not None
        comm, found = setup.comm, []
        x = torch.ones(8, dtype=torch.bfloat16, device=setup.device)
        atomicity = setup.backend.capabilities.remote_store_atomicity
        whole = isinstance(atomicity, int) and atomicity >= 8
        for kind in kinds:
            call = Call(Kind.BARRIER, 0, "uint8")
            if kind == "broadcast":
                comm.broadcast(x, root=0)
                call = Call(Kind.BROADCAST, 16, "bfloat16", root=0)
            elif kind == "nothing":
                comm.all_reduce(x[:0])
                call = Call(Kind.ALL_REDUCE, 0, "bfloat16")
            elif kind == "sum":
                comm.all_reduce(x)
                call = Call(Kind.ALL_REDUCE, 16, "bfloat16")
            else:
                comm.barrier()
            setup.backend.device.synchronize()
            epoch, lane = comm.epoch(), setup.arena.layout("main").headers
            own = setup.done(setup.arena.own.tensor)
            rows: list[tuple[int, int, int]] = []
            for peer in range(comm.size):
                if peer != comm.rank:
                    start = lane.at(epoch & 1, peer)
                    digest, flag, _, again = own[start : start + 16].view(torch.int32).tolist()
                    rows.append(((digest & 0xFFFFFFFF) - call.digest, flag - epoch, again - epoch if whole else 0))
            found.append((kind, rows))
            comm.barrier()  # nobody may overwrite what is being looked at: a peer is at most one call ahead
            comm.barrier()
        comm.poll()
        return found


def warm_up_in_a_capture_context(backend: str) -> list[bool]:
    """Calls inside an inert scope, and inside a session's block before it captures, give real sums."""
    with ranks_set_up(backend) as setup:
        assert setup is not None
        rank, size, right = setup.comm.rank, setup.comm.size, []
        x = torch.empty(WIDTH, dtype=torch.bfloat16, device=setup.device)
        out = torch.full_like(x, 77.0)
        workspace = Workspace(setup.device)
        workspace.seal()
        x.copy_(values(rank, WIDTH, torch.bfloat16))
        with GraphCaptureScope(BreakableGraph(setup.backend), workspace, enabled=False):
            setup.comm.all_reduce(x, out)
        right.append(same(setup.done(out), expected_sum(size, WIDTH, torch.bfloat16)))
        session = CaptureSession(
            setup.backend, Workspace(setup.device), "scratch", switch=GraphSwitch(), arenas=[setup.arena]
        )
        with session:
            x.copy_(values(rank, WIDTH, torch.bfloat16, seed=1))
            setup.comm.all_reduce(x, out)
            right.append(same(setup.done(out), expected_sum(size, WIDTH, torch.bfloat16, seed=1)))
        setup.comm.poll()
        return right


def captured_ladder(backend: str, slots: bool, odd: int | None) -> dict[str, Any]:
    """A session over an arena: a ladder whose steps make three calls each, replayed in any order beside eager calls.

    Args:
        slots: each captured call has a slot of its own, where the backend's ranks pull.
        odd: a rank whose largest step makes its last call on fewer rows.
    """
    device = default_registry().select(backend)
    descriptors = ladder(decode=[1, 2, 4])
    group = Group(distributed.group.WORLD, device)
    arena = group.arena(_plan(descriptors, slots, default_lanes(device)))
    assert isinstance(arena, Arena)
    comm = group.communicator(arena)
    comm.set_bound(PATIENT)
    setup = Setup(device, group, arena, comm)
    x = torch.empty((4, WIDTH), dtype=torch.bfloat16, device=setup.device)
    session = CaptureSession(
        device, Workspace(setup.device), "persistent", switch=GraphSwitch(), arenas=[arena]
    )

    def program_of(descriptor: Descriptor) -> Any:
        rows = descriptor.num_tokens

        def program() -> torch.Tensor:
            y = session.workspace.take((rows, WIDTH), torch.bfloat16)
            comm.all_reduce(x[:rows], y)
            comm.all_reduce(y)
            last = rows - 1 if comm.rank == odd and rows == 4 else rows
            comm.all_reduce(y[:last])
            return y

        return program

    refused = refusal(lambda: session.capture_all(descriptors, program_of))
    right: list[bool] = []
    if not refused:
        for step, descriptor in enumerate([*descriptors, descriptors[0], descriptors[-1], descriptors[0]]):
            x.copy_(values(comm.rank, 4 * WIDTH, torch.bfloat16, seed=step).view(4, WIDTH))
            y = session.replay(descriptor)
            rows = descriptor.num_tokens
            wanted = expected_sum(comm.size, 4 * WIDTH, torch.bfloat16, seed=step).view(4, WIDTH)[:rows]
            right.append(same(setup.done(y), (wanted.float() * comm.size).to(torch.bfloat16) * comm.size))
            eager = torch.full((5,), float(step), device=setup.device)
            comm.all_reduce(eager)
            right.append(setup.done(eager).tolist() == [float(step * comm.size)] * 5)
        comm.poll()
    found = {"refused": refused, "right": right, "slots": arena.live_slots}
    session.close()
    comm.close()
    arena.close()
    return found


def _plan(descriptors: Sequence[Descriptor], slots: bool, lanes: str) -> ArenaPlan:
    if slots:
        return plan_slots(
            descriptors, calls_per_descriptor=3, bytes_per_token=2 * WIDTH, max_batched_tokens=8
        )
    return plan_channels(largest=4096, lanes=lanes)
