"""The parts of :mod:`ci.gpu_table`: what each runs, what it needs, and how its result is read."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ci.schema import ROOT

CASES = ("all_layers", "hash_only", "tiny_v4_exact", "tiny_v4_quant")
ORDERS = ("descending", "ascending", "shuffled(7)")
CONFORMANCE = "src/halma/hal/testing/conformance"
RANKS = ("test_collective_*.py", "test_arena_*.py", "test_exchange_*.py")
"""Files of the suite whose ranks wait for each other on a device."""
STRESS_CALLS = 1_000_000
PROCESSES = "test_rank_processes.py"
STREAMS = ("tests/gpu/collectives", "tests/gpu/exchange", "tests/gpu/roles")
PYTHON = sys.executable

Read = Callable[[str, int, Path], "Result"]
Commands = Callable[[Path], Sequence[Sequence[str]]]


@dataclass(frozen=True)
class Result:
    """A part's row. ``ran`` is false where it was not begun."""

    passed: int
    failed: int
    skipped: int
    seconds: float
    note: str
    ran: bool = True

    def __add__(self, other: Result) -> Result:
        notes = [note for note in (self.note, other.note) if note]
        counts = (self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)
        return Result(*counts, self.seconds + other.seconds, "; ".join(dict.fromkeys(notes)))

    def line(self) -> str:
        """In words."""
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped, {self.seconds:.0f} s {self.note}"


@dataclass(frozen=True)
class Machine:
    """Where the parts run. ``sanitizer``: compute-sanitizer is there; ``workers``: pytest-xdist is."""

    backend: str
    devices: Sequence[str]
    driver: str
    python: str
    versions: Mapping[str, str]
    sanitizer: bool
    workers: bool


class Share(Enum):
    """See :class:`Part`."""

    SHARED = "shared"
    DEVICE = "device"
    MACHINE = "machine"


@dataclass(frozen=True)
class Part:
    """One row of the table.

    Attributes:
        seconds: its time limit.
        share: how much of the machine it takes. SHARED: a device beside others; DEVICE: a device that nothing else uses
            meanwhile, because its ranks are streams that spin for each other or it looks at free memory; MACHINE: all
            devices, nothing else running.
        missing: why it cannot run here; empty where it can.
    """

    name: str
    what: str
    seconds: float
    commands: Commands
    read: Read
    share: Share = Share.SHARED
    missing: str = ""


# -- reading results ------------------------------------------------------------------------------------


def by_report(said: str, status: int, report: Path) -> Result:
    """Counts of the report that our pytest plugin wrote."""
    if not report.exists():
        return Result(0, 1, 0, 0.0, f"left no report, ended with status {status}: {_last(said)}")
    counts = json.loads(report.read_text(encoding="utf-8"))["counts"]
    failed = sum(counts.get(outcome, 0) for outcome in ("failed", "error", "xpassed"))
    passed = int(counts.get("passed", 0))
    note = "" if status == 0 or failed else f"ended with status {status}: {_last(said)}"
    return Result(passed, failed + bool(note), counts.get("skipped", 0), 0.0, note)


def by_sanitizer(said: str, status: int, report: Path) -> Result:
    """As :func:`by_report`, with the tool's own sum."""
    found = by_report(said, status, report)
    sums = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", said)
    return found + Result(0, 0 if sums else 1, 0, 0.0, sums[-1] if sums else "the tool gave no sum")


def by_verify(said: str, status: int, report: Path) -> Result:
    """A golden case each."""
    document = _document(said)
    if document is None:
        return Result(0, 1, 0, 0.0, f"no answer, status {status}: {_last(said)}")
    bad = [case["case"] for case in document["cases"] if not case["passed"]]
    failed = len(bad) or int(status != 0)
    note = f"beyond tolerance: {', '.join(bad)}" if bad else ""
    return Result(len(document["cases"]) - len(bad), failed, 0, 0.0, note)


def by_capture(said: str, status: int, report: Path) -> Result:
    """One order: everything captured, and a pool that did not grow (G17, G10)."""
    document = _document(said)
    if status != 0 or document is None:
        return Result(0, 1, 0, 0.0, f"no answer, status {status}: {_last(said)}")
    whole = document["captured"] == len(document["descriptors"]) and document["pool_growth"] == 0
    note = f"{document['order']}: {document['total_bytes']:,} bytes"
    if "unshared" in document:
        note += f", unshared {document['unshared']['times']:g} times as many"
    if document["pool_growth"]:
        note += f", pool grown by {document['pool_growth']:,}"
    return Result(int(whole), int(not whole), 0, 0.0, note)


def by_status(said: str, status: int, report: Path) -> Result:
    """One result, with the last line."""
    good = status == 0
    return Result(int(good), int(not good), 0, 0.0, _last(said))


def by_probes(said: str, status: int, report: Path) -> Result:
    """A probe each."""
    document = _document(said)
    if document is None:
        return Result(0, 1, 0, 0.0, f"no answer, status {status}: {_last(said)}")
    answered = len({row["probe"] for row in document["rows"]})
    return Result(answered, int(status != 0), 0, 0.0, f"{len(document['rows'])} answers")


def _document(said: str) -> dict[str, Any] | None:
    """The JSON object that a command printed, among warnings of others."""
    decoder = json.JSONDecoder()
    for found in re.finditer(r"^\{", said, re.MULTILINE):
        try:
            return decoder.raw_decode(said[found.start() :])[0]
        except json.JSONDecodeError:
            continue
    return None


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:160].replace("|", "/") if lines else "it said nothing"


# -- the parts ------------------------------------------------------------------------------------------


def parts(here: Machine) -> dict[str, Part]:
    """All of them, by name, in order of the table."""
    found = [*_suites(here), *_commands(here), *_ranks(here), *_tools(here)]
    return {part.name: part for part in found}


def _pytest(here: Machine, *arguments: str, workers: int = 0) -> Commands:
    def commands(report: Path) -> list[list[str]]:
        line = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "-q", *_expanded(arguments)]
        line += ["--halma-backend", here.backend, "--halma-require-backend", here.backend]
        line += ["-n", str(workers), "--dist", "loadfile"] if workers and here.workers else []
        return [[*line, "--halma-report", str(report)]]

    return commands


def _expanded(arguments: Sequence[str]) -> list[str]:
    """Patterns of files, spelt out: no shell does it."""
    found: list[str] = []
    for one in arguments:
        found += (
            sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(one)) if "*" in one and one[0] != "-" else [one]
        )
    return found


def _suites(here: Machine) -> list[Part]:
    ignored = [f"--ignore-glob=*/{name}" for name in RANKS]
    ranked = [f"{CONFORMANCE}/{name}" for name in RANKS]
    return [
        Part(
            "gpu",
            "tests/gpu without ranks",
            450,  # with 8 workers alone 135 s, with 5 beside other parts more than 300
            _pytest(here, "tests/gpu/test_*.py", workers=8),
            by_report,
        ),
        Part(
            "conformance",
            "the suite's rules of one process",
            240,
            _pytest(here, CONFORMANCE, *ignored, workers=6),
            by_report,
        ),
        Part(
            "collectives",
            "tests/gpu/collectives, exchange and roles: kernels, ranks as streams of one device",
            400,
            _pytest(here, *STREAMS, f"--ignore-glob=*/{PROCESSES}", "--timeout=120"),
            by_report,
            Share.DEVICE,
        ),
        Part(
            "conformance-ranks",
            "the suite's rules of arenas, collectives and the exchange",
            300,
            _pytest(here, *ranked, "--timeout=60"),
            by_report,
            Share.MACHINE,
        ),
        Part(
            "rank-processes",
            "tests/gpu whose ranks are processes, one a device",
            400,
            _pytest(here, f"tests/gpu/*/{PROCESSES}", "--timeout=200", "-m", "not nightly"),
            by_report,
            Share.MACHINE,
            missing=_two(here),
        ),
    ]


def _two(here: Machine) -> str:
    return "" if len(here.devices) > 1 else f"ranks need two devices, there are {len(here.devices)}"


def _halma(here: Machine, *arguments: str) -> list[str]:
    return [PYTHON, "-m", "halma", *arguments, "--backend", here.backend, "--json"]


def _commands(here: Machine) -> list[Part]:
    cases = [f"tests/data/cases/{case}.safetensors" for case in CASES]
    absent = [case for case in cases if not (ROOT / case).exists()]
    no_cases = f"there is no {', '.join(absent)}" if absent else ""
    captures = [_halma(here, "capture", "--order", order) for order in ORDERS]
    captures[0] = [*captures[0], "--compare-unshared"]
    found = [
        Part(
            f"verify-{graph}",
            f"golden cases, graph {graph}",
            200,
            lambda _, graph=graph: [_halma(here, "verify", *cases, "--graph", graph)],
            by_verify,
            missing=no_cases,
        )
        for graph in ("on", "off")
    ]
    return [
        *found,
        Part("capture", "the ladder in three orders", 200, lambda _: captures, by_capture, Share.DEVICE),
        Part(
            "probes",
            "questions about captures that a device answers",
            150,
            lambda _: [[PYTHON, "-m", "benchmarks.probes_cuda", "--json"]],
            by_probes,
            missing="" if here.backend == "cuda" else f"written for cuda, not {here.backend}",
        ),
    ]


def _ranks(here: Machine) -> list[Part]:
    world = max((size for size in (2, 4, 6, 8) if size <= len(here.devices)), default=0)
    virtual = [] if world else ["--virtual"]
    stress = [PYTHON, "-m", "benchmarks.allreduce_stress", "--ranks", str(world or 2), *virtual]
    launch = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    exact = "tests/data/cases/tiny_v4_exact.safetensors"
    two = _two(here)

    def on_two(*arguments: str) -> list[str]:
        return [*launch, *_halma(here, *arguments, "--tp", "2")[1:]]

    return [
        Part(
            "stress",
            f"{STRESS_CALLS:,} all-reduces, every result checked",
            200,
            lambda _: [[*stress, "--calls", str(STRESS_CALLS)]],
            by_status,
            Share.MACHINE,
        ),
        Part(
            "ranks-verify",
            "a golden case on two ranks, graph on and off",
            120,
            lambda _: [on_two("verify", exact, "--graph", graph) for graph in ("on", "off")],
            by_verify,
            Share.MACHINE,
            missing=two,
        ),
        Part(
            "ranks-capture",
            "the ladder on two ranks",
            90,
            lambda _: [on_two("capture")],
            by_capture,
            Share.MACHINE,
            missing=two,
        ),
    ]


def _tools(here: Machine) -> list[Part]:
    missing = "" if here.sanitizer else "no compute-sanitizer (COMPUTE_SANITIZER=/path/to/it)"
    missing = missing if here.backend == "cuda" else f"compute-sanitizer is of cuda, not {here.backend}"
    return [
        Part(
            name,
            f"the collective kernels under {name}",
            300,
            lambda report, name=name: [["sh", f"tests/gpu/{name}.sh", "--halma-report", str(report)]],
            by_sanitizer,
            Share.DEVICE,
            missing=missing,
        )
        for name in ("memcheck", "racecheck")
    ]
