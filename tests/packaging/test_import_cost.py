"""What importing costs, and what must not come along. CPU time of child processes, so a busy machine does not count."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.torchfree

Child = Callable[..., "subprocess.CompletedProcess[str]"]

LIMIT = 0.15
TIMED = """
import sys, time
{before}
begin = time.process_time()
{code}
print(time.process_time() - begin, "torch" in sys.modules)
"""
RUN = """
import contextlib, io, sys
from halma.cli.main import run
sys.argv = ["halma", *{arguments!r}]
out = io.StringIO()
try:
    with contextlib.redirect_stdout(out):
        code = run()
except SystemExit as error:
    code = error.code
heavy = sorted({{"torch", "numpy", "transformers", "tokenizers"}} & set(sys.modules))
print(code or 0, heavy)
print(out.getvalue())
"""


def seconds(child: Child, code: str, before: str = "") -> tuple[float, bool]:
    """Least seconds of five children, since only neighbours make it more, and whether torch was imported."""
    times: list[float] = []
    torch = False
    for _ in range(5):
        done = child(TIMED.format(code=code, before=before))
        assert done.returncode == 0, done.stderr
        time, saw_torch = done.stdout.split()
        times.append(float(time))
        torch = torch or saw_torch == "True"
    return min(times), torch


STANDARD = "import dataclasses, importlib.metadata, logging, typing"
"""What most programs have imported before us; 0.05 s of CPU on a quiet machine, three times that on a busy one."""


@pytest.mark.parametrize(
    ("code", "before"),
    [("import halma", ""), ("import halma.hal.registry, halma.hal.settings", STANDARD)],
    ids=["halma", "registry"],
)
def test_importing_is_cheap_and_brings_no_torch(child: Child, code: str, before: str) -> None:
    spent, torch = seconds(child, code, before)
    assert not torch
    assert spent < LIMIT


@pytest.mark.mutant
def test_the_measurement_sees_a_slow_import(child: Child) -> None:
    slow = "import halma, time\nwhile time.process_time() - begin < 0.2: pass"
    assert seconds(child, slow)[0] > LIMIT


@pytest.mark.mutant
def test_the_measurement_sees_torch(child: Child) -> None:
    code = "sys.modules['torch'] = sys"
    done = child(TIMED.format(code=code, before=""))
    assert done.stdout.split()[1] == "True"


@pytest.mark.parametrize("arguments", [["backends"], ["backends", "--json"], ["--help"]], ids=" ".join)
def test_the_command_line_lists_backends_without_torch(child: Child, arguments: list[str]) -> None:
    done = child(RUN.format(arguments=arguments))
    assert done.returncode == 0, done.stderr
    first, _, rest = done.stdout.partition("\n")
    assert first == "0 []"
    assert "cpu" in rest or "backends" in rest


def test_the_pytest_plugin_brings_no_torch(child: Child) -> None:
    done = child("import sys, halma.hal.testing.plugin\nprint('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr
