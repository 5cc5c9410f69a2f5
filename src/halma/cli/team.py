"""The processes of one command under torchrun: how they find each other, and how they refuse with one voice.

torchrun ends every process once one has ended with an error, and what the others had to say is lost. So a refusal is
told to all ranks first; the lowest rank that has one prints it, and only when it is out do the processes end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from halma.cli.output import print_refusal
from halma.hal.errors import HalmaError, RankError, RequestError
from halma.hal.registry import default_registry
from halma.hal.settings import settings

if TYPE_CHECKING:
    import torch

    from halma.hal.backend import Backend
    from halma.hal.collectives.contract import Ranks as HostRanks
    from halma.hal.collectives.group import Group
    from halma.models.deepseek_v4.config import V4Config
    from halma.models.deepseek_v4.load import ModelSource
    from halma.models.deepseek_v4.ranks import Ranks

REFUSED = 2
LAST_WORDS = 5.0
"""Seconds that rank 0 keeps the store for the others after a failure."""

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where the launcher put this process, from the environment that torchrun sets.

    Attributes:
        rank, size: among all processes; ``local`` among those of this machine.
        host, port: of the key-value store, which rank 0 serves unless the launcher does (``served``).
        attempt: how often the launcher has started the processes before.
    """

    rank: int
    size: int
    local: int
    host: str
    port: int
    served: bool
    attempt: str

    @staticmethod
    def of(tp: int, command: str, asked: str = "") -> Place | None:
        """The place of this process in ``tp`` ranks of ``halma command``; None where it is alone.

        Args:
            asked: the options that ask for so many ranks; ``--tp`` by default.

        Raises:
            RequestError: the launcher started another number of processes, or there is no launcher.
        """
        if tp < 1:
            raise RequestError("--tp takes a number from 1 on", asked=f"--tp {tp}", do="--tp 1 or more")
        other, asked = ("other roles" if asked else ""), asked or f"--tp {tp}"
        line = f"torchrun --nproc-per-node {tp} -m halma {command} {asked} ..."
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        given = {name: os.environ.get(name, "") for name in names}
        if tp == 1 and given["WORLD_SIZE"] in ("", "1"):
            return None
        missing = [name for name, value in given.items() if not value and name != "LOCAL_RANK"]
        if missing:
            raise RequestError(
                f"{tp} ranks are {tp} processes, and this one was started alone",
                asked=asked,
                found=f"not set: {', '.join(missing)}",
                do=line,
            )
        try:
            rank, size, port = (int(given[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            local = int(given["LOCAL_RANK"] or rank)
        except ValueError as error:
            shown_ = [f"{name}={value}" for name, value in given.items()]
            raise RequestError("the launcher's variables are not numbers", found=shown_, do=line) from error
        if size != tp:
            raise RequestError(
                "the launcher started another number of processes than there are to be ranks",
                asked=asked,
                found=f"WORLD_SIZE={size}",
                do=f"torchrun --nproc-per-node {tp} with {asked}, or {other or f'--tp {size}'}",
            )
        if not 0 <= rank < size:
            raise RequestError("the launcher's rank is none", found=f"RANK={rank}, WORLD_SIZE={size}", do=line)
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Place(rank, size, local, given["MASTER_ADDR"], port, served, attempt)


class Team:
    """The ranks of one command. ``rank`` 0 speaks; the others are silent.

    Args:
        local: number of this rank on its machine, and of its device.
    """

    def __init__(self, ranks: HostRanks, local: int = 0) -> None:
        self.ranks = ranks
        self.local = local
        self.rank = ranks.rank
        self.size = ranks.size
        self.speaks = ranks.rank == 0

    def together(self, stage: str, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank, and go on only if it went well on all.

        Raises:
            typer.Exit: it was refused somewhere, and that was printed. What is no refusal is raised where it
                happened. Alone: what ``work`` raises.
        """
        if self.size == 1:
            return work()
        failure: Exception | None = None
        value: Any = None
        try:
            value = work()
        except RankError:
            raise  # a rank that did not come will not come to hear of it either
        except Exception as error:
            failure = error
        failed = [rank for rank, bad in enumerate(self.ranks.exchange(stage, failure is not None)) if bad]
        if not failed:
            return value
        if self.rank == failed[0] and isinstance(failure, HalmaError):
            where = f"on rank {self.rank}: " if self.rank else ""
            print_refusal(f"halma: {where}{failure}")
        self.ranks.exchange(f"{stage}: refused", None)
        if failure is not None and not isinstance(failure, HalmaError):
            raise failure
        raise typer.Exit(REFUSED)

    def backend(self, name: str | None) -> Backend:
        """The backend, on this rank's own device where devices are several.

        Raises:
            BackendError: as :func:`halma.backend`.
            RequestError: this machine has fewer devices than ranks. Ranks that wait for each other on one device
                may keep each other from running.
        """
        import halma

        if self.size > 1:
            status, _ = default_registry().choose(name)
            if status.spec is not None and status.spec.accelerator:
                import torch

                there = torch.accelerator.device_count()
                stand_in = status.spec.simulated and not there  # its devices come with its plugin
                if self.local >= there and not stand_in:
                    raise RequestError(
                        "there are fewer devices than ranks",
                        asked=f"a device for local rank {self.local}, of {self.size} ranks",
                        found=f"{there} devices are visible",
                        do=f"at most {there} ranks on this machine",
                    )
                if not stand_in:
                    torch.accelerator.set_device_index(self.local)
        return halma.backend(name)

    @contextlib.contextmanager
    def divided(
        self, backend: Backend, config: V4Config, tokens: int, carrier: torch.dtype, tp: int | None = None
    ) -> Iterator[Ranks]:
        """The ranks as a model's steps see them, with the memory that their messages need.

        Args:
            tokens: most rows of a step.
            carrier: dtype of activations.
            tp: ranks that share the attention: ``tp`` that follow one another; by default all.
        """
        from halma.models.deepseek_v4.ranks import ONE_RANK, divided

        tp = tp or self.size
        if tp == 1:
            yield ONE_RANK
            return
        import halma

        def made() -> Group:
            return halma.collectives(world=_group_of(backend, self, tp), backend=backend)

        group = self.together("the group", made)
        with contextlib.ExitStack() as held:
            manager = divided(config, group, tokens=tokens, carrier=carrier)
            yield self.together("the shared memory", lambda: held.enter_context(manager))

    def from_first(self, stage: str, work: Callable[[], T]) -> T:
        """``work`` of rank 0, on every rank: what a user gives is read once (standard input can be read but once)."""
        mine = self.together(stage, lambda: work() if self.rank == 0 else None)
        return self.ranks.exchange(f"{stage}, from rank 0", mine)[0]


def divisible(source: ModelSource, tp: int, ep: int = 1) -> ModelSource:
    """``source``, which ``tp`` ranks can share, and its experts ``ep``.

    Raises:
        ModelError: they cannot; the numbers of ranks that can are named.
    """
    from halma.models.deepseek_v4.parted import check_parts
    from halma.models.deepseek_v4.preparation import check_world

    check_world(source.config, tp)
    check_parts(source.config, ep)
    return source


@contextlib.contextmanager
def assembled(tp: int, command: str, asked: str = "") -> Iterator[Team]:
    """The ranks of this command, once all are there. ``asked``: see :meth:`Place.of`.

    Raises:
        RequestError: as :meth:`Place.of`.
        RankError: ranks did not come within ``HALMA_COLLECTIVE_BOUND`` seconds; they are named.
    """
    from halma.hal.collectives.ranks import DistributedRanks, SoloRanks

    place = Place.of(tp, command, asked)
    if place is None:
        yield Team(SoloRanks())
        return
    import torch.distributed as distributed

    seconds = settings().collective_bound
    server = _meeting(place, seconds)
    store = distributed.PrefixStore(f"halma/{place.attempt}", server)
    _roll_call(place, store, seconds)
    # gloo on every backend: what the host says never waits for a device.
    distributed.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=seconds)
    )
    try:
        yield Team(DistributedRanks(distributed.group.WORLD, seconds), place.local)
    except BaseException:
        # The launcher terminates the others once the first of us has ended; they end by themselves, each with its code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _part(place, store, LAST_WORDS)
        raise
    _part(place, store, seconds)
    distributed.destroy_process_group()


def _group_of(backend: Backend, team: Team, tp: int) -> Any:
    """The ``tp`` ranks that this one is among."""
    if tp == team.size:
        return world_of(backend)
    # Every rank makes every group, in the same order: torch asks for it.
    made = [world_of(backend, range(first, first + tp)) for first in range(0, team.size, tp)]
    return made[team.rank // tp]


def world_of(backend: Backend, ranks: Sequence[int] | None = None) -> Any:
    """All ranks, or those of ``ranks``, with the vendor's collectives for what no channel does. Every process calls it,
    members or not.

    Raises:
        RequestError: this build of the vendor's torch has no such library; one rank works without it.
    """
    import torch.distributed as distributed

    if backend.capabilities.collective_backend is None:
        raise RequestError(
            f"several ranks cannot meet on the {backend.name} backend",
            found=backend.collectives.unsupported() or "it has no library of collectives",
            do="one rank, or a build of torch that has the library",
        )
    kind, members = backend.device.torch_device.type, None if ranks is None else list(ranks)
    if kind != "cpu":
        return distributed.new_group(members, backend=f"cpu:gloo,{kind}:{backend.collectives.torch_backend}")
    return distributed.group.WORLD if members is None else distributed.new_group(members, backend="gloo")


def _meeting(place: Place, seconds: float) -> Any:
    """The store that all ranks reach; rank 0 serves it, unless the launcher does.

    Raises:
        RankError: it is not there in time, or its port is taken.
    """
    from torch.distributed import TCPStore

    serves = place.rank == 0 and not place.served
    if not serves:
        _reach(place, seconds)  # torch would say the same with fifty lines of C++ frames
    try:
        return TCPStore(
            place.host,
            place.port,
            place.size,
            is_master=serves,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise RankError(
            f"rank {place.rank} cannot {'serve' if serves else 'use'} the ranks' store",
            asked=f"{place.host}:{place.port} (MASTER_ADDR, MASTER_PORT)",
            found=str(error).splitlines()[0],
            do="another MASTER_PORT on all ranks; torchrun finds a free one",
        ) from error


def _reach(place: Place, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((place.host, place.port), timeout=seconds).close()
            return
        except OSError as error:
            if time.monotonic() > end or isinstance(error, socket.gaierror):
                raise RankError(
                    f"rank {place.rank} does not reach rank 0",
                    asked=f"rank 0's store at {place.host}:{place.port} (MASTER_ADDR, MASTER_PORT)",
                    found=f"{error.strerror or error}, for {seconds:g} s",
                    do="start rank 0 too, and give all ranks its address",
                ) from error
        time.sleep(0.05)


def _roll_call(place: Place, store: Any, seconds: float) -> None:
    """Wait until every rank is there.

    Raises:
        RankError: naming those that are not.
    """
    end = time.monotonic() + seconds
    here = f"rank {place.rank} on {socket.gethostname()}"
    try:
        store.set(f"here/{place.rank}", here)
        missing = set(range(place.size))
        while missing:
            missing = {rank for rank in missing if not store.check([f"here/{rank}"])}
            if missing and time.monotonic() > end:
                break
            time.sleep(0.02 if missing else 0)
    except RuntimeError as error:
        raise RankError(
            "rank 0 is gone", asked=f"{place.size} ranks; this is {here}", found=str(error).splitlines()[0],
            do="look at rank 0's own output",
        ) from error  # fmt: skip
    if missing:
        raise RankError(
            f"{len(missing)} of {place.size} ranks did not start within {seconds:g} s",
            asked=f"{place.size} ranks; this is {here}",
            found="missing: " + ", ".join(f"rank {rank}" for rank in sorted(missing)),
            do="look at their own output; HALMA_COLLECTIVE_BOUND is how long ranks wait for each other",
        )


def _part(place: Place, store: Any, seconds: float) -> None:
    """Tell that this rank needs the store no more; who serves it stays until all have said so."""
    with contextlib.suppress(RuntimeError):  # the store is gone, and with it who would have wanted to know
        store.set(f"gone/{place.rank}", "")
        if place.rank == 0 and not place.served:
            store.wait([f"gone/{rank}" for rank in range(place.size)], timedelta(seconds=seconds))
