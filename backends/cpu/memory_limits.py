"""How much memory this process may use: the machine's, or the control group's where that is less."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from halma.hal.backend import MemoryInfo


def memory_info(root: Path = Path("/")) -> MemoryInfo:
    """Bytes that can still be taken, and bytes there are.

    Both are the least of what the machine and every enclosing control group (v1 or v2) allow; what files
    occupy in the page cache counts as free, since the kernel gives it up.

    Args:
        root: where ``proc`` and ``sys`` are; tests give their own.
    """
    machine = _machine(root)
    pairs = [machine, *_groups(root, machine[1])]
    total = min(pair[1] for pair in pairs)
    return MemoryInfo(free=max(0, min(total, *(pair[0] for pair in pairs))), total=total)


def _machine(root: Path) -> tuple[int, int]:
    fields = _fields(root / "proc/meminfo")
    if "MemTotal" in fields:
        total = fields["MemTotal"] * 1024
        return fields.get("MemAvailable", fields.get("MemFree", fields["MemTotal"])) * 1024, total
    # No /proc (macOS): what there is stands for what is free, too.
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total


def _fields(path: Path) -> dict[str, int]:
    """``name value`` or ``name: value kB`` lines as numbers."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    rows = [line.replace(":", " ").split() for line in lines]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _groups(root: Path, machine_total: int) -> Iterator[tuple[int, int]]:
    """(free, limit) of every control group that sets a limit below the machine's memory."""
    for folder, limit_name, usage_name, cache_name in _folders(root):
        limit = _number(folder / limit_name)
        if limit is None or limit >= machine_total:  # v1 writes an unset limit as a huge number
            continue
        usage = _number(folder / usage_name) or 0
        cache = _fields(folder / "memory.stat").get(cache_name, 0)
        yield limit - max(0, usage - cache), limit


def _folders(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """This process's memory groups, innermost first; inside a container the path may start at the mount."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        folder = mount / path.lstrip("/")
        while True:
            yield folder, limit, usage, cache
            if folder in (mount, folder.parent):
                break
            folder = folder.parent
