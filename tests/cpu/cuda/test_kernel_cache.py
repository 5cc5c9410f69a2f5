"""Compiled kernels on disk: keyed by all that went in, whole or not there, compiled again when damaged."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from halma.backends.torch_device.kernel_cache import KernelCache, cache_directory, key_of
from halma.hal.backend import KernelSource

SOURCE = KernelSource("ring/one shot", "text", {"dialect.h": "a"}, {"N": "4"})
FLAGS = ["-arch=sm_90a", "-std=c++17"]

pytestmark = pytest.mark.torchfree


def test_every_ingredient_changes_the_key() -> None:
    base = key_of(SOURCE, FLAGS, (13, 0))
    others = [
        key_of(replace(SOURCE, text="text2"), FLAGS, (13, 0)),
        key_of(replace(SOURCE, headers={"dialect.h": "b"}), FLAGS, (13, 0)),
        key_of(replace(SOURCE, headers={"other.h": "a"}), FLAGS, (13, 0)),
        key_of(replace(SOURCE, defines={"N": "5"}), FLAGS, (13, 0)),
        key_of(SOURCE, ["-arch=sm_100a", "-std=c++17"], (13, 0)),
        key_of(SOURCE, FLAGS, (13, 1)),
    ]
    assert len({base, *others}) == 7 and key_of(replace(SOURCE, name="renamed"), FLAGS, (13, 0)) == base


def test_the_second_request_compiles_nothing_also_in_another_process(tmp_path: Path) -> None:
    first, second = KernelCache(tmp_path / "new"), KernelCache(tmp_path / "new")
    assert first.get(SOURCE, "k", lambda: b"cubin") == b"cubin"
    assert second.get(SOURCE, "k", lambda: pytest.fail("compiled again")) == b"cubin"
    assert (first.compiled, second.compiled, second.hits) == (1, 0, 1)
    names = [path.name for path in (tmp_path / "new").iterdir()]
    assert names == ["ring_one_shot-k.cubin"], "nothing half-written stays"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_a_damaged_entry_is_found_and_compiled_again(tmp_path: Path, damage: str) -> None:
    KernelCache(tmp_path).get(SOURCE, "k", lambda: b"x" * 100)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-1] ^= 1
    path.write_bytes({"cut": data[:-10], "flipped": data, "empty": b"", "other": b"\x7fELF"}[damage])
    cache = KernelCache(tmp_path)
    assert cache.get(SOURCE, "k", lambda: b"again") == b"again" and (cache.damaged, cache.compiled) == (1, 1)
    assert KernelCache(tmp_path).get(SOURCE, "k", lambda: pytest.fail("not mended")) == b"again"


def test_a_failing_build_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        KernelCache(tmp_path).get(SOURCE, "k", lambda: b"%d" % (1 // 0))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    cache = KernelCache(blocked / "cuda")
    assert [cache.get(SOURCE, "k", lambda: b"cubin") for _ in range(2)] == [b"cubin"] * 2 and cache.compiled == 2


def test_many_writers_of_one_entry_leave_a_whole_one(tmp_path: Path) -> None:
    def once(_: int) -> bytes:
        return KernelCache(tmp_path).get(SOURCE, "k", lambda: b"y" * 300_000)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(once, range(32))) == {b"y" * 300_000}
    assert len(list(tmp_path.iterdir())) == 1


def test_where_the_folder_is() -> None:
    assert cache_directory("cuda", {"XDG_CACHE_HOME": "/x"}) == Path("/x/halma/cuda")
    assert cache_directory("cuda", {"XDG_CACHE_HOME": "", "HOME": "/h"}) == Path("/h/.cache/halma/cuda")
    assert cache_directory("cuda", {"XDG_CACHE_HOME": "relative", "HOME": "/h"}) == Path("/h/.cache/halma/cuda")
    assert os.path.isabs(cache_directory("cuda", {}))
