"""Errors that tell a user what was asked, what was found and what to do next.

Everything halma raises on purpose derives from :class:`HalmaError`; the command line turns it into a
message and exit code 2. A traceback therefore always means a defect of ours.
"""

from __future__ import annotations

from collections.abc import Iterable


def _lines(value: str | Iterable[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value)


class HalmaError(Exception):
    """A refusal with its reasons.

    Args:
        what: one line, the headline.
        asked: what the caller wanted.
        found: every fact that led to the refusal, not only the first.
        do: what to try next, as commands or settings where possible.
    """

    def __init__(
        self,
        what: str,
        *,
        asked: str | Iterable[str] | None = None,
        found: str | Iterable[str] | None = None,
        do: str | Iterable[str] | None = None,
    ) -> None:
        self.what = what
        self.asked = _lines(asked)
        self.found = _lines(found)
        self.do = _lines(do)
        super().__init__(self.render())

    def render(self) -> str:
        """The message as shown to a person: a headline, then aligned ``asked:``, ``found:`` and ``do:`` lines."""
        rows = [self.what]
        for label, lines in (("asked:", self.asked), ("found:", self.found), ("do:", self.do)):
            for position, line in enumerate(lines):
                rows.append(f"  {label if position == 0 else '':<7}{line}")
        return "\n".join(rows)

    def __str__(self) -> str:
        return self.render()


class SettingError(HalmaError):
    """A ``HALMA_*`` variable holds something it cannot mean."""


class BackendError(HalmaError):
    """No backend can be chosen, or the one named cannot be used."""


class PluginError(BackendError):
    """A plugin broke the contract: duplicate name, wrong ``api_version``, misspelt hook."""


class CapabilityError(HalmaError):
    """A capability was declared and found missing, or is needed and unknown (invariant B8)."""


class WorkspaceError(HalmaError):
    """The sealed workspace was asked for memory that its plan does not hold (invariant W1)."""


class DispatchError(HalmaError):
    """No route of an op applies, or the one asked for refuses."""


class KernelError(HalmaError):
    """A kernel does not compile, or cannot be loaded or launched."""


class ArenaError(HalmaError):
    """An arena cannot be planned or allocated as asked, or was used against its contract."""


class CollectiveError(HalmaError):
    """A collective call that cannot be made as asked, or ranks that do not agree on one."""


class RankError(CollectiveError):
    """A peer did not do its part of a call within the bound, or did another one (invariant C7)."""


class RankLeft(RankError):
    """A peer said that it does not come, and why (invariant G26)."""


class CaptureError(HalmaError):
    """A graph could not be captured, or was used against its contract."""


class HostReadError(CaptureError):
    """Captured code tried to read a device value on the host (invariant G10)."""


class StaleInputError(CaptureError):
    """A persistent input was not refreshed before a replay (invariant G12)."""


class StaleOutputError(CaptureError):
    """An output of an earlier replay was read after a later one (invariant G14)."""


class ModelError(HalmaError):
    """A checkpoint or configuration that cannot be run."""


class RequestError(HalmaError):
    """A generation request that cannot be served as asked."""
