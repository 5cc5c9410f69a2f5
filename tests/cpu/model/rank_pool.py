"""Real processes that are ranks of gloo groups, started once for all tests that ask for as many."""

from __future__ import annotations

import datetime
import functools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

SECONDS = 240
"""Bound of every wait."""


class RankPool:
    """``size`` processes; a job runs on the first ``world`` of them at once."""

    def __init__(self, size: int, worlds: tuple[int, ...]) -> None:
        self.size, self.worlds = size, worlds
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            for rank in range(size):
                mine, theirs = context.Pipe()
                arguments = (rank, size, worlds, os.path.join(self._folder.name, "store"), theirs)
                process = context.Process(target=_rank, args=arguments, daemon=True)
                process.start()
                self._pipes.append(mine)
                self._processes.append(process)
        finally:
            os.environ.pop("OMP_NUM_THREADS")
            if before is not None:
                os.environ["OMP_NUM_THREADS"] = before

    def run(self, world: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``job(group, *arguments)`` on ``world`` ranks; their results by rank. What one raised is raised here."""
        for pipe in self._pipes[:world]:
            pipe.send((world, job, arguments))
        found = []
        for rank, pipe in enumerate(self._pipes[:world]):
            if not pipe.poll(SECONDS):
                self.close()
                raise TimeoutError(f"rank {rank} of {world} gave no answer to {job.__name__} in {SECONDS} s")
            found.append(pipe.recv())
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(found) if error]
        assert not failed, "\n".join(failed)
        return [result for result, _ in found]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _rank(rank: int, size: int, worlds: tuple[int, ...], store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    bound = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=bound)
    groups = {world: dist.new_group(list(range(world)), timeout=bound) for world in worlds}
    while True:
        try:
            world, job, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = job(groups[world], *arguments), ""
        except BaseException:
            answer = None, traceback.format_exc()
        pipe.send(answer)


@functools.cache
def pool(size: int, worlds: tuple[int, ...]) -> RankPool:
    """The pool of this run; processes end with the one that started them."""
    return RankPool(size, worlds)
