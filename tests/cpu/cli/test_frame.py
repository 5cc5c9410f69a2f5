"""How commands begin and end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from halma import __version__
from halma.cli import main
from tests.cpu.cli.conftest import Halma
from tests.cpu.hal.plugins import entry, host

pytestmark = pytest.mark.torchfree


def test_version_and_help(halma: Halma) -> None:
    assert halma("--version").out == f"halma {__version__}\n"
    for arguments in ((), ("--help",), ("-h",)):
        done = halma(*arguments)
        assert done.code == 0
        assert [name for name in (command.__name__ for command in main.COMMANDS) if name not in done.out] == []


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("backends", "--nonsense"), ("backends", "extra"), ("explain", "--rows", "many")]
)
def test_wrong_usage_is_code_2(halma: Halma, arguments: tuple[str, ...]) -> None:
    done = halma(*arguments)
    assert done.code == 2
    assert "Usage: halma" in done.err
    assert done.out == ""


def test_a_refusal_is_a_message_and_code_2(halma: Halma, with_backends: Any) -> None:
    with_backends(host(), entry("fake"))
    done = halma("generate", "--prompt", "x", "--backend", "fak")
    assert done.code == 2
    assert done.out == ""
    assert done.err.splitlines() == [
        'halma: no backend called "fak" (did you mean "fake"?)',
        "  cpu    usable",
        "  fake   usable",
        "  to run without a GPU: --backend cpu",
    ]


@pytest.mark.parametrize("variable", ["HALMA_GRAPHS", "HALMA_LOG"])
def test_settings_are_checked_before_anything_is_done(
    halma: Halma, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "wrong")
    done = halma("backends")
    assert (done.code, done.out) == (2, "")
    assert variable in done.err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141)])
def test_interrupts_and_broken_pipes_end_quietly(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    dropped: list[bool] = []
    monkeypatch.setattr(main, "_drop_output", lambda: dropped.append(True))

    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr("halma.cli.backends.print_table", fails)
    assert main.run(["backends"]) == code
    assert dropped == [True] * (code == 141)
    assert "Traceback" not in capfd.readouterr().err


def test_a_reader_that_leaves_early_is_no_defect() -> None:
    code = "import sys\nfrom halma.cli.main import run\nsys.exit(run(['backends', '--json']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == 141


@pytest.mark.parametrize("begin", [["-m", "halma"], ["-c", "from halma.cli.main import run; raise SystemExit(run())"]])
def test_it_is_run_as_a_module_and_as_a_script(begin: list[str]) -> None:
    done = subprocess.run([sys.executable, *begin, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"halma {__version__}\n", "")


def test_log_levels(halma: Halma, with_backends: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    monkeypatch.setenv("HALMA_LOG", "info")
    with_backends(host())
    assert halma("backends").code == 0
    assert logging.getLogger("halma").level == logging.INFO
