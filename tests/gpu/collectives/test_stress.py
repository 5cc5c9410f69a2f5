"""Each row of the memory-order table under load: very many calls, every result checked on the device (C13)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.allreduce_stress import LARGEST, Stress
from benchmarks.ranks import virtual_ranks
from benchmarks.virtual_ranks import lay_out
from halma.hal.backend import Backend
from halma.hal.collectives.contract import Choice
from tests.gpu.collectives.lab import (
    ONE_SHOT_SENTINEL,
    ONE_SHOT_WORDS,
    REDUCTIONS,
    STAGED,
    STAGED_TWO_SHOT,
    TWO_SHOT,
)

CALLS = 4000
SKEW_NS = 20_000


def hold(gpu: Backend, size: int, ways: Sequence[Choice]) -> None:
    ranks = virtual_ranks(gpu, lay_out(size, LARGEST), first_epoch=0xFFFFFFF0)
    mix = Stress(gpu, ranks, size, SKEW_NS, ways)
    mix.churn(CALLS)
    found = mix.found()
    assert [one["checked"] for one in found] == [mix.made] * size and mix.made >= CALLS
    assert mix.good(found), found


@pytest.mark.invariant("C13")
def test_words(gpu: Backend, size: int) -> None:
    hold(gpu, size, (ONE_SHOT_WORDS,))


@pytest.mark.invariant("C13")
def test_sentinel(gpu: Backend, size: int) -> None:
    hold(gpu, size, (ONE_SHOT_SENTINEL,))


@pytest.mark.invariant("C13")
def test_chunks(gpu: Backend, size: int) -> None:
    hold(gpu, size, (TWO_SHOT,))


@pytest.mark.invariant("C13")
def test_staged(gpu: Backend, size: int) -> None:
    hold(gpu, size, (STAGED, STAGED_TWO_SHOT))


@pytest.mark.invariant("C13")
@pytest.mark.invariant("C2")
def test_mixed_grids(gpu: Backend, size: int) -> None:
    hold(gpu, size, REDUCTIONS)
