"""``halma capture --arena``: the plan, and what is refused with which way out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cpu.cli.conftest import Halma

MIB = 1 << 20
FLASH = ("capture", "--model", "V4-Flash", "--query-len", "5")


def plan(halma: Halma, *arguments: str) -> dict[str, Any]:
    done = halma(*FLASH, "--json", *arguments)
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.invariant("A1")
@pytest.mark.parametrize("world", ["2", "4", "6", "8"])
def test_the_channel_plan_of_v4_flash(halma: Halma, world: str) -> None:
    found = plan(halma, "--arena", "channel", "--world", world, "--max-requests", "64")
    assert (found["schema"], found["arena"], found["world"]) == ("halma.arena/1", "channel", int(world))
    assert found["bytes"] <= found["limit"] == 32 * MIB and found["covered"] == 7 and found["uncovered"] == []
    lanes = {row["lane"]: row for row in found["lanes"]}
    assert lanes["words"]["largest"] == 65536 and lanes["staging"]["largest"] == 320 * 8192
    assert sum(row["bytes"] for row in found["lanes"]) < found["bytes"]


@pytest.mark.invariant("A1")
@pytest.mark.parametrize(("most", "mib", "slots"), [(16, 184, 435), (64, 512, 609)])
def test_the_slots_of_v4_flash(halma: Halma, most: int, mib: int, slots: int) -> None:
    found = plan(halma, "--arena", "slots", "--world", "8", "--max-requests", str(most), "--chunk", "8195")
    assert found["bytes"] == mib * MIB and sum(row["slots"] for row in found["slots"]) == slots


@pytest.mark.invariant("A1", control=True)
def test_the_plan_as_a_table(halma: Halma) -> None:
    done = halma(*FLASH, "--arena", "slots", "--world", "4", "--max-requests", "16", "--chunk", "8195")
    assert done.code == 0 and "verify(80 tokens, 16 requests)  87 " in done.out
    assert "192,937,984 bytes a rank (184 MiB), 347,955,200 left of the limit" in done.out


def test_lanes_are_those_of_a_backend_that_is_named(halma: Halma) -> None:
    done = halma("capture", "--backend", "cpu", "--arena", "channel", "--json")
    lanes = {row["lane"] for row in json.loads(done.out)["lanes"]}
    assert done.code == 0 and "words" in lanes and "staging" not in lanes, "its stores of 8 bytes are seen whole"


@pytest.mark.invariant("A2")
def test_a_ladder_that_does_not_fit_is_refused_with_what_would(halma: Halma) -> None:
    arguments = (*FLASH, "--world", "8", "--chunk", "8195", "--sizes", "1,2,4,8,16,32,64,96", "--max-requests", "128")
    done = halma(*arguments, "--arena", "slots")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [
        "halma: the capture ladder does not fit the arena plan",
        "  asked: 9 descriptors up to (640 tokens, 128 requests), 87 calls each, world 8, slots",
        "  found: 1,334,943,744 bytes needed, 536,870,912 allowed; first that does not fit: "
        "verify(480 tokens, 96 requests)",
        "         uncovered: verify(480 tokens, 96 requests)",
        "         uncovered: verify(640 tokens, 128 requests)",
        "  do:    --arena channel (needs 31.95 MiB), or --max-requests 64",
    ]


@pytest.mark.parametrize(
    ("arguments", "what", "do"),
    [
        (["--arena", "both"], 'no kind of arena called "both"', "--arena slots"),
        (["--arena", "slots", "--world", "3"], "not for 3: collectives take the vendor's library", "another size"),
        (["--arena", "channel", "--world", "0"], "--world takes a number from 1 on", "1 or more"),
        (["--arena", "channel", "--query-len", "0"], "--query-len takes a number from 1 on", "1 or more"),
        (["--arena", "channel", "--max-requests", "4096"], "33,554,432 allowed", "--max-requests 512"),
        (["--arena", "channel", "--model", "V5"], 'no model called "V5"', "config.json"),
    ],
)
def test_what_cannot_be_planned_is_refused(halma: Halma, arguments: list[str], what: str, do: str) -> None:
    done = halma("capture", *(() if "--model" in arguments else ("--model", "V4-Flash")), *arguments)
    assert (done.code, done.out) == (2, "") and what in done.err and do in done.err
