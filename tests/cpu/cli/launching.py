"""Commands of several processes, started as torchrun starts them.

A fresh Python imports torch for seconds, so most tests use :func:`forked`: processes of a server that has it already.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from halma.hal.testing.ranks import PRELOADED

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
    return [command, "--backend", "cpu", "--tp", str(world), *mine]


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


def forked(command: str, arguments: Sequence[Sequence[str]], folders: Sequence[Path] | None = None) -> Ended:
    """How ``halma command`` ends on each rank. ``folders``: where each of them runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "halma.hal.testing.ranks"])
    world = len(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        written = [(Path(scratch, f"{rank}.out"), Path(scratch, f"{rank}.err")) for rank in range(world)]
        ranks = [
            context.Process(target=_command, args=(line(command, world, mine), place, folder, *files), daemon=True)
            for mine, place, folder, files in zip(
                arguments, places(world), folders or [Path.cwd()] * world, written, strict=True
            )
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(SECONDS)
        hung = [number for number, rank in enumerate(ranks) if rank.exitcode is None]
        for number in hung:
            ranks[number].kill()
        assert not hung, f"ranks {hung} did not end within {SECONDS} s"
        texts = [(out.read_text(), err.read_text()) for out, err in written]
    return without_traces([(rank.exitcode or 0, *pair) for rank, pair in zip(ranks, texts, strict=True)])


def without_traces(found: Ended) -> Ended:
    assert all("Traceback" not in text for _, *pair in found for text in pair), found
    return found


def _command(arguments: list[str], place: Mapping[str, str], folder: Path, out: Path, err: Path) -> None:
    for name in [name for name in os.environ if name.startswith("HALMA_")]:
        del os.environ[name]
    os.environ.update(place)
    os.chdir(folder)
    for number, path in ((0, Path(os.devnull)), (1, out), (2, err)):
        handle = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    import torch

    from halma.cli.main import run

    torch.set_num_threads(1)
    code = run(arguments)
    sys.stderr.flush()
    os._exit(code)  # past the end of a fork's own multiprocessing
