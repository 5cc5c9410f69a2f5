"""What a stranger types first: help that can be read, refusals that are whole, nothing lost after long work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from halma.cli import main
from halma.cli.output import shown
from tests.cpu.cli.conftest import Halma

CAPTURE = ("capture", "--backend", "cpu", "--max-requests", "2", "--context", "200", "--chunk", "8")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--order", "up"],
        ["--budget", "0"],
        ["--budget", "much"],
        ["--reserve", "x"],
        ["--sizes", "1,x"],
        ["--sizes", "0"],
        ["--sizes", "1,16"],
        ["--max-requests", "0"],
        ["--context", "0"],
        ["--context=-1"],
        ["--context", "100000000"],
        ["--chunk", "0"],
        ["--chunk=-3"],
        ["--model", "nope"],
        ["--model", ""],
        ["--html", "/nonexistent/folder/page.html"],
        ["--html", "/"],
    ],
    ids=" ".join,
)
def test_every_refusal_says_what_was_asked_found_and_to_do(halma: Halma, arguments: list[str]) -> None:
    done = halma(*CAPTURE, *arguments)
    assert (done.code, done.out) == (2, "")
    labels = [line.split(":")[0].strip() for line in done.err.splitlines() if line.startswith("  ")]
    assert [one for one in ("asked", "found", "do") if one in labels] == ["asked", "found", "do"], done.err
    assert done.err.count("halma: ") == 1


@pytest.mark.parametrize("arguments", [["--chunk", "0"], ["--chunk=-3"], ["--context", "0"], ["--context=-5"]])
def test_generate_refuses_sizes_below_one(halma: Halma, arguments: list[str]) -> None:
    done = halma("generate", "--backend", "cpu", "--prompt", "x", *arguments)
    assert (done.code, done.out) == (2, "")
    assert arguments[0].partition("=")[0] in done.err and "1 or more" in done.err


def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    halma: Halma, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halma.cli import capture

    worked: list[bool] = []
    monkeypatch.setattr(capture, "_measure", lambda *_, **__: worked.append(True))
    assert halma(*CAPTURE, "--html", str(tmp_path / "no" / "page.html")).code == 2
    assert halma(*CAPTURE, "--html", str(tmp_path)).code == 2
    assert not worked and not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--order", "up"], ["--budget", "0"], ["--sizes", "0"], ["--chunk", "0"]])
def test_wrong_options_are_answered_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom halma.cli.main import run\n"
        f"code = run({[*CAPTURE, *arguments]!r})\nprint(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2 False", done.stderr


@pytest.mark.torchfree
def test_help_tells_what_commands_do_to_the_end(halma: Halma) -> None:
    out = halma("--help").out
    assert "..." not in out.replace("[ARGS]...", "")
    for command in main.COMMANDS:
        said = " ".join((command.__doc__ or "").split())
        assert said in " ".join(out.split())


@pytest.mark.torchfree
def test_the_list_of_rules_says_what_they_mean(halma: Halma) -> None:
    lines = halma("conformance", "--list", "--rule", "G8").out.splitlines()
    assert lines[1].split(maxsplit=1) == ["G8", "forks are joined before a segment closes"]
    assert any("test_forks.py::" in line and line.split()[0] == "control" for line in lines[2:])


@pytest.mark.torchfree
def test_long_lines_of_a_refusal_are_folded_for_a_terminal_only() -> None:
    message = "no\n  found: " + "known: " + ", ".join(f"rule{number}" for number in range(30)) + "\n  do:    look"
    assert shown(message, None) == message
    folded = shown(message, 60).splitlines()
    assert max(map(len, folded)) <= 60 and folded[0] == "no" and folded[-1] == "  do:    look"
    assert all(line.startswith(" " * 9 + "rule") for line in folded[2:-1])
    assert " ".join(" ".join(folded).split()) == " ".join(message.split())


def test_explain_names_its_words_and_an_unknown_op_has_a_way_out(halma: Halma) -> None:
    done = halma("explain", "--backend", "cpu", "--op", "rms_norm")
    words = done.out.splitlines()[-1]
    assert len(words) <= 80
    assert all(f"{word}: " in words for word in ("chosen", "spare", "refused"))
    refused = halma("explain", "--backend", "cpu", "--op", "rms_nrom")
    assert refused.code == 2 and "did you mean rms_norm?" in refused.err and "do:    halma explain" in refused.err
