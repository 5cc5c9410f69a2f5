"""Programs that ranks run: right results, whatever the way, size, dtype, order and time of calls.

Each returns plain data for the test to look at.
"""

# pyright: basic
from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch

from halma.hal.collectives.arithmetic import fused_norm
from halma.hal.collectives.choice import ORDER, name_of
from halma.hal.collectives.contract import Choice, Kind, Operands
from halma.hal.collectives.operands import call_of
from halma.hal.errors import CollectiveError
from halma.hal.testing.conformance.collective_setup import (
    Setup,
    bits,
    expected_sum,
    ranks_set_up,
    refusal,
    same,
    summed,
    values,
)
from halma.hal.workspace import Workspace

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
SIZES: Final = (1, 3, 8, 1000, 4097, 30000)
"""Elements: odd, not multiples of 16 bytes, larger than a piece of 16 bytes a rank."""


def all_reduce_every_way(backend: str, sizes: Sequence[int] = SIZES) -> list[tuple[str, str, int, bool, str]]:
    """(way taken, dtype, elements, equal to the definition, bits) of each way that the backend can go."""
    found: list[tuple[str, str, int, bool, str]] = []
    for way in ORDER:
        with ranks_set_up(backend, way=way) as setup:
            assert setup is not None
            for dtype in DTYPES:
                for numel in sizes:
                    x = values(setup.comm.rank, numel, dtype).to(setup.device)
                    taken = _way_of(setup, x)
                    if taken != name_of(way):
                        continue
                    out = torch.empty_like(x)
                    setup.comm.all_reduce(x, out)
                    found_out = setup.done(out)
                    right = same(found_out, expected_sum(setup.comm.size, numel, dtype))
                    found.append((taken, str(dtype), numel, right, bits(found_out)))
            setup.comm.poll()
    return found


def _way_of(setup: Setup, x: torch.Tensor) -> str:
    choice = setup.comm.choice(call_of(Kind.ALL_REDUCE, x))
    return name_of((choice.algorithm, choice.wire)) if isinstance(choice, Choice) else "vendor"


def other_kinds_every_way(backend: str) -> list[tuple[str, str, bool]]:
    """(way asked, kind, right) of the fused norm, gathers and broadcasts."""
    found: list[tuple[str, str, bool]] = []
    for way in ORDER:
        with ranks_set_up(backend, way=way) as setup:
            assert setup is not None
            name, rank, size = name_of(way), setup.comm.rank, setup.comm.size
            found.append((name, "norm", _norm_is_right(setup)))
            x = torch.arange(37, dtype=torch.int32) * (rank + 1) - 5
            x[:3] = torch.tensor([-1, 0, 1])  # all ones is a value like any other
            out = torch.empty((size, 37), dtype=torch.int32, device=setup.device)
            setup.comm.all_gather(x.to(setup.device), out=out)
            wanted = torch.stack([torch.arange(37, dtype=torch.int32) * (r + 1) - 5 for r in range(size)])
            wanted[:, :3] = torch.tensor([-1, 0, 1])
            found.append((name, "gather", same(setup.done(out), wanted)))
            for root in range(size):  # broadcasts in a row: only headers hold the ranks together
                y = values(rank, 65, torch.bfloat16, seed=root).to(setup.device)
                setup.comm.broadcast(y, root=root)
                found.append((name, "broadcast", same(setup.done(y), values(root, 65, torch.bfloat16, seed=root))))
            setup.comm.barrier()
            setup.comm.poll()
    return found


def _norm_is_right(setup: Setup) -> bool:
    rank, size = setup.comm.rank, setup.comm.size
    x, weight = values(rank, 6 * 96, torch.bfloat16).view(6, 96), values(0, 96, torch.float32, seed=7)
    residual = values(0, 6 * 96, torch.bfloat16, seed=8).view(6, 96)
    on = [tensor.to(setup.device) for tensor in (x, residual.clone(), weight, torch.empty_like(x))]
    setup.comm.all_reduce_rmsnorm(on[0], on[1], on[2], eps=1e-6, out=on[3])
    messages = [values(r, 6 * 96, torch.bfloat16).view(6, 96) for r in range(size)]
    h, norm = residual.clone(), torch.empty_like(x)
    fused_norm(summed(messages), Operands(x, h, residual, weight, norm, eps=1e-6, row_length=96))
    # rsqrt and the order of the mean's sum are a device's own, so the norm is compared closely, not by bits.
    close = torch.allclose(setup.done(on[3]).float(), norm.float(), rtol=1e-2, atol=1e-2)
    return same(setup.done(on[1]), h) and close and same(setup.done(on[0]), x)


def fp8_norms(backend: str) -> dict[str, Any]:
    """By case: whether the norm as fp8 is the plain norm quantised, bit by bit; eager and replayed. And refusals."""
    found: dict[str, Any] = {}
    with ranks_set_up(backend) as setup:
        assert setup is not None
        comm, rank, device = setup.comm, setup.comm.rank, setup.device
        for dtype, (rows, columns) in itertools.product(DTYPES, ((1, 512), (3, 128), (2, 1280))):
            x = values(rank, rows * columns, dtype).view(rows, columns).to(device)
            weight, residual = values(0, columns, dtype, seed=7).to(device), torch.zeros_like(x)
            if rows == 3:
                residual[1] = 1e-9  # below the floor of a scale
            plain, out = torch.empty_like(x), torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=device)
            scale = torch.empty((rows, columns // 128), device=device)
            comm.all_reduce_rmsnorm(x, residual.clone(), weight, out=plain)
            groups = setup.done(plain).float().unflatten(-1, (-1, 128))
            wanted = 2.0 ** torch.ceil(torch.log2((groups.abs().amax(-1).clamp_min(1e-4) * (1.0 / 448.0)).double()))
            quantised = (groups / wanted.float().unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
            again, h = residual.clone(), residual.clone()

            def program(_: Workspace | None = None, x=x, h=h, weight=weight, out=out, scale=scale) -> None:
                comm.all_reduce_rmsnorm(x, h, weight, out=out, scale=scale)

            eager, before = partial(program, None), comm.epoch()
            eager()
            # Where no channel does it, it is torch.distributed's: over gloo, as here, no capture admits that.
            replay = eager if comm.epoch() == before else setup.capture(program).replay
            for how, run in (("eager", eager), ("replayed", replay)):
                h.copy_(again)
                out.view(torch.uint8).fill_(0x55)
                run()
                right = same(setup.done(scale), wanted.float())
                found[f"{how} {dtype} {rows}x{columns}"] = right and same(setup.done(out), quantised)
        wide, odd = torch.zeros((2, 256), device=device), torch.zeros((2, 192), device=device)
        fp8 = torch.zeros((2, 256), dtype=torch.float8_e4m3fn, device=device)
        ones, two = torch.ones(256, device=device), torch.zeros((2, 2), device=device)
        norm = comm.all_reduce_rmsnorm
        found["no scale"] = refusal(lambda: norm(wide, wide.clone(), ones, out=fp8))
        found["plain out"] = refusal(lambda: norm(wide, wide.clone(), ones, out=wide.clone(), scale=two))
        found["scale's shape"] = refusal(lambda: norm(wide, wide.clone(), ones, out=fp8, scale=two[:, :1].clone()))
        found["rows of 192"] = refusal(
            lambda: norm(odd, odd.clone(), ones[:192], out=odd.to(torch.float8_e4m3fn), scale=two[:, :1].clone())
        )
        comm.poll()
    return found


def odd_graphs(backend: str, way: int | None, replays: int) -> list[bool]:
    """A graph of three calls and one of a single call, replayed back to back, with eager calls of another size between:
    which sums were right."""
    with ranks_set_up(backend, way=None if way is None else ORDER[way]) as setup:
        assert setup is not None
        rank, size, right = setup.comm.rank, setup.comm.size, []
        x = torch.empty(96, dtype=torch.bfloat16, device=setup.device)
        one, two, three, single = (torch.empty_like(x) for _ in range(4))
        for_eager = torch.empty(1500, dtype=torch.float32, device=setup.device)

        def triple(_: Workspace) -> None:
            for out in (one, two, three):
                setup.comm.all_reduce(x, out)

        def alone(_: Workspace) -> None:
            setup.comm.all_reduce(x, single)

        graphs = [setup.capture(triple), setup.capture(alone)]
        for step in range(replays):
            x.copy_(values(rank, 96, torch.bfloat16, seed=step))
            for graph in (graphs[0], graphs[0], graphs[1], graphs[1], graphs[1]):
                graph.replay()
            for_eager.copy_(values(rank, 1500, torch.float32, seed=step))
            setup.comm.all_reduce(for_eager)
            wanted = expected_sum(size, 96, torch.bfloat16, seed=step)
            right += [same(setup.done(out), wanted) for out in (one, two, three, single)]
            right.append(same(setup.done(for_eager), expected_sum(size, 1500, torch.float32, seed=step)))
        setup.comm.poll()
        return right


def mixed_calls(
    backend: str, calls: int, seed: int, way: int | None, first_epoch: int, skew: float, members: Sequence[int] | None
) -> tuple[int, int, int] | None:
    """(calls, right ones, last epoch) of a random mix of eager calls and replays of several sizes, kinds and ways.

    Args:
        skew: most seconds that a rank comes late to a call, drawn anew for each rank and call.
    """
    with ranks_set_up(
        backend, way=None if way is None else ORDER[way], first_epoch=first_epoch, members=members
    ) as setup:
        if setup is None:
            return None
        comm, rank, size, right, made = setup.comm, setup.comm.rank, setup.comm.size, 0, 0
        plan, late = random.Random(seed), random.Random(seed * 100 + rank)
        buffers = {n: torch.empty(n, dtype=torch.bfloat16, device=setup.device) for n in (7, 64, 900)}
        graphs = {n: setup.capture(lambda _, x=x: comm.all_reduce(x)) for n, x in buffers.items()}
        while made < calls:
            made += 1
            how, n = plan.choice(("graph", "graph", "eager", "eager", "gather", "broadcast", "barrier", "empty")), 0
            if late.random() < 0.3:
                time.sleep(skew * late.random())
            if how in ("graph", "eager"):
                n = plan.choice((7, 64, 900))
                x = buffers[n]
                x.copy_(values(rank, n, torch.bfloat16, seed=made))
                graphs[n].replay() if how == "graph" else comm.all_reduce(x)
                right += same(setup.done(x), expected_sum(size, n, torch.bfloat16, seed=made))
            elif how == "gather":
                out = torch.empty((size, 5), dtype=torch.int64, device=setup.device)
                comm.all_gather(torch.full((5,), 10 * made + rank, device=setup.device), out=out)
                right += setup.done(out)[:, 0].tolist() == [10 * made + r for r in range(size)]
            elif how == "broadcast":
                root, y = plan.randrange(size), torch.full((3,), float(rank), device=setup.device)
                comm.broadcast(y, root=root)
                right += setup.done(y).tolist() == [float(root)] * 3
            else:
                comm.barrier() if how == "barrier" else comm.all_reduce(torch.empty(0, device=setup.device))
                right += 1
        comm.poll()
        return made, right, comm.epoch()


def bit_patterns(backend: str) -> list[tuple[str, bool]]:
    """(what, right): values that could be taken for flags, sentinels or nothing at all."""
    found: list[tuple[str, bool]] = []
    for way in ORDER:
        with ranks_set_up(backend, way=way) as setup:
            assert setup is not None
            comm, rank, size, name = setup.comm, setup.comm.rank, setup.comm.size, name_of(way)
            zeros = torch.full((9,), -0.0, dtype=torch.float32, device=setup.device)
            comm.all_reduce(zeros)
            found.append((f"{name}: minus zero", same(setup.done(zeros), torch.full((9,), -0.0))))
            patterns = torch.tensor([-1, -2, 0, 1, 2, 3, 0x7FC00000, -4194304], dtype=torch.int32)
            floats = (patterns if rank == size - 1 else torch.zeros_like(patterns)).view(torch.float32)
            x = floats.clone().to(setup.device)
            comm.all_reduce(x)
            nan = setup.done(x).isnan().tolist()
            found.append((f"{name}: every NaN stays one", nan == patterns.view(torch.float32).isnan().tolist()))
            halves = torch.full((6,), -1, dtype=torch.int16).view(torch.bfloat16).to(setup.device)
            comm.all_reduce(halves)  # twice: a box that was not cleared, or filled with its own sentinel, would hang
            comm.all_reduce(halves)
            found.append((f"{name}: all ones", bool(setup.done(halves).isnan().all())))
            numbers, sums = torch.empty(6, dtype=torch.bfloat16, device=setup.device), list[float]()
            for turn in range(4):  # each box again: what the calls before left there is no message
                numbers.fill_(float(rank + turn))
                comm.all_reduce(numbers)
                sums.append(float(setup.done(numbers)[-1]))
            right = [size * (size - 1) / 2 + size * turn for turn in range(4)]
            found.append((f"{name}: numbers after them", sums == right))
            words = torch.arange(comm.epoch() - 3, comm.epoch() + 5, dtype=torch.int32)
            raw = torch.cat([words, patterns]).to(setup.device)
            out = torch.empty((size, raw.numel()), dtype=torch.int32, device=setup.device)
            comm.all_gather(raw, out=out)
            found.append((f"{name}: raw words", same(setup.done(out), torch.cat([words, patterns]).repeat(size, 1))))
            comm.poll()
    return found


def odd_operands(backend: str) -> list[tuple[str, bool]]:
    """(what, right): inputs at an offset, sizes of no multiple of 16 bytes, zero tokens. An offset may be refused, with
    the alignment that is wanted."""
    found: list[tuple[str, bool]] = []
    for way in (None, *ORDER):
        with ranks_set_up(backend, way=way) as setup:
            assert setup is not None
            comm, rank, size = setup.comm, setup.comm.rank, setup.comm.size
            name = "by rule" if way is None else name_of(way)
            for offset, numel in ((1, 5), (3, 1), (8, 7), (5, 333)):
                store = torch.full((offset + numel + 4,), 77.0, dtype=torch.bfloat16, device=setup.device)
                x = store[offset : offset + numel]
                x.copy_(values(rank, numel, torch.bfloat16))
                try:
                    comm.all_reduce(x)
                except CollectiveError as refused:  # of an address, before anything is queued, on every rank alike
                    kept = same(setup.done(x), values(rank, numel, torch.bfloat16))
                    found.append((f"{name}: {numel} at {offset}, refused", kept and "multiple of 16" in str(refused)))
                    continue
                right = same(setup.done(x), expected_sum(size, numel, torch.bfloat16))
                around = torch.cat([setup.done(store[:offset]), setup.done(store[offset + numel :])])
                found.append((f"{name}: {numel} at {offset}", right and bool((around == 77.0).all())))
            empty = torch.empty((0, 96), dtype=torch.bfloat16, device=setup.device)
            before = comm.epoch()
            comm.all_reduce(empty)
            comm.all_reduce_rmsnorm(
                empty, empty.clone(), torch.ones(96, dtype=torch.bfloat16, device=setup.device), out=empty.clone()
            )
            setup.backend.device.synchronize()
            found.append((f"{name}: zero tokens keep their place", comm.epoch() == before + 2))
            comm.poll()
    return found


class _Traced(torch.Tensor):
    """As tracers have them."""


def refused_operands(backend: str) -> dict[str, str]:
    """Refusals by what was wrong; then one good call."""
    with ranks_set_up(backend) as setup:
        assert setup is not None
        comm, device = setup.comm, setup.device
        x = torch.ones((4, 6), dtype=torch.bfloat16, device=device)
        line = torch.ones(32, dtype=torch.bfloat16, device=device)
        weight = torch.ones(6, dtype=torch.bfloat16, device=device)
        negative: Any = getattr(torch, "_neg_view")(x)  # noqa: B009 (torch does not export it)
        bad_eps: tuple[Any, ...] = (-1e-6, float("nan"), float("inf"), None)
        bad_bounds: tuple[Any, ...] = (0, -1, 1e10, "3")
        found = {
            "strided": refusal(lambda: comm.all_reduce(x.t())),
            "shape": refusal(lambda: comm.all_reduce(x, line)),
            "dtype": refusal(lambda: comm.all_reduce(x, x.float())),
            "overlap": refusal(lambda: comm.all_reduce(line[:16], line[8:24])),
            "no tensor": refusal(lambda: comm.all_reduce([1.0])),  # type: ignore[arg-type]
            "negative view": refusal(lambda: comm.all_reduce(negative)),
            "gradient": refusal(torch.enable_grad()(lambda: comm.all_reduce(x.float().requires_grad_()))),
            "subclass": refusal(lambda: comm.all_reduce(x.as_subclass(_Traced))),
            "root": refusal(lambda: comm.broadcast(x, root=setup.comm.size)),
            "root of a half": refusal(lambda: comm.broadcast(x, root=0.5)),  # type: ignore[arg-type]
            "root true": refusal(lambda: comm.broadcast(x, root=True)),
            **{
                f"eps {eps}": refusal(
                    lambda eps=eps: comm.all_reduce_rmsnorm(x, x.clone(), weight, eps=eps, out=torch.empty_like(x))
                )
                for eps in bad_eps
            },
            **{f"bound {bound}": refusal(lambda bound=bound: comm.set_bound(bound)) for bound in bad_bounds},
            "residual": refusal(lambda: comm.all_reduce_rmsnorm(x, x, weight, out=torch.empty_like(x))),
            "weight": refusal(lambda: comm.all_reduce_rmsnorm(x, x.clone(), weight[:5], out=torch.empty_like(x))),
            "gather": refusal(lambda: comm.all_gather(x, out=torch.empty_like(x))),
        }
        comm.all_reduce(x)
        found["after"] = "" if setup.done(x).flatten()[0] == setup.comm.size else "wrong"
        comm.close()
        found["closed"] = refusal(lambda: comm.all_reduce(x))
        found["closed rearm"] = refusal(comm.rearm)
        return found


def good_operands(backend: str) -> list[bool]:
    """What differs a little from what is refused."""
    with ranks_set_up(backend) as setup:
        assert setup is not None
        comm, device, size = setup.comm, setup.device, setup.comm.size
        x = torch.nn.Parameter(torch.ones((2, 4), device=device))
        weight = torch.nn.Parameter(torch.ones(4, device=device))
        norm = torch.empty_like(x)
        with torch.no_grad():
            comm.all_reduce(x)
            # an integer here and a float there are one call
            eps = 0 if comm.rank else 0.0
            comm.all_reduce_rmsnorm(torch.ones_like(x), torch.ones_like(x), weight, eps=eps, out=norm)
        root = torch.full((3,), float(comm.rank), device=device)
        comm.broadcast(root, root=size - 1)
        return [bool((setup.done(x) == size).all()), bool((setup.done(norm) - 1).abs().max() < 1e-6),
                setup.done(root).tolist() == [size - 1.0] * 3]  # fmt: skip


def large_moves(backend: str) -> dict[str, list[bool]]:
    """(right) of gathers and broadcasts of integers above what goes in words, one behind the other, late ranks too;
    by the way that they took."""
    found: dict[str, list[bool]] = {}
    with ranks_set_up(backend, largest=1 << 20, lanes=None) as setup:
        assert setup is not None
        comm, rank, size, device = setup.comm, setup.comm.rank, setup.comm.size, setup.device
        for step, numel in enumerate((20_000, 16_385, 30_001, 20_000)):
            whole = [(torch.arange(numel, dtype=torch.int32) - 7) * (r + 1 + step) for r in range(size)]
            x, out = whole[rank].to(device), torch.empty((size, numel), dtype=torch.int32, device=device)
            y = whole[rank].clone().to(device)
            if rank == step % size:
                time.sleep(0.01)
            comm.all_gather(x, out=out)
            comm.broadcast(y, root=step % size)
            right = same(setup.done(out), torch.stack(whole)) and same(setup.done(y), whole[step % size])
            choice = comm.choice(call_of(Kind.ALL_GATHER, x))
            way = name_of((choice.algorithm, choice.wire)) if isinstance(choice, Choice) else "vendor"
            found.setdefault(way, []).append(right)
        comm.poll()
    return found


def vendor_calls(backend: str) -> dict[str, Any]:
    """What goes the vendor's way, with the decisions' reasons."""
    from halma.hal.decisions import decisions

    decisions.clear()
    with ranks_set_up(backend, largest=1024, environment={"HALMA_LOG": "error"}) as setup:
        assert setup is not None
        comm, rank, size = setup.comm, setup.comm.rank, setup.comm.size
        double = torch.full((4,), 1.0 + rank, dtype=torch.float64, device=setup.device)
        comm.all_reduce(double)
        large = torch.full((4096,), float(rank), device=setup.device)
        comm.all_reduce(large)
        strict: dict[str, Any] = {
            "double": setup.done(double).tolist() == [sum(range(1, size + 1))] * 4,
            "large": bool((setup.done(large) == sum(range(size))).all()),
        }
    strict["reasons"] = {d.subject: (d.chosen, d.reason, n) for d, n in decisions.all("collective")}
    return strict
