"""The command: a table of verdicts, and the run that refutes a variant."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from halma.hal.testing.protocol.cases import Variant
from halma.hal.testing.protocol.variants import VARIANTS, variant
from halma.hal.testing.protocol.verdicts import Counterexample, Finding, as_expected, find

_COLUMNS = ("variant", "what", "bounds", "states", "skew", "verdict", "moves", "expected", "s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Search variants and print what came out.

    Returns:
        0 when every verdict is the expected one, 1 when one is not, 2 when there is no such variant.
    """
    parser = argparse.ArgumentParser(
        prog="python -m halma.hal.testing.protocol",
        description="Search the model of the slot-and-epoch protocol (rule C14): ours has to hold, the others to fail.",
    )
    parser.add_argument("--variant", metavar="NAME", help="this one alone, with its counterexample move by move")
    parser.add_argument("--nightly", action="store_true", help="the large bounds too: about a quarter of an hour")
    options = parser.parse_args(arguments)
    if options.variant is None:
        chosen = [one for one in VARIANTS if options.nightly or not one.nightly]
    else:
        one = variant(options.variant)
        if one is None:
            names = ", ".join(known.name for known in VARIANTS)
            print(f"there is no variant {options.variant!r}\n  found: {names}", file=sys.stderr)
            return 2
        chosen = [one]
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(*_COLUMNS, box=SIMPLE_HEAD)
    right = 0
    last: Counterexample | None = None
    for one in chosen:
        started = time.monotonic()
        finding = find(one)
        expected = as_expected(one, finding)
        right += expected
        last = finding.counterexample
        table.add_row(*_row(one, finding, expected), f"{time.monotonic() - started:.1f}")
    console.print(table)
    if options.variant is not None and last is not None:
        for line in _told(last):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"{right} of {len(chosen)} as expected")
    return 0 if right == len(chosen) else 1


def bounds(one: Variant) -> str:
    """Ranks, calls, words a pair and blocks that a variant is searched to."""
    calls = {made for _, script in one.cases() for made in script}
    longest = max(len(script) for _, script in one.cases())
    parts = (
        f"{_range(one.worlds)} ranks",
        f"{longest} calls",
        f"{max(made.words for made in calls)} words",
        f"{max(made.grid for made in calls)} blocks",
    )
    return ", ".join(parts) + (", each action" if one.whole else "")


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{min(numbers)}-{max(numbers)}"


def _row(one: Variant, finding: Finding, expected: bool) -> tuple[str, ...]:
    moves = "" if finding.counterexample is None else str(len(finding.counterexample.moves))
    found = (f"{finding.states:,}", str(finding.skew), finding.verdict, moves)
    return (one.name, one.about, bounds(one), *found, "yes" if expected else f"NO: {one.verdict}")


def _told(shown: Counterexample) -> list[str]:
    """A counterexample in words: the calls, the run, how it ends."""
    lines = [f"{shown.world} ranks; calls:"]
    lines += [f"  {number}: {_call(made)}" for number, made in enumerate(shown.script)]
    lines += ["run:", *(f"  {number:3} {line}" for number, line in enumerate(shown.outcome.lines, 1))]
    for rank, call, wanted, taken in shown.outcome.wrong:
        whose = "a word that nobody wrote" if taken.call < 0 else f"that of call {taken.call}"
        lines.append(f"rank {rank} ends a step of call {call} with {whose} in place of rank {wanted.sender}'s word")
    if not shown.outcome.wrong:
        lines += ["from here on, all stores visible:", *(f"  {line}" for line in shown.outcome.stuck)]
    return lines


def _call(made: object) -> str:
    text = str(made).removeprefix("Call(").removesuffix(")")
    return text.replace("silent=frozenset(), ", "")
