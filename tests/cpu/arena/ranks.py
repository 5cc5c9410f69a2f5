"""Ranks as processes: ``python -m tests.cpu.arena.ranks FOLDER`` starts four, of which 1 and 3 share arenas.

Each writes what it found, by case, to ``FOLDER/RANK.json``. Memory is files that are mapped, votes go over gloo.
"""

from __future__ import annotations

import datetime
import json
import mmap
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import halma
from halma.hal.arena.arena import Arena
from halma.hal.arena.plan import plan_channels, plan_slots
from halma.hal.collectives.contract import Algorithm, Call, Kind
from halma.hal.errors import CollectiveError, HalmaError, RankError
from halma.hal.graph.ladder import decode_ladder
from halma.hal.graph.session import CaptureSession
from halma.hal.testing.conformance.roles import Toy
from halma.hal.workspace import Workspace

WORLD, MEMBERS = 4, (1, 3)
SECONDS = 30
LADDER = decode_ladder(2)
CHANNEL = plan_channels(largest=4096)
SLOTS = plan_slots(LADDER, calls_per_descriptor=3, bytes_per_token=512)


class GlooRanks:
    """A group of processes."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.names: Sequence[str] = [f"rank {rank} on here" for rank in dist.get_process_group_ranks(group)]

    def exchange(self, stage: str, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, (stage, value), group=self._group)
        except RuntimeError as error:
            raise RankError(f"a rank did not come to {stage!r}", found=str(error).splitlines()[0]) from error
        assert {other for other, _ in found} == {stage}
        return [value for _, value in found]

    def leave(self, reason: str) -> None:
        """Gloo has no way to say so."""


class Mapped:
    """A mapped file."""

    def __init__(self, path: str, nbytes: int, owner: bool) -> None:
        self._path, self._owner, self.closed = path, owner, False
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), nbytes)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()

    def close(self) -> None:
        if not self.closed and self._owner:
            os.unlink(self._path)
        self.closed = True


class Files:
    """Memory that other processes of the machine can map; ``fault`` is raised where a peer's is."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, 0
        self.fault: Exception | None = None

    def not_exportable(self) -> str | None:
        return None

    def exportable(self, nbytes: int) -> tuple[Mapped, bytes]:
        self.made += 1
        path = self.folder / f"arena.{os.getpid()}.{self.made}"
        with open(path, "wb") as file:
            file.truncate(nbytes)
        return Mapped(str(path), nbytes, owner=True), f"{nbytes} {path}".encode()

    def open(self, handle: bytes) -> Mapped:
        if self.fault is not None:
            raise self.fault
        nbytes, path = handle.decode().split(" ", 1)
        return Mapped(path, int(nbytes), owner=False)


class Backend:
    """The CPU backend with memory that can be shared."""

    def __init__(self, files: Files) -> None:
        inner = halma.backend("cpu")
        self.name, self.evidence, self.capabilities = inner.name, inner.evidence, inner.capabilities
        self.device, self.graphs, self.memory = inner.device, inner.graphs, files
        self.plain = inner


def writes_are_seen(backend: Any, ranks: GlooRanks) -> Any:
    arena = Arena.create(backend, ranks, CHANNEL, checked=True)
    headers = arena.layout().headers
    for peer in arena.peers:
        peer.tensor[headers.at(1, ranks.rank)] = 40 + ranks.rank
    ranks.exchange("written", None)
    found = [int(arena.own.tensor[headers.at(1, rank)]) for rank in range(ranks.size)]
    arena.close()
    return {"seen": found, "names": list(ranks.names), "fingerprint": arena.plan.fingerprint}


def plans_differ(backend: Any, ranks: GlooRanks) -> Any:
    Arena.create(backend, ranks, SLOTS if ranks.rank else CHANNEL)


def one_cannot_map(backend: Any, ranks: GlooRanks) -> Any:
    backend.memory.fault = CollectiveError("its owner is gone") if ranks.rank else None
    try:
        Arena.create(backend, ranks, CHANNEL)
    finally:
        backend.memory.fault = None


def one_call_less(backend: Any, ranks: GlooRanks) -> Any:
    return captured(backend, ranks, CHANNEL, calls=3 - ranks.rank)


def all_calls(backend: Any, ranks: GlooRanks) -> Any:
    return captured(backend, ranks, SLOTS, calls=3)


def captured(backend: Any, ranks: GlooRanks, plan: Any, calls: int) -> Any:
    """A ladder captured by both, with so many calls a step on this rank, and a replay."""
    arena = Arena.create(backend, ranks, plan)
    session = CaptureSession(backend.plain, Workspace(), "persistent", arenas=[arena])
    toy = Toy(backend.plain, 4)

    def program_of(descriptor: Any) -> Callable[[], Any]:
        step = toy.program(session, descriptor)

        def run() -> Any:
            if arena.recording is not None:
                for _ in range(calls):
                    arena.take(Call(Kind.ALL_REDUCE, 512, "bfloat16"), Algorithm.STAGED)
            return step()

        return run

    try:
        with torch.no_grad():
            session.capture_all(LADDER, program_of)
            for one in LADDER:
                session.replay(one)
        return {"slots": arena.live_slots, "sealed": sorted(map(str, arena.sealed)), "replays": session.replays}
    finally:
        session.close()
        arena.close()


def one_dies(backend: Any, ranks: GlooRanks) -> Any:
    arena = Arena.create(backend, ranks, CHANNEL)
    if ranks.rank:
        os._exit(7)
    arena.close()


CASES = (writes_are_seen, plans_differ, one_cannot_map, one_call_less, all_calls, one_dies)


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timeout)
    group = dist.new_group(list(MEMBERS), timeout=timeout)
    if rank not in MEMBERS:
        return
    ranks, backend = GlooRanks(group), Backend(Files(folder))
    found: dict[str, Any] = {}
    for case in CASES:
        try:
            found[case.__name__] = case(backend, ranks)
        except HalmaError as error:
            found[case.__name__] = {"kind": type(error).__name__, "error": str(error)}
        left = sorted(path.name for path in folder.glob(f"arena.{os.getpid()}.*"))
        found[case.__name__] = {**(found[case.__name__] or {}), "left": left}
        (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    start = multiprocessing.get_context("fork").Process  # torch is imported once
    processes = [start(target=main, args=(Path(sys.argv[1]), rank)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
