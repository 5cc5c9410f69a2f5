"""Running the command line in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from halma.cli.main import run
from halma.hal import registry as registry_module
from halma.hal.registry import Registry
from tests.cpu.hal.plugins import Entry


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Halma = Callable[..., Done]


@pytest.fixture
def halma(capsys: pytest.CaptureFixture[str]) -> Halma:
    """``halma("backends", "--json")``; nothing of it may be a traceback."""

    def call(*arguments: str) -> Done:
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture
def with_backends(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    """Put a registry of these entry points in the place of this process's."""

    def put(*entries: Entry) -> Registry:
        registry = Registry(entries)
        monkeypatch.setattr(registry_module, "_default", registry)
        return registry

    return put
