"""Rules of capture (G), memory (W), arenas (A), collectives (C) and exchanges (F) that the suite holds a backend to.

A rule wants a test and a control arm: the same program done right, which must stay green. One that the suite
cannot show says why in ``elsewhere``, so that a hole is never silent.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

SUITE = Path(__file__).parent / "conformance"


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        id: as tests name it.
        title: what it makes impossible, or certain.
        elsewhere: why the suite has no test of it; empty for a rule that it must show.
        cpu_only: why other backends than the CPU's cannot show it; empty for a rule that every backend shows.
    """

    id: str
    title: str
    elsewhere: str = ""
    cpu_only: str = ""

    def not_applicable(self, backend: str) -> str:
        """Why this backend is not asked about it, or nothing."""
        return self.elsewhere or (self.cpu_only if backend != "cpu" else "")


RULES: tuple[Rule, ...] = (
    Rule("G1", "a graph has one segment more than it has breaks"),
    Rule("G2", "captures do not nest, and a container is filled once, captured or not"),
    Rule("G3", "inert, captured and failed differ; nothing of a failed capture can be read"),
    Rule("G4", "switched off does exactly the work of a backend that cannot capture"),
    Rule("G5", "a full capture refuses breaks, a piecewise one splits at each"),
    Rule("G6", "a break says where its output goes"),
    Rule("G7", "what a break reads lives as long as the graph"),
    Rule("G8", "forks are joined before a segment closes"),
    Rule("G9", "an event belongs to one segment of one graph"),
    Rule("G10", "no allocation, host read or first-time work inside a capture"),
    Rule("G11", "host values baked into a graph are found by capturing twice"),
    Rule("G12", "an input that was not refreshed stops the replay"),
    Rule("G13", "padding is rewritten every step, and capture sees valid work"),
    Rule("G14", "an output is dead after the next replay, and says so in checked mode"),
    Rule("G15", "a graph is found by its whole descriptor"),
    Rule("G16", "a ladder holds its exact maximum and every width that can occur"),
    Rule("G17", "the order of captures changes neither results nor memory"),
    Rule("G18", "staging and outputs are sized by the largest descriptor before any capture"),
    Rule("G19", "a scratch session gives back all it took"),
    Rule("G20", "budget and reserve are checked before each capture"),
    Rule("G21", "live executables stay below the driver's ceiling"),
    Rule("G22", "memory has one user at a time; nothing is destroyed during a capture"),
    Rule("G23", "a segment without work is an error unless declared"),
    Rule("G24", "capture and replay run in one grad mode"),
    Rule("G25", "a failing question whether one captures is no answer"),
    Rule(
        "G26",
        "ranks agree before a capture, and all see one rank's failure",
        cpu_only="shown by two CPU processes over gloo; the vote itself touches no device",
    ),
    Rule(
        "G27",
        "host decisions use results of a fixed number of steps ago",
        elsewhere="for whoever drives steps, shown by the engine's own tests; no call of a backend takes part",
    ),
    Rule("W1", "a sealed workspace does not grow"),
    Rule("W2", "a smaller descriptor's addresses are prefixes of the largest's"),
    Rule("W3", "memory of a scope is recycled at its end, and poisoned in checked mode"),
    Rule("W4", "workspace memory does not move while a graph may read it"),
    Rule("W5", "arithmetic outside of ops is reported"),
    Rule("W6", "a fork has memory of its own until it is joined"),
    Rule("A1", "an arena's plan is arithmetic, with a reason where it does not fit"),
    Rule("A2", "a whole ladder is checked against the plan before anything is captured"),
    Rule("A3", "slots are disjoint and aligned, and follow from no count that still grows"),
    Rule("A4", "offsets follow from capacity and are equal on all ranks, before allocation and after capture"),
    Rule("A5", "an arena does not change during a capture, and nothing is replayed before it is settled"),
    Rule("A6", "a descriptor takes its slots once; those of a scratch session come back"),
    Rule("A7", "a write past flags or slots is found in checked mode"),
    Rule("A8", "memory that cannot be exported is refused before anything is allocated"),
    Rule("A9", "nobody unmaps or frees before all ranks are at the end"),
    Rule("A10", "an arena is zeroed and filled before any rank can use it"),
    Rule("A11", "sizes are checked and have 64 bits"),
    Rule("A12", "a rank that took nothing still takes part"),
    Rule("A13", "ranks of a group need not be 0, 1, 2 outside of it"),
    Rule("C1", "a sum has the same bits on every rank and by every algorithm"),
    Rule("C2", "epochs and flags are device state: odd call counts replay right, and epochs wrap"),
    Rule("C3", "graphs of several sizes and eager calls interleave on one communicator"),
    Rule("C4", "all calls of a channel lie on one path, on one stream at a time"),
    Rule("C5", "the choice of an algorithm is a pure function with declared ranges"),
    Rule("C6", "checked mode names the first difference between ranks' calls before anybody waits"),
    Rule("C7", "every wait is bounded, and its sticky error names rank, peer, call and flags"),
    Rule("C8", "ranks that come late, in any order, of any group, get right sums"),
    Rule("C9", "no value is taken for a flag"),
    Rule("C10", "offsets, odd sizes and zero tokens are handled, the rest refused with the reason"),
    Rule("C11", "a call before the capture of a context gives defined values"),
    Rule("C12", "unequal shapes across ranks are an error, not a hang"),
    Rule(
        "C13",
        "memory order is written in one table, with a stress test for each row",
        elsewhere="each backend has its own table and stress: tests/cpu/collectives for the CPU, tests/gpu for devices",
    ),
    Rule(
        "C14",
        "the protocol is right in all interleavings of a model, and broken variants are not",
        elsewhere="shown by the model in halma.hal.testing.protocol (tests/cpu/protocol); no backend takes part",
    ),
    Rule("C15", "every call sends each peer a header and waits for one from each"),
    Rule("C16", "spinning grids that can run at once fit the device together"),
    Rule(
        "C17",
        "under dependent launch every kernel waits before it touches shared state or exits",
        elsewhere="shown by tests/gpu on devices that have dependent launch, and by the model of the protocol",
    ),
    Rule("C18", "all kernels are loaded before the first spin"),
    Rule("C19", "no flag lies inside data on stores that may be seen in part"),
    Rule("F1", "worst-token mode never touches the host, and shares no counter with host-synced mode"),
    Rule("F2", "combine takes what dispatch handed out: one struct, sizes on the device"),
    Rule("F3", "rows, gaps and tails without a token are never read"),
    Rule("F4", "ranks without tokens, one expert for all, the last one, one rank for all are legal"),
    Rule(
        "F11",
        "launch numbers are for one layout of ranks and one architecture, and checked when they are chosen",
        elsewhere="pure arithmetic, shown by tests/cpu/exchange; no backend takes part",
    ),
    Rule("F12", "identity experts give back weighted inputs exactly, token by token"),
    Rule("F13", "replays with fresh routing, each followed by an eager step without a sync"),
    Rule("F14", "ranks compare their geometry field by field before anything is allocated"),
    Rule("F16", "a rank that stays away or dies ends the others' waits with its name"),
)


def rule(name: str) -> Rule | None:
    """The rule of that id, in any case."""
    return next((one for one in RULES if one.id == name.upper()), None)


@dataclass(frozen=True)
class Written:
    """A test function of the suite, as written: ``controls`` are the rules it is a control arm of."""

    id: str
    rules: tuple[str, ...]
    controls: tuple[str, ...]


def written_tests(suite: Path = SUITE) -> list[Written]:
    """The tests that name a rule, read from the source: no backend and no pytest is needed."""
    found: list[Written] = []
    for path in sorted(suite.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = [mark for mark in map(_invariant, node.decorator_list) if mark is not None]
                rules = tuple(name for name, control in marks if not control)
                controls = tuple(name for name, control in marks if control)
                if marks:
                    found.append(Written(f"{path.name}::{node.name}", rules, controls))
    return found


def _invariant(decorator: ast.expr) -> tuple[str, bool] | None:
    """(rule, control) of ``@pytest.mark.invariant("G1", control=True)``."""
    if not (isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute)):
        return None
    if decorator.func.attr != "invariant" or not decorator.args or not isinstance(decorator.args[0], ast.Constant):
        return None
    control = any(
        word.arg == "control" and isinstance(word.value, ast.Constant) and word.value.value is True
        for word in decorator.keywords
    )
    return str(decorator.args[0].value), control
