"""Compiled kernels on disk, by a hash of everything that went into them.

An entry is written beside its place and renamed into it, so a reader sees all of it or nothing; its own checksum
finds one that was damaged later, which is then compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from halma.hal.backend import KernelSource

_MAGIC = b"halma-cubin-1\n"
_DIGEST = 32


def cache_directory(family: str, environment: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/halma/<family>``, by default below ``~/.cache``. A relative XDG_CACHE_HOME does not count."""
    base = environment.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(environment.get("HOME") or Path.home()) / ".cache"
    return root / "halma" / family


def key_of(source: KernelSource, flags: Sequence[str], compiler: Sequence[int | str]) -> str:
    """A hash of the source, its headers and defines, the flags (arch among them) and the compiler's version."""
    parts = {
        "text": source.text,
        "headers": dict(source.headers),
        "defines": dict(source.defines),
        "flags": list(flags),
        "compiler": list(compiler),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass
class KernelCache:
    """A folder of compiled kernels. Counts what happened to each request; any failure of the disk means compiling anew.

    ``suffix``: of its files' names.
    """

    folder: Path
    suffix: str = ".cubin"
    hits: int = 0
    compiled: int = 0
    damaged: int = 0

    def get(self, source: KernelSource, key: str, build: Callable[[], bytes]) -> bytes:
        """The cubin of ``key``: from disk, or built and put there."""
        path = self.folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', source.name)[:64]}-{key}{self.suffix}"
        found = self._read(path)
        if found is not None:
            self.hits += 1
            return found
        self.compiled += 1
        made = build()
        self._write(path, made)
        return made

    def _read(self, path: Path) -> bytes | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        head, body = data[: len(_MAGIC) + _DIGEST], data[len(_MAGIC) + _DIGEST :]
        if head == _MAGIC + hashlib.sha256(body).digest():
            return body
        self.damaged += 1
        return None

    def _write(self, path: Path, cubin: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        except OSError:
            return  # a read-only home: every process compiles for itself
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(cubin).digest() + cubin)
            os.replace(temporary, path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
