"""Counting the assertions of a test (T4).

A device claim that rests on an exit status alone has no ground: a test whose loop ran zero times passes too.
pytest tells us of every ``assert`` in a test file that held; comparisons made elsewhere report themselves
through :func:`check`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_held = 0


def check(held: bool, message: str = "") -> None:
    """Assert ``held`` and count it; for helpers outside test files, whose ``assert`` pytest does not see.

    Raises:
        AssertionError: with ``message``, if it does not hold.
    """
    if not held:
        raise AssertionError(message)
    count()


def count(number: int = 1) -> None:
    """Add to the assertions that held in this process."""
    global _held
    _held += number


def held() -> int:
    """How many assertions have held in this process so far."""
    return _held


def count_wordlessly() -> Callable[[], None] | None:
    """Count every assertion that holds, from now on; returns how to stop, or None where this pytest has another form.

    pytest's own way, the hook ``pytest_assertion_pass``, hands over each assertion in words: the repr of everything in
    it, tensors included, which took half of a run's time. A rewritten assertion that holds first asks whether anybody
    wants the words; counting that question is enough.
    """
    from _pytest.assertion import rewrite

    module: Any = rewrite
    name = "_check_if_assertion_pass_impl"
    asked: Callable[[], bool] | None = getattr(module, name, None)
    if asked is None:
        return None

    def counted() -> bool:
        count()
        return asked()  # another plugin may want them

    setattr(module, name, counted)
    return lambda: setattr(module, name, asked)
