"""The driver's errors about captures, in our words: code -> what happened and what to do.

Texts and codes: ``CUresult`` 900 to 908 of the CUDA driver API, which torch raises as ``torch.AcceleratorError``;
MUSA has the same by its rule of names, which nobody has seen on hardware.
"""

from __future__ import annotations

import re
from typing import Final

from halma.hal.errors import CaptureError

UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED = 900, 901, 902, 903, 904
ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD = 905, 906, 907, 908

CODES: Final[dict[int, tuple[str, str]]] = {
    UNSUPPORTED: (
        "the call is not permitted while a stream is captured",
        "do it before the capture or after the replay: host reads, waits, copies of pageable memory, loading code",
    ),
    INVALIDATED: (
        "an earlier call made the capture invalid",
        "look for the first error inside the capture: this one only reports that there was one",
    ),
    MERGE: (
        "two captures would be merged: a stream of one waited for an event of the other",
        "capture one program at a time",
    ),
    UNMATCHED: ("the capture was not begun on this stream", "end it on the stream that it was begun on"),
    UNJOINED: (
        "work on a side stream was not joined before the capture ended",
        "use fork() of halma.hal.graph.forks, or let the captured stream wait for an event of the side stream",
    ),
    ISOLATION: (
        "captured work would depend on work outside the capture",
        "record the event inside the capture, on a stream that takes part",
    ),
    IMPLICIT: (
        "the call would wait for the legacy default stream, which is captured work's other side",
        "use streams of backend.device.new_stream()",
    ),
    CAPTURED_EVENT: (
        "the event was last recorded inside a capture",
        "record it again outside, after the replay: events do not cross a capture's end",
    ),
    WRONG_THREAD: ("the capture was begun by another thread", "begin and end a capture on one thread"),
}

_TEXTS: Final = (
    ("operation not permitted when stream is capturing", UNSUPPORTED),
    ("failed due to a previous error during capture", INVALIDATED),
    ("unjoined work", UNJOINED),
    ("dependency created on uncaptured work", ISOLATION),
    ("would make the legacy stream depend on a capturing", IMPLICIT),
    ("event last recorded in a capturing stream", CAPTURED_EVENT),
    ("attempted to terminate a thread-local capture", WRONG_THREAD),
    ("capture was not initiated in this stream", UNMATCHED),
    ("between independent capture", MERGE),
)


def code_of(error: BaseException) -> int | None:
    """The driver's code that an error carries, by attribute or by its text; None: it is not the driver's."""
    for name in ("error_code", "code"):
        code = getattr(error, name, None)
        if isinstance(code, int) and code:
            return code
    text = str(error)
    for part, known in _TEXTS:
        if part in text:
            return known
    number = re.search(r"\berror (9\d\d)\b", text)
    return int(number[1]) if number else None


def translated(error: BaseException, asked: str) -> BaseException:
    """``error`` as a :class:`CaptureError` where the driver refused something about a capture; else itself.

    The original is its cause.
    """
    if isinstance(error, CaptureError) or not isinstance(error, RuntimeError):
        return error
    code = code_of(error)
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if code not in CODES:
        if "during capture" not in said and "pin" not in said:
            return error
        what, do = said, CODES[UNSUPPORTED][1]
    else:
        what, do = CODES[code]
    made = CaptureError(what, asked=asked, found=f"driver error {code}: {said}" if code else said, do=do)
    made.__cause__ = error
    return made
