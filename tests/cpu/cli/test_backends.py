"""``halma backends``."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.cpu.cli.conftest import Halma
from tests.cpu.hal.plugins import absent, entry, host

pytestmark = pytest.mark.torchfree


def _stars(out: str) -> dict[str, str]:
    """Star by backend, of the plain table."""
    rows = [line for line in out.splitlines()[1:] if line]
    return {line[1:].split()[0]: line[0].strip() for line in rows if line[0] in " *"}


def test_one_line_a_backend_with_a_star_at_the_one_that_auto_takes(halma: Halma, with_backends: Any) -> None:
    with_backends(host(), entry("one"), entry("two", absent, dist="pkg"))
    done = halma("backends")
    assert done.code == 0
    assert _stars(done.out) == {"cpu": "", "one": "*", "two": ""}
    (line,) = [line for line in done.out.splitlines() if "two" in line]
    assert [cell.strip() for cell in line.split("  ") if cell] == [
        *("two", "not usable", "no driver answered", "cpu", "1.0", "pkg")
    ]


@pytest.mark.parametrize(
    ("asked", "code", "star"), [("cpu", 0, "cpu"), ("one", 0, "one"), ("two", 2, None), ("auto", 2, None)]
)
@pytest.mark.parametrize("how", ["option", "environment"])
def test_the_code_is_0_only_if_what_was_asked_for_is_usable(
    halma: Halma, with_backends: Any, monkeypatch: pytest.MonkeyPatch, asked: str, code: int, star: str | None, how: str
) -> None:
    with_backends(host(), entry("one"), entry("two", absent), entry("three"))
    if how == "environment":
        monkeypatch.setenv("HALMA_BACKEND", asked)
    done = halma("backends", *(["--backend", asked] if how == "option" else []))
    assert done.code == code
    assert [name for name, mark in _stars(done.out).items() if mark] == ([star] if star else [])
    assert done.err.startswith("halma: ") == (code == 2)


def test_an_unknown_name_is_refused_without_a_table(halma: Halma, with_backends: Any) -> None:
    with_backends(host())
    done = halma("backends", "--backend", "cpi")
    assert (done.code, done.out) == (2, "")
    assert 'did you mean "cpu"?' in done.err


def test_nothing_asked_and_nothing_chosen_is_a_list_with_the_way_out(halma: Halma, with_backends: Any) -> None:
    with_backends(host(), entry("one", absent))
    done = halma("backends")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-2:] == [
        "none is chosen: no accelerator can be used, and no backend was named",
        "to run without a GPU: --backend cpu",
    ]


def test_json_is_a_contract(halma: Halma, with_backends: Any) -> None:
    with_backends(host(), entry("one", simulated=True), entry("two", absent, dist="pkg"))
    document = json.loads(halma("backends", "--json").out)
    assert document["schema"] == "halma.backends/1"
    assert (document["asked"], document["chosen"], document["patched"]) == ("auto", None, [])
    assert document["refusal"] == "no accelerator can be used, and no backend was named"
    cpu, one, two = document["backends"]
    assert (cpu["name"], cpu["accelerator"], cpu["usable"], cpu["evidence"]) == ("cpu", False, True, "cpu")
    assert (one["simulated"], one["evidence"], one["chosen"]) == (True, "simulated", False)
    assert (two["usable"], two["reason"]) == (False, "no driver answered")
    assert two["plugins"] == [{"distribution": "pkg", "version": "1.0", "entry_point": "pkg.two"}]


def test_a_doubled_name_is_shown_with_both_claimants(halma: Halma, with_backends: Any) -> None:
    with_backends(host(), entry("x", dist="first"), entry("x", dist="second"))
    done = halma("backends")
    assert done.code == 0
    assert "claimed by first 1.0 and by second 1.0" in done.out
    assert 'none is chosen: auto cannot choose: "x" is claimed twice' in done.out


def test_it_imports_no_torch() -> None:
    code = (
        "import sys\nfrom halma.cli.main import run\nassert run(['backends']) == 0\n"
        "print('torch' in sys.modules, 'rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("False ")
