"""What is fed, what is accepted, what is committed: the token state on the device, against plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halma.hal.errors import DispatchError
from tests.cpu.ops.checks import check_contract, fresh_ops, run

SLOTS, WIDTH = 4, 8


def i64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def progress() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """last_token, lengths, ring."""
    return torch.full((SLOTS + 1,), 100), torch.arange(SLOTS + 1) * 10, torch.full((SLOTS + 1, WIDTH), -7)


# -- what is fed ----------------------------------------------------------------------------------------


def test_a_step_feeds_the_newest_token_where_it_stands() -> None:
    last, lengths = i64(0, 41, 42, 43), i64(0, 10, 20, 30)
    tokens, start, count = run("decode_inputs", i64(3, 1), i64(1, 1), last, lengths, i64(0, 90, 90, 90))
    assert tokens.tolist() == [[43], [41]] and start.tolist() == [30, 10] and count.tolist() == [1, 1]


@pytest.mark.parametrize(("end", "fed"), [(35, 4), (34, 3), (32, 1), (31, 0), (12, 0), (0, 0)])
def test_a_step_feeds_no_more_than_the_request_may_still_have(end: int, fed: int) -> None:
    drafts = torch.arange(2 * 5).view(2, 5)
    tokens, _, count = run("decode_inputs", i64(1), i64(4), i64(0, 43), i64(0, 30), i64(0, end), drafts, 4)
    assert count.tolist() == [fed] and tokens.tolist() == [[43, 5, 6, 7]]


def test_nothing_counts_behind_a_draft_that_is_none() -> None:
    drafts = torch.tensor([[0, 0, 0], [5, -1, 6], [-1, 5, 6], [5, 6, 7]])
    far = i64(0, 90, 90, 90)
    args = (i64(1, 2, 3), i64(4, 4, 3), i64(0, 1, 2, 3), i64(0, 0, 0, 0), far, drafts, 4)
    assert run("decode_inputs", *args)[2].tolist() == [2, 1, 3]


def test_more_drafts_than_are_kept_are_refused_when_planning() -> None:
    with pytest.raises(DispatchError, match="not so many drafts"):
        run("decode_inputs", i64(1), i64(4), i64(0, 1), i64(0, 1), i64(0, 9), torch.zeros(2, 2, dtype=torch.int64), 4)
    with pytest.raises(DispatchError, match="not so many drafts"):
        run("decode_inputs", i64(1), i64(4), i64(0, 1), i64(0, 1), i64(0, 9), None, 2)


# -- what is accepted -----------------------------------------------------------------------------------


def accepted(choices: list[int], tokens: list[int], count: int, stops: list[int]) -> int:
    """One by one: a choice counts while every token before it was right and none of them stopped."""
    emitted = 0
    while emitted < count:
        emitted += 1
        last = choices[emitted - 1]
        if last in stops or emitted == len(tokens) or tokens[emitted] != last:
            break
    return emitted


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[int], list[list[int]]]:
    width, rows = draw(st.integers(1, 9)), draw(st.integers(1, SLOTS))
    few = st.lists(st.integers(0, 2), min_size=width, max_size=width)  # few ids: drafts are often right
    stops = st.lists(st.integers(-1, 6), min_size=3, max_size=3)
    each = st.tuples(few, few, st.integers(0, width), stops)
    found = draw(st.lists(each, min_size=rows, max_size=rows))
    return tuple(map(list, zip(*found, strict=True)))  # type: ignore[return-value]


@pytest.mark.invariant("M5")
@settings(max_examples=200, deadline=None)
@given(case=runs())
def test_a_run_ends_with_the_first_wrong_draft_and_the_first_stop_token(case) -> None:
    choices, tokens, count, stops = case
    slot = torch.arange(len(count)) + 1
    table = torch.tensor([[-1, -1, -1], *stops])
    found = run("accept_run", torch.tensor(choices).view(-1), torch.tensor(tokens), i64(*count), slot, table)
    expected = [accepted(*one) for one in zip(choices, tokens, count, stops, strict=True)]
    assert found.tolist() == expected


@pytest.mark.invariant("M5", control=True)
def test_without_stop_tokens_a_run_is_as_long_as_its_drafts_are_right() -> None:
    none = torch.full((3, 2), -1)
    choices, tokens = i64(5, 6, 7, 5, 9, 7), torch.tensor([[4, 5, 6], [4, 5, 6]])
    assert run("accept_run", choices, tokens, i64(3, 3), i64(1, 2), none).tolist() == [3, 2]


def test_behind_a_prompt_the_models_choice_counts_and_inside_the_prompts_own_token() -> None:
    newest, emitted = run("prompt_choice", i64(7, 8, 9), i64(-1, 3, -1), i64(2, 5, 0))
    assert newest.tolist() == [7, 3, 9] and emitted.tolist() == [1, 0, 0]


# -- what is committed ----------------------------------------------------------------------------------


def test_a_run_is_committed_by_length_and_its_tokens_are_found_by_position() -> None:
    last, lengths, ring = progress()
    choices = i64(41, 42, 43, 51, 52, 53)
    fresh_ops().commit_run(choices, i64(3, 1), i64(3, 1), i64(30, 6), i64(3, 1), last, lengths, ring)
    assert lengths.tolist() == [0, 7, 20, 33, 40] and last[1:].tolist() == [51, 100, 43, 100]
    assert [int(ring[3, p % WIDTH]) for p in (31, 32, 33)] == [41, 42, 43] and ring[1, 7] == 51
    assert int((ring[1:] != -7).sum()) == 4


def test_a_prompt_moves_on_by_its_piece_and_shows_only_what_was_chosen() -> None:
    last, lengths, ring = progress()
    fresh_ops().commit_run(i64(41, 51), i64(1, 0), i64(5, 4), i64(30, 6), i64(3, 1), last, lengths, ring)
    assert lengths[[1, 3]].tolist() == [10, 35] and last[[1, 3]].tolist() == [51, 41]
    assert ring[3, 35 % WIDTH] == 41 and int((ring[1:] != -7).sum()) == 1


def test_a_request_that_fed_nothing_keeps_everything() -> None:
    last, lengths, ring = progress()
    before = [t[1:].clone() for t in (last, lengths, ring)]
    slot, start = i64(3, 1, 0), i64(30, 10, 0)
    fresh_ops().commit_run(i64(1, 2, 3), i64(0, 0, 0), i64(0, 0, 0), start, slot, last, lengths, ring)
    assert all(torch.equal(t[1:], b) for t, b in zip((last, lengths, ring), before, strict=True))


@pytest.mark.invariant("M5")
def test_a_stop_token_ends_its_request_behind_it_and_no_other() -> None:
    last, lengths, end = i64(0, 7, 8, 9, 7), i64(0, 10, 20, 30, 40), i64(0, 90, 91, 92, 93)
    stops = torch.tensor([[-1, -1], [3, 7], [3, 7], [-1, 9], [7, -1]])
    fresh_ops().end_runs(i64(1, 2, 3, 0), i64(1, 2, 3, 4), last, lengths, stops, end)
    assert end[1:].tolist() == [11, 91, 31, 93], "the one of slot 4 emitted nothing"
    assert run("decode_inputs", i64(1, 2), i64(1, 1), last, lengths, end)[2].tolist() == [0, 1]


def test_the_log_holds_a_count_a_row_by_the_number_of_the_step() -> None:
    log, step = torch.full((3, 4), -7), i64(4)
    for emitted in (i64(1, 2), i64(3, 4, 5)):
        fresh_ops().log_step(emitted, log, step)
    assert log.tolist() == [[-7] * 4, [1, 2, -7, -7], [3, 4, 5, -7]] and step.tolist() == [6]


# -- drafting -------------------------------------------------------------------------------------------


def test_the_token_behind_each_is_the_next_one_and_the_newest_behind_the_last() -> None:
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    found = run("shift_tokens", tokens, i64(3, 1, 0), i64(10, 11, 12))
    assert found[0].tolist() == [2, 3, 10] and found[1, 0] == 11
    assert run("shift_tokens", i64(1, 2).view(2, 1), i64(1, 1), i64(3, 4)).tolist() == [[3], [4]]


def test_a_draft_is_stored_and_found_again_until_it_is_dropped() -> None:
    drafts = torch.arange(12).view(3, 4)
    ops = fresh_ops()
    ops.store_draft(i64(50, 60), i64(2, 0), i64(1, 2), drafts, 1)
    assert drafts[1].tolist() == [4, 50, 6, 7] and drafts[2].tolist() == [8, 9, 10, 11]
    assert run("draft_at", i64(2, 1), drafts, 1).tolist() == [[9], [50]]
    ops.drop_drafts(i64(0, 1), i64(1, 2), drafts)
    assert drafts[1].tolist() == [4, 50, 6, 7] and drafts[2].tolist() == [-1] * 4


@pytest.mark.parametrize("count", [1, 3])
def test_contracts(count: int) -> None:
    row = torch.arange(count)
    stops, tokens = torch.full((9, 8), -1), torch.arange(count * 5).view(count, 5)

    def committed() -> tuple[torch.Tensor, ...]:
        return (tokens.view(-1).clone(), row.clone(), row.clone(), row, row, *progress())

    drafts = torch.ones(9, 4, dtype=torch.int64)
    assert check_contract("decode_inputs", lambda: (row, row, torch.arange(9), torch.arange(9), torch.arange(9))) <= 8
    fed = (row, row, torch.arange(9), torch.arange(9), torch.arange(9), drafts, 5)
    assert check_contract("decode_inputs", lambda: fed) <= 16
    assert check_contract("accept_run", lambda: (tokens.view(-1), tokens, row, row, stops)) <= 12
    assert check_contract("prompt_choice", lambda: (row, row, row)) <= 5
    assert check_contract("commit_run", committed) <= 18
    assert (
        check_contract("end_runs", lambda: (row, row, *(torch.arange(9) for _ in range(2)), stops, row.clone())) <= 12
    )
    assert check_contract("log_step", lambda: (row, torch.zeros(4, 8, dtype=torch.int64), i64(3))) <= 3
    assert check_contract("shift_tokens", lambda: (tokens, row, row)) <= 5
    assert check_contract("later", lambda: (row, 3)) <= 1
    assert check_contract("spread_rows", lambda: (row.float(), 3)) <= 1
    assert check_contract("add_to_streams", lambda: (torch.ones(count, 4, 8), torch.ones(count, 8))) <= 1
    assert check_contract("draft_at", lambda: (row, drafts, 2)) <= 1
    assert check_contract("store_draft", lambda: (row, row, row, drafts.clone(), 1)) <= 5
    assert check_contract("drop_drafts", lambda: (row, row, drafts.clone())) <= 4
