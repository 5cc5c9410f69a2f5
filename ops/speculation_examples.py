"""Example calls of the ops that keep the token state: what is fed, what holds, what is committed, what is drafted.

Beside :mod:`halma.ops.examples`, which imports this.
"""

from __future__ import annotations

from typing import Any

import torch

from halma.hal.testing.examples import Arguments, OpExample, examples
from halma.ops.draws import Draw, example

SLOTS = 12


def _slots(rows: int) -> torch.Tensor:
    return torch.arange(rows, 0, -1)


def _null_rows(*positions: int) -> Any:
    """Padding for writers: no tokens of the null slot; what else stands there is anything."""

    def pad(arguments: Arguments, real: int, payload: float) -> None:
        for position in positions:
            arguments[position][real:] = 0
        arguments[0][real:] = 0 if payload == 0 else 999

    return pad


@examples("decode_inputs")
def _decode_inputs() -> list[OpExample]:
    def newest(draw: Draw, rows: int) -> Arguments:
        lengths = draw.ids(SLOTS, below=4000)
        end = lengths + draw.ids(SLOTS, below=4) - 1
        return draw.ids(rows, below=SLOTS), draw.ids(rows, below=2), draw.ids(SLOTS, below=1000), lengths, end

    def drafted(draw: Draw, rows: int) -> Arguments:
        slot, _, last, lengths, _ = newest(draw, rows)
        drafts = draw.ids(SLOTS, 4, below=12) - 1
        return slot, draw.ids(rows, below=6), last, lengths, lengths + draw.ids(SLOTS, below=8) - 1, drafts, 4

    return [
        example("decode_inputs", "the newest token", newest, by_row=(0, 1)),
        example("decode_inputs", "three of four drafts", drafted, by_row=(0, 1)),
    ]


@examples("accept_run")
def _accept_run() -> list[OpExample]:
    def build(width: int) -> Any:
        def make(draw: Draw, rows: int) -> Arguments:
            # Few token ids, so that drafts are often right and stop tokens often met.
            stops = draw.ids(SLOTS, 3, below=9) - 1
            choices = draw.ids(rows * width, below=3)
            return choices, draw.ids(rows, width, below=3), draw.ids(rows, below=width + 1), _slots(rows), stops

        return make

    return [example("accept_run", "one token", build(1)), example("accept_run", "five tokens", build(5))]


@examples("prompt_choice")
def _prompt_choice() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        return draw.ids(rows, below=99), draw.ids(rows, below=3) - 1, draw.ids(rows, below=3)

    return [example("prompt_choice", "ended and not", build, by_row=(0, 1, 2))]


@examples("commit_run")
def _commit_run() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        emitted, start = draw.ids(rows, below=4), draw.ids(rows, below=90)
        state = draw.ids(SLOTS, below=9), draw.ids(SLOTS, below=9), draw.ids(SLOTS, 8, below=9)
        return draw.ids(rows * 3, below=1000), emitted, emitted.clone(), start, _slots(rows), *state

    def pad(arguments: Arguments, real: int, payload: float) -> None:
        arguments[0][real * 3 :] = 0 if payload == 0 else 999
        for tensor in arguments[1:5]:
            tensor[real:] = 0

    return [example("commit_run", "a ring of eight", build, state=(5, 6, 7), null_row=True, padding=pad)]


@examples("end_runs")
def _end_runs() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        state = draw.ids(SLOTS, below=4), draw.ids(SLOTS, below=90), draw.ids(SLOTS, 3, below=4)
        return draw.ids(rows, below=2), _slots(rows), *state, draw.ids(SLOTS, below=90)

    return [example("end_runs", "some stop", build, state=(5,), null_row=True, padding=_null_rows(0, 1))]


@examples("log_step")
def _log_step() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        return draw.ids(rows, below=9), draw.ids(5, rows + 2, below=9), torch.tensor([7])

    return [example("log_step", "five steps", build, state=(1, 2))]


@examples("shift_tokens")
def _shift_tokens() -> list[OpExample]:
    def build(width: int) -> Any:
        def make(draw: Draw, rows: int) -> Arguments:
            return draw.ids(rows, width, below=99), draw.ids(rows, below=width + 1), draw.ids(rows, below=99)

        return make

    shapes = ((1, "one token"), (5, "five tokens"))
    return [example("shift_tokens", name, build(width), by_row=(0, 1, 2)) for width, name in shapes]


@examples("later")
def _later() -> list[OpExample]:
    return [example("later", "three behind", lambda d, n: (d.ids(n, below=900), 3), by_row=(0,))]


@examples("spread_rows")
def _spread_rows() -> list[OpExample]:
    return [example("spread_rows", "three rows", lambda d, n: (d.normal(n), 3), tolerance=0.0)]


@examples("add_to_streams")
def _add_to_streams() -> list[OpExample]:
    def build(dtype: torch.dtype) -> Any:
        return lambda d, n: (d.normal(n, 4, 20, dtype=dtype), d.normal(n, 20, dtype=dtype))

    return [
        example("add_to_streams", "fp32", build(torch.float32), by_row=(0, 1)),
        example("add_to_streams", "bf16", build(torch.bfloat16), by_row=(0, 1), tolerance=8e-3),
    ]


@examples("draft_at")
def _draft_at() -> list[OpExample]:
    return [example("draft_at", "the third", lambda d, n: (d.ids(n, below=SLOTS), d.ids(SLOTS, 4, below=9), 2))]


@examples("store_draft")
def _store_draft() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        return draw.ids(rows, below=99), draw.ids(rows, below=3), _slots(rows), draw.ids(SLOTS, 4, below=9), 1

    return [example("store_draft", "the second", build, state=(3,), null_row=True, padding=_null_rows(1, 2))]


@examples("drop_drafts")
def _drop_drafts() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        return draw.ids(rows, below=3), _slots(rows), draw.ids(SLOTS, 4, below=9)

    return [example("drop_drafts", "some fed nothing", build, state=(2,), null_row=True, padding=_null_rows(0, 1))]
