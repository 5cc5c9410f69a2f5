"""Will it fit? Bytes needed against every limit that holds here, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from halma.hal.errors import ModelError


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes that may still be taken, and whose word that is."""

    name: str
    free: int


def host_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """What this process may still take of the host's memory: the kernel's estimate, and every cgroup above it.

    Limits that cannot be read (another system, no cgroups) are left out. ``root`` is for tests.
    """
    limits: list[MemoryLimit] = []
    available = _meminfo(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        limits.append(MemoryLimit("available memory", available))
    free = [left for left in _cgroups(root) if left is not None]
    if free:
        limits.append(MemoryLimit("cgroup limit", min(free)))
    return limits


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _meminfo(path: Path) -> dict[str, int]:
    """``name: n kB`` lines as bytes."""
    words = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {line[0]: int(line[1]) * 1024 for line in words if len(line) > 1 and line[1].isdigit()}


def _cgroups(root: Path) -> list[int | None]:
    """Bytes left in every memory cgroup above this process, both versions."""
    left: list[int | None] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if number == "0" and not controllers:
            base, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / path.lstrip("/")
        # Inside a container the path may be that of the host: then only the mounted top is there.
        for group in [folder, *folder.parents]:
            left.append(_left(group, *files))
            if group == base:
                break
    return left


def _left(group: Path, maximum: str, current: str, reclaimable: str) -> int | None:
    limit, used = _text(group / maximum).strip(), _text(group / current).strip()
    if not (limit.isdigit() and used.isdigit()) or int(limit) >= 1 << 60:  # version 1 writes "none" as a huge number
        return None
    stat = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    cache = stat.get(reclaimable, "0")  # file pages that the kernel drops when asked, a mapped checkpoint's among them
    return int(limit) - int(used) + (int(cache) if cache.isdigit() else 0)


def human(size: int) -> str:
    """Bytes in the unit that a person reads, and exactly."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit} ({size:,} bytes)"
    return f"{size} bytes"


def check_fit(needed: Mapping[str, int], limits: Sequence[MemoryLimit], *, asked: str, do: Sequence[str] = ()) -> None:
    """Whether all of ``needed`` fits below every limit.

    Raises:
        ModelError: naming each part, the sum, and every limit that is too small.
    """
    total = sum(needed.values())
    short = [limit for limit in limits if limit.free < total]
    if not short:
        return
    parts = " + ".join(f"{name} {human(size)}" for name, size in needed.items() if size)
    raise ModelError(
        "the model does not fit into memory",
        asked=asked,
        found=[
            f"needed: {human(total)} = {parts}",
            *(f"{limit.name}: {human(limit.free)}" for limit in short),
        ],
        do=list(do) or ["use a smaller model or context, more ranks, or a machine with more memory"],
    )
