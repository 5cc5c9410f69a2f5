"""Processes of their own that start with torch and halma imported: forks of the server that rank processes come from.

A fresh Python imports torch for three seconds of processor time, which hundreds of tests would pay. What a fork cannot
show is start-up itself: ``python -m halma``, import cost, what an installed script does.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halma.hal.testing.ranks import PRELOADED


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it wrote. ``code`` is -9 where it was killed, as after its time limit."""

    code: int
    out: str
    err: str


class Fork:
    """A process that calls ``work(*args)``; an integer that it returns is its exit code.

    Args:
        work: a module's own function.
        environment: all variables that it sees; those of now by default.
        stdin: what it reads; nothing by default.
        folder: where it runs.
    """

    def __init__(
        self,
        work: Callable[..., Any],
        *args: Any,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        folder: Path | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, "halma.hal.testing.ranks", __name__])
        self._scratch = tempfile.TemporaryDirectory()
        self._files = tuple(Path(self._scratch.name, name) for name in ("in", "out", "err"))
        self._files[0].write_bytes(stdin)
        given = dict(os.environ if environment is None else environment)
        arguments = (work, args, given, folder or Path.cwd(), self._files)
        self._process = context.Process(target=_call, args=arguments, daemon=True)
        self._process.start()

    def end(self, seconds: float = 240.0) -> Ended:
        """Wait for the end, which comes after ``seconds`` at the latest."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        out, err = (file.read_text(errors="replace") if file.exists() else "" for file in self._files[1:])
        self._scratch.cleanup()
        return Ended(int(self._process.exitcode or 0), out, err)


def script(text: str, *arguments: str, **more: Any) -> Fork:
    """A process that runs ``text`` as ``python -c`` would; ``more`` as :class:`Fork`."""
    return Fork(_script, text, arguments, **more)


def _script(text: str, arguments: tuple[str, ...]) -> None:
    sys.argv = ["-c", *arguments]
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


def _call(
    work: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str], folder: Path, files: tuple[Path, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in enumerate(files):
        handle = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    import torch

    torch.set_num_threads(1)
    try:
        returned = work(*args)
        code = returned if isinstance(returned, int) else 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # past the end of a fork's own multiprocessing
