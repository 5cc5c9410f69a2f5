"""Counting the assertions of a test (T4).

A device claim that rests on an exit status alone has no ground: a test whose loop ran zero times passes too.
pytest tells us of every ``assert`` in a test file that held; comparisons made elsewhere report themselves
through :func:`check`.
"""

from __future__ import annotations

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
