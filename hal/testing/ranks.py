"""Rank processes for tests: a pool started once a run for each world size, from which every test draws.

A fresh process of torch costs seconds, so the processes are forked from a server that has torch imported already, and
live on: ``pool.run(function, ...)`` calls ``function`` on every rank and returns what each returned. A rank that
raises, dies or hangs is reported by name within a bound, and costs its own pool alone, which is started again when it
is next used.

Functions and arguments go to the ranks by pickle, so a function is a module's own. In a rank torch.distributed is
initialised (gloo, on the loopback) with a store that the test's process hosts: a rank may die without taking the
others' store with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, Final

PRELOADED: Final = (
    "torch",
    "torch.distributed",
    "numpy",
    "halma.hal.arena.arena",
    "halma.hal.collectives.group",
    "halma.hal.graph.session",
    "halma.hal.registry",
)
"""What ranks are forked with, so that each does not import it anew."""
ENDED_SECONDS: Final = 5.0
"""How long a pool waits for a process to end by itself before it is killed."""


@dataclass(frozen=True)
class Lost:
    """In place of a result: the rank ended or hung, as the caller had said it might."""

    why: str


class RankFailure(AssertionError):
    """Ranks raised, ended or hung; every one's story is in the message.

    Attributes:
        stories: by rank: a traceback, an exit status, or that it did not come back.
    """

    def __init__(self, what: str, stories: Mapping[int, str]) -> None:
        self.stories = dict(stories)
        super().__init__("\n".join([what, *(f"--- rank {rank} ---\n{text}" for rank, text in stories.items())]))


class RankPool:
    """``size`` processes, one thread each. Not thread-safe.

    Args:
        backend: the backend that ranks will use. Of an accelerator each rank gets a device of its own; where there
            are fewer, ranks share them.
        seconds: how long a run may take by default.
    """

    def __init__(self, size: int, backend: str = "cpu", seconds: float = 60.0) -> None:
        self.size = size
        self.backend = backend
        self.seconds = seconds
        self.starts = 0
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        self._store: Any = None

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        seconds: float | None = None,
        lost: Iterable[int] = (),
        each: Sequence[Sequence[Any]] | None = None,
    ) -> list[Any]:
        """``function(*args)`` on every rank; their results by rank.

        Args:
            seconds: the bound of this run.
            lost: ranks that may end or hang: their result is :class:`Lost`. The pool starts anew afterwards.
            each: further arguments for each rank, behind ``args``.

        Raises:
            RankFailure: a rank raised, ended or did not come back in time.
        """
        if not self._processes:
            self._start()
        expected = set(lost)
        for rank, pipe in enumerate(self._pipes):
            mine = (*args, *(each[rank] if each is not None else ()))
            with contextlib.suppress(OSError):  # it ended between two runs; found below
                pipe.send_bytes(pickle.dumps((function, mine)))
        results, stories = self._gather(self.seconds if seconds is None else seconds, expected)
        bad = {rank: story for rank, story in stories.items() if rank not in expected}
        for rank in expected & stories.keys():
            results[rank] = Lost(stories[rank])
        if stories:
            self.close()
        if bad:
            raise RankFailure(f"{len(bad)} of {self.size} ranks failed in {function.__qualname__}", bad)
        return [results[rank] for rank in range(self.size)]

    def _gather(self, seconds: float, expected: set[int]) -> tuple[dict[int, Any], dict[int, str]]:
        """Results, and the stories of ranks without one. After a first story the others get a moment only, and so do
        ranks that may hang once all others are back."""
        results: dict[int, Any] = {}
        stories: dict[int, str] = {}
        end = time.monotonic() + seconds
        waiting = set(range(self.size))
        while waiting and time.monotonic() < end:
            watched: list[Any] = [self._pipes[rank] for rank in waiting]
            watched += [self._processes[rank].sentinel for rank in waiting]
            ready = connection.wait(watched, timeout=min(1.0, max(0.0, end - time.monotonic())))
            for rank in sorted(waiting):
                if self._pipes[rank] in ready or self._processes[rank].sentinel in ready:
                    self._take(rank, results, stories)
                    waiting.discard(rank)
            if stories.keys() - expected or waiting <= expected:
                end = min(end, time.monotonic() + ENDED_SECONDS)
        for rank in waiting:
            stories[rank] = f"rank {rank} did not come back within {seconds:g} s"
        return results, stories

    def _take(self, rank: int, results: dict[int, Any], stories: dict[int, str]) -> None:
        try:
            good, value = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(ENDED_SECONDS)
            stories[rank] = f"rank {rank} ended with exit status {self._processes[rank].exitcode}"
            return
        if good:
            results[rank] = value
        else:
            stories[rank] = value

    def _start(self) -> None:
        import torch.distributed

        distributed: Any = torch.distributed  # a store's class is not among what it exports
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, __name__])
        self._store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.starts += 1
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self.size, int(self._store.port), self.backend)
            process = context.Process(target=_serve, args=arguments, name=f"rank {rank} of {self.size}", daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        """End the processes; the next run starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        end = time.monotonic() + ENDED_SECONDS
        hangs = [process for process in self._processes if not _ended(process, end)]
        for process in hangs:
            process.kill()
            process.join()
        self._processes, self._pipes, self._store = [], [], None


class RankPools:
    """A pool for each world size, made when it is first asked for."""

    def __init__(self, backend: str = "cpu") -> None:
        self.backend = backend
        self._pools: dict[int, RankPool] = {}

    def __getitem__(self, size: int) -> RankPool:
        if size not in self._pools:
            self._pools[size] = RankPool(size, self.backend)
        return self._pools[size]

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()


def _ended(process: Any, end: float) -> bool:
    process.join(max(0.0, min(1.0, end - time.monotonic())))
    return process.exitcode is not None


def _serve(pipe: connection.Connection, rank: int, size: int, port: int, backend: str) -> None:
    """A rank: calls what comes through ``pipe`` until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from halma.hal.settings import OF_THE_MACHINE, PREFIX

    for name in [name for name in os.environ if name.startswith(PREFIX) and name not in OF_THE_MACHINE]:
        del os.environ[name]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed

    distributed: Any = torch.distributed
    torch.set_num_threads(1)
    _choose_device(backend, rank)
    store = distributed.TCPStore("127.0.0.1", port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    with contextlib.suppress(EOFError, OSError), torch.no_grad():
        while True:
            function, arguments = pickle.loads(pipe.recv_bytes())
            try:
                answer = (True, function(*arguments))
                text = pickle.dumps(answer)
            except BaseException:
                text = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(text)
    os._exit(0)  # not through the group's own end, which may wait for a rank that died


def _choose_device(backend: str, rank: int) -> None:
    """Give an accelerator's rank a device, before anything else of this process asks for one."""
    from halma.hal.registry import default_registry

    if default_registry().spec(backend).accelerator:
        import torch

        if torch.accelerator.is_available():  # else its device comes with its plugin, and has one number
            torch.accelerator.set_device_index(rank % max(torch.accelerator.device_count(), 1))
