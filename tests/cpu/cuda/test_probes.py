"""The questions of ``benchmarks.probes_cuda``, which only a device answers, are all there."""

from __future__ import annotations

import benchmarks.probes_cuda  # pyright: ignore[reportUnusedImport]  # noqa: F401
from benchmarks.capture_errors import ILLEGAL
from benchmarks.capture_probes import probes


def test_ten_probes_are_registered_and_each_has_cases() -> None:
    assert sorted(probes) == list(range(1, 11))
    assert all(cases() for _, cases, _ in probes.values())
    assert len(probes[1][1]()) == len(ILLEGAL) + 6 and len(ILLEGAL) >= 10
