"""What a rank of a test of collectives begins with: a group, an arena, a communicator, and known values."""

# pyright: basic
from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import torch
import torch.distributed as distributed

from halma.hal.arena.arena import Arena
from halma.hal.arena.plan import plan_channels
from halma.hal.backend import Backend
from halma.hal.collectives.choice import Measured, Table
from halma.hal.collectives.communicator import Communicator
from halma.hal.collectives.contract import Algorithm, Kind, Wire
from halma.hal.collectives.group import Group
from halma.hal.errors import HalmaError
from halma.hal.graph.breakable import BreakableGraph
from halma.hal.registry import default_registry
from halma.hal.testing.conformance.capturing import captured, empty
from halma.hal.workspace import Workspace

LARGEST: Final = 1 << 18
PATIENT: Final = 60.0
"""Seconds, where nothing is to go wrong: a busy machine must not look like a missing rank."""
BRIEF: Final = 0.4
"""Seconds, where a rank is missed on purpose. Every rank that is there waits so long once."""


@dataclass
class Setup:
    """One rank's side."""

    backend: Backend
    group: Group
    arena: Arena
    comm: Communicator

    @property
    def device(self) -> torch.device:
        """Where tensors go."""
        return self.backend.device.torch_device

    def capture(self, program: Callable[[Workspace], Any], workspace: Workspace | None = None) -> BreakableGraph:
        """The program's graph, outside of a session. Without a workspace it takes nothing from one, and is not dry-run:
        some backends dry-run by running, which makes calls that a test would have to count."""
        return captured(self.backend, program, workspace or empty(self.backend))

    def done(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host, once the device is done."""
        self.backend.device.synchronize()
        return tensor.detach().cpu().clone()


def way_table(way: tuple[Algorithm, Wire] | None, size: int) -> Table:
    """A measured table that sends every call one way, as far as it can go it."""
    if way is None:
        return ()
    return tuple(Measured(kind, size, 1 << 40, *way) for kind in Kind)


@contextmanager
def ranks_set_up(
    backend: str,
    *,
    members: Sequence[int] | None = None,
    way: tuple[Algorithm, Wire] | None = None,
    largest: int = LARGEST,
    lanes: str | None = None,
    bound: float = PATIENT,
    first_epoch: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Generator[Setup | None]:
    """A communicator on a channel arena with every lane that the backend can use; None on a rank outside of it.

    What is open is closed behind the block, together with the other ranks, unless the block raised.

    Args:
        members: global ranks of the group; all by default.
        environment: ``HALMA_*`` variables while the block runs.
    """
    os.environ.update(environment or {})
    try:
        world = distributed.group.WORLD if members is None else distributed.new_group(list(members))
        if members is not None and distributed.get_rank() not in members:
            yield None
            return
        device = default_registry().select(backend)
        size = distributed.get_world_size() if members is None else len(members)
        group = Group(world, device, table=way_table(way, size))
        arena = group.arena(plan_channels(largest=largest, lanes=lanes or default_lanes(device)))
        assert isinstance(arena, Arena), arena.why
        comm = group.communicator(arena, first_epoch=first_epoch)
        comm.set_bound(bound)
        yield Setup(device, group, arena, comm)
        comm.close()
        arena.close()
    finally:
        for name in environment or {}:
            del os.environ[name]


def default_lanes(backend: Backend) -> str:
    """All lanes that the backend's stores allow."""
    return "both" if backend.capabilities.remote_store_atomicity else "staged"


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A rank's message, on the host: numbers whose sum depends on the order of adding and on every rounding."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    wide = torch.randn(numel, generator=generator) * torch.tensor([1.0, 300.0, 0.004]).repeat(numel // 3 + 1)[:numel]
    return wide.to(dtype)


def summed(messages: Sequence[torch.Tensor]) -> torch.Tensor:
    """The definition: float32, in order of ranks, one rounding."""
    total = messages[0].float().clone()
    for message in messages[1:]:
        total += message.float()
    return total.to(messages[0].dtype)


def expected_sum(size: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The sum of every rank's :func:`values`."""
    return summed([values(rank, numel, dtype, seed) for rank in range(size)])


def bits(tensor: torch.Tensor) -> str:
    """What tells tensors apart, bit by bit."""
    host = tensor.detach().cpu().contiguous().reshape(-1)
    return blake2b(host.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether they are equal, bit by bit, shape and all."""
    return found.shape == wanted.shape and bits(found) == bits(wanted)


def refusal(work: Callable[[], Any]) -> str:
    """What ``work`` was refused with; nothing if it was not."""
    try:
        work()
    except HalmaError as error:
        return f"{type(error).__name__}: {error}"
    return ""
