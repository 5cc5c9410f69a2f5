"""Commands of several processes, started as torchrun starts them.

A fresh Python imports torch for seconds, so most tests use :func:`forked`: processes of a server that has it already.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from halma.cli.main import run
from halma.hal.testing.forks import Fork

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SECONDS = 300
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER and not name.startswith("HALMA_")}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def places(count: int) -> list[dict[str, str]]:
    """What torchrun would set for each of so many ranks."""
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(count)]


def line(command: str, world: int, mine: Sequence[str]) -> list[str]:
    """Roles say themselves how many ranks there are of each."""
    ranks = [] if command == "ffn" else ["--tp", str(world)]
    return [command, "--backend", "cpu", *ranks, *mine]


def start(command: str, arguments: Sequence[Sequence[str]], **more: str) -> list[subprocess.Popen[str]]:
    """A fresh Python of ``halma command`` for each rank. ``more``: further variables of all."""
    world = len(arguments)
    return [
        subprocess.Popen(
            [sys.executable, "-m", "halma", *line(command, world, mine)],
            env=environment(**place, **more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place, mine in zip(places(world), arguments, strict=True)
    ]


Ended = list[tuple[int, str, str]]
"""Exit code, output and errors of each rank."""


def ended(ranks: Sequence[subprocess.Popen[str]]) -> Ended:
    """How the processes of :func:`start` end."""
    try:
        texts = [rank.communicate(timeout=SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return without_traces([(rank.returncode, *pair) for rank, pair in zip(ranks, texts, strict=True)])


def forked(
    command: str, arguments: Sequence[Sequence[str]], folders: Sequence[Path] | None = None, **more: str
) -> Ended:
    """How ``halma command`` ends on each rank. ``folders``: where each of them runs; ``more``: further variables."""
    world = len(arguments)
    ranks = [
        Fork(run, line(command, world, mine), environment=environment(**place, **more), folder=folder)
        for mine, place, folder in zip(arguments, places(world), folders or [None] * world, strict=True)
    ]
    return without_traces([(one.code, one.out, one.err) for one in [rank.end(SECONDS) for rank in ranks]])


def without_traces(found: Ended) -> Ended:
    assert all("Traceback" not in text for _, *pair in found for text in pair), found
    return found
