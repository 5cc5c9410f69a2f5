"""Programs that rank processes run for this folder's tests."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import halma
from halma.backends.cpu.backend import CpuBackend
from halma.hal.arena.plan import plan_channels
from halma.hal.backend import Backend
from halma.hal.collectives.choice import ORDER
from halma.hal.collectives.communicator import live
from halma.hal.collectives.contract import StreamMix
from halma.hal.collectives.custom_op import all_reduce
from halma.hal.collectives.group import Group, NoArena
from halma.hal.collectives.remembered import MOST
from halma.hal.collectives.report import ChannelFault
from halma.hal.decisions import decisions
from halma.hal.errors import HalmaError
from halma.hal.testing.conformance.capturing import captured, planned
from halma.hal.testing.conformance.collective_faults import fault_of
from halma.hal.testing.conformance.collective_setup import BRIEF, PATIENT, Setup, ranks_set_up, refusal
from halma.hal.workspace import Workspace


def traced() -> dict[str, Any]:
    """The custom op under FakeTensor and make_fx, in a capture, and with a dead id."""
    with ranks_set_up("cpu") as setup:
        assert setup is not None
        comm, found = setup.comm, {}
        x = torch.full((4, 8), 1.0 + comm.rank)
        with FakeTensorMode() as mode:
            fake = torch.ops.halma.all_reduce(mode.from_tensor(x), comm.id)
            found["fake"] = (type(fake).__name__, tuple(fake.shape), str(fake.dtype))
        calls = len(comm.flight())
        graph = make_fx(lambda t: all_reduce(t * 2, comm) + 1)(x)
        found["traced"] = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        found["made"] = len(comm.flight()) - calls
        found["sum"] = graph(x).flatten()[0].item()
        out = torch.empty_like(x)
        all_reduce(x, comm, out)
        found["out"] = out.flatten()[0].item()

        def program(ws: Workspace) -> torch.Tensor:
            return all_reduce(x, comm, ws.take(x.shape, x.dtype))

        step = captured(setup.backend, program, planned(setup.backend, program))
        found["node"] = [node.name for node in step.nodes()]
        found["replayed"] = step.replay().flatten()[0].item()
        dead = comm.id
        comm.close()
        found["dead"] = refusal(lambda: torch.ops.halma.all_reduce(x, dead))
        found["forgotten"] = dead not in live
        return found


def compiled_calls() -> dict[str, Any]:
    """Plain calls inside functions that are compiled into one graph each: what came of them, by call."""
    with ranks_set_up("cpu") as setup:
        assert setup is not None
        comm, size = setup.comm, setup.comm.size
        ones = torch.ones(4)

        def in_place(t: torch.Tensor) -> torch.Tensor:
            y = t * 2
            return comm.all_reduce(y) + y

        def apart(t: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(t)
            comm.all_reduce(t * 2, out)
            return out + t

        def gathered(t: torch.Tensor) -> torch.Tensor:
            out = torch.empty((size, *t.shape))
            return comm.all_gather(t * 2, out=out).sum(0) + out[1]

        def sent(t: torch.Tensor) -> torch.Tensor:
            y = t * 2
            return comm.broadcast(y, root=1) + y

        def normed(t: torch.Tensor) -> torch.Tensor:
            h, out = torch.ones_like(t), torch.empty_like(t)
            return comm.all_reduce_rmsnorm(t, h, ones, out=out) * h

        def waits(t: torch.Tensor) -> torch.Tensor:
            comm.barrier()
            return t

        found: dict[str, Any] = {}
        x = torch.full((1, 4), 1.0 + comm.rank)
        for program in (in_place, apart, gathered, sent, normed, waits):
            function = torch.compile(program, backend="aot_eager", fullgraph=True)
            try:
                found[program.__name__] = [round(function(x)[0, 0].item(), 4) for _ in range(2)]
            except Exception as error:
                found[program.__name__] = str(error)
        found["x"] = x[0, 0].item()
        return found


def compiled() -> float:
    """The op under torch.compile, in one graph; importing the compiler takes long."""
    with ranks_set_up("cpu") as setup:
        assert setup is not None
        comm = setup.comm
        x = torch.full((4, 8), 1.0 + comm.rank)
        function = torch.compile(lambda t: torch.ops.halma.all_reduce(t, comm.id) * 3, backend="eager", fullgraph=True)
        return function(x).flatten()[0].item()


def scrubbed(flags: bool) -> list[tuple[int, int]]:
    """(epoch, stale words) around 2^20 calls: words and flags of this rank's boxes that the call did not bring."""
    way = ORDER[3 if flags else 0]
    with ranks_set_up("cpu", way=way, first_epoch=(1 << 20) - 4) as setup:
        assert setup is not None
        comm, layout, found = setup.comm, setup.arena.layout("main"), []
        lane = layout.stage_flags if flags else layout.words
        assert lane is not None
        peer = 1 - comm.rank
        for numel in (1000, 1000, 2, 2, 2, 2):
            comm.all_reduce(torch.ones(numel, dtype=torch.float32))
            words = torch.cat([
                setup.arena.own.tensor[(start := lane.at(buffer, peer)) : start + lane.box]
                for buffer in ((0, 1) if flags else (comm.epoch() & 1,))
            ]).view(torch.int32)  # fmt: skip
            stale = words[words != 0] if flags else words[1::2][words[1::2] != 0]
            found.append((comm.epoch(), int((stale != comm.epoch()).sum())))
            comm_barrier(setup)
        return found


def comm_barrier(setup: Setup) -> None:
    """All ranks are here; not by a call of the channel, which would have an epoch."""
    setup.group.ranks.exchange("looked", None)


def three_ranks() -> dict[str, Any]:
    """A world size without channels: everything works, by the vendor, with the reason."""
    decisions.clear()
    group = halma.collectives(world=distributed.group.WORLD, backend="cpu")
    arena = group.arena(plan_channels(largest=1024))
    comm = group.communicator(arena)
    x = torch.full((4, 6), 1.0 + group.rank, dtype=torch.bfloat16)
    y, norm = torch.ones_like(x), torch.empty_like(x)
    comm.all_reduce_rmsnorm(x, y, torch.ones(6, dtype=torch.bfloat16), out=norm)
    comm.all_reduce(x)
    gathered = torch.empty((3, 2), dtype=torch.int64)
    comm.all_gather(torch.tensor([group.rank, 7]), out=gathered)
    told = torch.tensor([group.rank])
    comm.broadcast(told, root=2)
    comm.barrier()

    def program(_: Workspace) -> None:
        comm.all_reduce(x)

    step = captured(group.backend, program)
    before = x.flatten()[0].item()
    step.replay()
    comm.poll()
    found = {
        "no arena": isinstance(arena, NoArena) and arena.why,
        "sum": before,
        "replayed": x.flatten()[0].item(),
        "residual": y.flatten()[0].item(),
        "norm": norm.flatten()[0].item(),
        "gathered": gathered.tolist(),
        "told": told.tolist(),
        "reasons": sorted({decision.reason for decision, _ in decisions.all("collective")}),
        "chosen": sorted({decision.chosen for decision, _ in decisions.all("collective")}),
    }
    os.environ["HALMA_STRICT"] = "1"
    try:
        strict = halma.collectives(world=distributed.group.WORLD, backend="cpu")
        found["strict"] = refusal(lambda: strict.communicator(NoArena(strict.why_no_channel)).all_reduce(x))
    finally:
        del os.environ["HALMA_STRICT"]
    comm.close()
    arena.close()
    return found


class Interrupted(BaseException):
    """As KeyboardInterrupt, which a pool of ranks would end with."""


def interrupted(how: str) -> dict[str, Any]:
    """Rank 0 is interrupted while it waits; ``how`` is "never" in the control arm."""
    with ranks_set_up("cpu") as setup:
        assert setup is not None
        comm, ranks = setup.comm, setup.group.ranks
        driver: Any = comm._driver  # pyright: ignore[reportPrivateUsage]
        memory = driver._memory
        x = torch.full((3,), 1.0 + comm.rank)
        found: dict[str, Any] = {"left": False, "fault": ""}

        def interrupt(*_: Any) -> None:
            raise Interrupted

        if comm.rank == 0 and how != "never":
            memory.wait = interrupt  # the data has gone out
            try:
                comm.all_reduce(x)
            except Interrupted:
                found["left"] = True
            del memory.wait
        else:
            comm.all_reduce(x)
        ranks.exchange("interrupted", None)
        comm.set_bound(BRIEF)
        y = torch.full((3,), 10.0 + comm.rank)
        try:
            comm.all_reduce(y)
            comm.poll()
        except ChannelFault as fault:
            found["fault"] = f"{fault.record.fault.name}: {fault}"
        found["next"] = y[0].item()
        comm.set_bound(PATIENT)
        comm.rearm()
        found["after"] = comm.all_reduce(torch.full((3,), 10.0 + comm.rank))[0].item()
        return found


def vendor_calls_that_differ() -> str:
    """In checked mode ranks whose sums take the vendor's way compare them first: gloo would add bytes to bytes."""
    with ranks_set_up("cpu", environment={"HALMA_CHECKED": "1", "HALMA_LOG": "error"}) as setup:
        assert setup is not None
        kinds = (torch.float64, torch.int64)
        assert setup.comm.all_reduce(torch.ones(3, dtype=kinds[0])).tolist() == [2.0] * 3
        return refusal(lambda: setup.comm.all_reduce(torch.ones(3, dtype=kinds[setup.comm.rank])))


def session_without_an_arena() -> dict[str, Any]:
    """The documented way, in a group that has no channel."""
    group = halma.collectives(world=distributed.group.WORLD, backend="cpu")
    arena = group.arena(plan_channels(largest=1024))
    comm = group.communicator(arena)
    x = halma.persistent_input("x", (2, 4), torch.float32, backend=group.backend)

    def program() -> torch.Tensor:
        y = x.prefix(2) * 2
        comm.all_reduce(y)
        return y + 1

    (one,) = halma.ladder(decode=[2])
    with halma.session("persistent", backend=group.backend, inputs=[x], arenas=[arena]) as session:
        session.capture(one, program)
    with torch.no_grad():
        replayed = [session.replay(one, x=torch.full((2, 4), 1.0 + group.rank))[0, 0].item() for _ in range(2)]
    session.close()
    odd = group.ranks.rank == 1

    def differing() -> None:
        with halma.session("persistent", backend=group.backend, inputs=[x], arenas=[arena]) as other:
            other.capture(halma.ladder(decode=[1 if odd else 2])[0], program)

    return {"replayed": replayed, "differs": refusal(differing)}


def left_before_the_seal(how: str) -> dict[str, Any]:
    """Rank 1 raises, or closes, between a capture and the seal that rank 0 waits in; then both make a session."""
    with ranks_set_up("cpu", environment={"HALMA_COLLECTIVE_BOUND": "50"}) as setup:
        assert setup is not None
        comm, arena = setup.comm, setup.arena
        x = halma.persistent_input("x", (2, 4), torch.float32, backend=setup.backend)
        (one,) = halma.ladder(decode=[2])

        def program() -> torch.Tensor:
            y = x.prefix(2) * 2
            comm.all_reduce(y)
            return y + 1

        def captured(leaves: bool) -> float:
            with halma.session("persistent", backend=setup.backend, inputs=[x], arenas=[arena]) as session:
                try:
                    session.capture(one, program)
                    if leaves and how == "raises":
                        raise ValueError("layer 3 is missing")
                    if leaves and how == "closes":
                        session.close()
                        return 0.0
                    session.seal()
                    return session.replay(one, x=torch.full((2, 4), 1.0 + comm.rank))[0, 0].item()
                finally:
                    if not leaves:
                        session.close()

        began = time.monotonic()
        said, kind = "", ""
        try:
            captured(leaves=comm.rank == 1 and how != "never")
        except (HalmaError, ValueError) as error:
            said, kind = str(error), type(error).__name__
        seconds = time.monotonic() - began
        return {"said": said, "kind": kind, "seconds": seconds, "next": captured(leaves=False)}


def many_shapes() -> dict[str, Any]:
    """A graph among thousands of eager calls of other shapes: still right, and still named in a report."""
    with ranks_set_up("cpu") as setup:
        assert setup is not None
        comm = setup.comm
        x, out = torch.full((5,), 1.0 + comm.rank), torch.empty(5)
        with comm.step("the graph's"):
            graph = setup.capture(lambda _: comm.all_reduce(x, out))
        y = torch.zeros(1)
        for step in range(MOST + 10):
            with comm.step(step):
                comm.all_reduce(y)
        graph.replay()
        found: dict[str, Any] = {"sum": out[0].item()}
        setup.group.ranks.exchange("replayed", None)
        comm.set_bound(BRIEF)
        if comm.rank == 0:
            graph.replay()
            found |= fault_of(comm)
        else:
            setup.group.ranks.answers("fault 0 of channel main", comm.flight(), PATIENT)
        comm.rearm()
        return found


def forked() -> dict[str, Any]:
    """What a forked child of rank 0 is told by what it inherited; and that its parent goes on as before."""
    with ranks_set_up("cpu") as setup:
        assert setup is not None
        comm, arena = setup.comm, setup.arena
        x, out = torch.full((3,), 1.0 + comm.rank), torch.empty(3)
        graph = setup.capture(lambda _: comm.all_reduce(x, out))
        graph.replay()
        found: dict[str, Any] = {"first": out[0].item()}
        tries: dict[str, Callable[[], Any]] = {
            "call": lambda: comm.all_reduce(x, out),
            "replay": graph.replay,
            "rearm": comm.rearm,
            "set_bound": lambda: comm.set_bound(1.0),
            "own": lambda: arena.own,
            "exchange": lambda: setup.group.ranks.exchange("the child", None),
            "arena": arena.close,
        }
        if comm.rank == 0:
            found |= _in_a_child(lambda: {name: refusal(work) for name, work in tries.items()})
        comm.close()
        setup.comm = setup.group.communicator(arena)
        found["after"] = setup.comm.all_reduce(x)[0].item()
        return found


def _in_a_child(work: Callable[[], dict[str, str]]) -> dict[str, str]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        answer = b"{}"
        try:
            answer = json.dumps(work()).encode()
        finally:
            os.write(writing, answer)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def unlike_ranks(how: str) -> str:
    """What a group says of ranks that came with different settings, tables, plans or memberships."""
    rank = distributed.get_rank()
    backend: Backend = CpuBackend()
    world: Any = distributed.group.WORLD
    try:
        if how == "setting":
            os.environ["HALMA_CHECKED"] = str(rank)
            Group(world, backend)
        elif how == "plan":
            Group(world, backend).arena(plan_channels(largest=1024 * (rank + 1)))
        elif how == "epoch":
            group = Group(world, backend)
            group.communicator(group.arena(plan_channels(largest=1024)), first_epoch=rank)
        elif how == "member":
            Group(distributed.GroupMember.NON_GROUP_MEMBER, backend)
        elif how == "no group":
            Group("x", backend)
        elif how == "host" and rank == 1:
            from halma.hal.collectives import group as module

            module.machine, before = (lambda: "elsewhere/1234"), module.machine
            try:
                return Group(world, backend).why_no_channel
            finally:
                module.machine = before
        else:
            return Group(world, backend).why_no_channel
    except HalmaError as error:
        return str(error)
    finally:
        os.environ.pop("HALMA_CHECKED", None)
    return ""


def streams_refused() -> tuple[str, str, int]:
    """Why a channel of the CPU does not mix streams, what a call of it is told, and how many calls were made."""
    with ranks_set_up("cpu") as setup:
        assert setup is not None
        comm, narrow = setup.comm, torch.bfloat16
        x, out, streams = (torch.zeros(*shape, dtype=narrow) for shape in ((2, 64), (2, 64), (2, 4, 64)))
        weights = [torch.zeros(*shape) for shape in ((2, 20), (24,), (3,), (24, 256), (24,), (3,))]
        mix = StreamMix(streams, *weights, hc_eps=1e-6, iterations=20)
        why = comm.why_not_streams(2, 64, narrow)
        refused = refusal(lambda: comm.all_reduce_streams(x, mix, torch.zeros(64), out=out))
        return str(why), refused, len(comm.flight())
