"""The page for authors of backends names the whole contract."""

from __future__ import annotations

import re

import pytest

from ci.schema import ROOT
from halma.hal import backend

pytestmark = pytest.mark.torchfree

PARTS = {
    "a stream": backend.Stream,
    "an event": backend.Event,
    "`device`": backend.DevicePart,
    "`memory`": backend.MemoryPart,
    "shared memory": backend.SharedMemory,
    "`graphs`": backend.GraphPart,
    "`kernels`": backend.KernelPart,
    "`collectives`": backend.CollectivePart,
}


@pytest.mark.parametrize("part", list(PARTS))
def test_the_page_names_each_method_of_a_part_and_no_other(part: str) -> None:
    text = (ROOT / "docs" / "backend.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {part} |")]
    named = set(re.findall(r"`(\w+)`", line.split("|")[2]))
    assert named == {name for name in vars(PARTS[part]) if not name.startswith("_")}


def test_the_page_names_each_part() -> None:
    text = (ROOT / "docs" / "backend.md").read_text(encoding="utf-8")
    parts = {name for name in vars(backend.Backend) if not name.startswith("_")}
    assert parts == {name for name in parts if f"| `{name}`" in text or f", `{name}`" in text}
