"""Where a command's prompts come from: options, a file, standard input; each read once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from halma.hal.errors import RequestError


def read_prompts(
    texts: list[str] | None, file: Path | None, ids: str | None, encode: Callable[[str], tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """The prompts as token ids; without an option they come from standard input.

    Raises:
        RequestError: several sources were given, or none; one is empty or cannot be read.
    """
    given = [
        name for name, value in (("--prompt", texts), ("--file", file), ("--prompt-ids", ids)) if value is not None
    ]
    if len(given) > 1:
        raise RequestError("the prompt was given twice", found=" and ".join(given), do="give one of them")
    if ids is not None:
        try:
            return [tuple(int(part) for part in ids.split(","))]
        except ValueError as error:
            raise RequestError(
                "token ids must be integers", asked=f"--prompt-ids {ids}", do="--prompt-ids 0,17,42"
            ) from error
    if file is not None:
        try:
            texts = [_decode(file.read_bytes(), str(file))]
        except OSError as error:
            raise RequestError(
                "the prompt file cannot be read",
                asked=f"--file {file}",
                found=error.strerror or str(error),
                do="--file with a text file that exists",
            ) from error
    elif texts is None:
        if sys.stdin.isatty():
            raise RequestError("no prompt was given", do='halma generate --prompt "The President", or pipe text in')
        texts = [_decode(sys.stdin.buffer.read(), "standard input")]
    for text in texts:
        if not text.strip():
            raise RequestError(
                "the prompt is empty",
                found=f"{len(text)} characters, none of them visible",
                do='halma generate --prompt "The President"',
            )
    return [encode(text) for text in texts]


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            "the prompt is not valid UTF-8",
            asked=f"text from {where}",
            found=f"byte 0x{data[error.start]:02x} at offset {error.start} of {len(data)}",
            do="convert it, for example: iconv -f latin1 -t utf-8",
        ) from error
