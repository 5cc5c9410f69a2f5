"""The token state that stays on the device: what a step feeds, how many of its choices hold, and what it leaves.

Drafts are compared with what the model itself chooses, greedy or drawn: noise is a function of seed, position and
token alone, so a draft is right exactly where it is the token that plain decoding would have drawn there. Tokens
are then the same with any number of drafts, none among them, and no probabilities of drafts need be kept.

R requests with C tokens each, C = 1 + drafts; slot 0 is the null slot, of which nothing means anything. A request
that is over on the device has 0 tokens in a step: such a step leaves nothing of it changed.
"""

from __future__ import annotations

import torch

from halma.hal.dispatch import Spec, like, op
from halma.hal.errors import DispatchError
from halma.hal.workspace import Workspace


def _fed_outputs(
    slot: torch.Tensor,
    count: torch.Tensor,
    last_token: torch.Tensor,
    lengths: torch.Tensor,
    end: torch.Tensor,
    drafts: torch.Tensor | None = None,
    query_len: int = 1,
) -> tuple[Spec, ...]:
    known = 0 if drafts is None else drafts.shape[1]
    if not 1 <= query_len <= known + 1:
        raise DispatchError(
            "decode_inputs: there are not so many drafts",
            asked=f"{query_len} tokens a request, the newest among them",
            found=f"{known} drafts a request",
        )
    return Spec((slot.shape[0], query_len), torch.int64), like(slot), like(slot)


@op("decode_inputs", out=_fed_outputs)
def decode_inputs(
    slot: torch.Tensor,
    count: torch.Tensor,
    last_token: torch.Tensor,
    lengths: torch.Tensor,
    end: torch.Tensor,
    drafts: torch.Tensor | None = None,
    query_len: int = 1,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ws: Workspace,
) -> None:
    """The newest token of every request and its first drafts, where they stand, and how many of them count.

    Args:
        slot, count: [R] int64; the request's slot, and the most tokens that it may have in this step.
        last_token, lengths, end: [slots + 1] int64; see the state. A step may bring a request one token for each it
            feeds, so it feeds ``end - 1 - lengths`` at most, and none where the request is over.
        drafts: [slots + 1, K] int64, K >= query_len - 1; -1 where there is none, and then none behind it counts.
        out: tokens [R, query_len], start [R] and count [R] in 0 .. query_len, all int64. Tokens from count on may be
            -1: they stand for nothing.

    Raises:
        DispatchError: fewer drafts than asked for (found when planning).
    """
    tokens, start, real = out
    rows = slot.shape[0]
    torch.index_select(lengths, 0, slot, out=start)
    torch.index_select(end, 0, slot, out=real)
    real.sub_(start)
    real.sub_(1)
    torch.minimum(real, count, out=real)
    newest = torch.index_select(last_token, 0, slot, out=ws.take((rows,), torch.int64))
    tokens[:, 0].copy_(newest)
    if drafts is not None and query_len > 1:
        found = ws.take((rows, drafts.shape[1]), torch.int64)
        torch.index_select(drafts, 0, slot, out=found)
        wanted = found[:, : query_len - 1]
        tokens[:, 1:].copy_(wanted)
        there = torch.ge(wanted, 0, out=ws.take(wanted.shape, torch.bool))
        leading = ws.take(wanted.shape, torch.int64).copy_(there).cumprod_(1)
        usable = torch.sum(leading, 1, out=ws.take((rows,), torch.int64)).add_(1)
        torch.minimum(real, usable, out=real)
    real.clamp_(0, query_len)


def _stops_at(choices: torch.Tensor, slot: torch.Tensor, stops: torch.Tensor, ws: Workspace) -> torch.Tensor:
    """choices [R, C] -> scratch bool [R, C]: which of them end their request."""
    rows, width = slot.shape[0], stops.shape[1]
    own = torch.index_select(stops, 0, slot, out=ws.take((rows, width), torch.int64))
    same = ws.take((*choices.shape, width), torch.bool)
    torch.eq(choices.unsqueeze(2), own.unsqueeze(1), out=same)
    return torch.any(same, 2, out=ws.take(choices.shape, torch.bool))


@op("accept_run", out=lambda choices, tokens, count, slot, stops: like(count))
def accept_run(
    choices: torch.Tensor,
    tokens: torch.Tensor,
    count: torch.Tensor,
    slot: torch.Tensor,
    stops: torch.Tensor,
    *,
    out: torch.Tensor,
    ws: Workspace,
) -> None:
    """How many of a request's choices it gets: the first, and each after one that its draft had right.

    Choice j stands behind token j. It is what decoding one by one would have chosen if every token before it is;
    token 0 is, and token j is where ``tokens[j] == choices[j - 1]``. The run ends behind the first stop token.

    Args:
        choices: [R*C] int64, request-major.
        tokens: [R, C] int64, what was fed; count, slot: [R] int64.
        stops: [slots + 1, S] int64, -1 for none.
        out: [R] int64 in 0 .. count; at least 1 where count is.
    """
    rows, width = tokens.shape
    chosen = choices.view(rows, width)
    step = ws.take((width,), torch.int64)
    torch.arange(width, out=step)
    good = torch.lt(step, count.unsqueeze(1), out=ws.take((rows, width), torch.bool))
    if width > 1:
        right = torch.eq(chosen[:, :-1], tokens[:, 1:], out=ws.take((rows, width - 1), torch.bool))
        over = _stops_at(chosen, slot, stops, ws)[:, :-1]
        right.logical_and_(over.logical_not_())
        good[:, 1:].logical_and_(right)
    torch.sum(ws.take((rows, width), torch.int64).copy_(good).cumprod_(1), 1, out=out)


@op("prompt_choice", out=lambda chosen, after, count: (like(chosen), like(chosen)))
def prompt_choice(
    chosen: torch.Tensor,
    after: torch.Tensor,
    count: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
    ws: Workspace,
) -> None:
    """What follows a piece of a prompt: the prompt's own next token, or, behind its end, the model's choice.

    Args:
        chosen, after, count: [R] int64; ``after`` is -1 behind the end of the prompt.
        out: newest [R], emitted [R]; int64: 1 where the model's choice counts and the request fed anything.
    """
    newest, emitted = out
    ended = torch.lt(after, 0, out=ws.take(after.shape, torch.bool))
    torch.where(ended, chosen, after, out=newest)
    some = torch.gt(count, 0, out=ws.take(after.shape, torch.bool))
    emitted.copy_(ended.logical_and_(some))


def _owners(slot: torch.Tensor, fed: torch.Tensor, ws: Workspace) -> torch.Tensor:
    """-> scratch [R]: each request's slot, the null slot where it fed nothing."""
    some = torch.gt(fed, 0, out=ws.take(fed.shape, torch.bool))
    return torch.mul(slot, some, out=ws.take(slot.shape, torch.int64))


@op("commit_run")
def commit_run(
    choices: torch.Tensor,
    emitted: torch.Tensor,
    fed: torch.Tensor,
    start: torch.Tensor,
    slot: torch.Tensor,
    last_token: torch.Tensor,
    lengths: torch.Tensor,
    ring: torch.Tensor,
    *,
    ws: Workspace,
) -> None:
    """Move every request on, in place: ``fed`` tokens are part of it now, the last of its choices comes next.

    ``lengths[slot] = start + fed`` and ``last_token[slot] = choices[max(emitted, 1) - 1]``, which stands at that
    position; the emitted choices end there, and the one at position p goes to ``ring[slot, p % width]``.

    Args:
        choices: [R*C] int64, request-major, C <= width of the ring.
        emitted, fed: [R] int64; where ``fed`` is 0 nothing of the request changes.
        start, slot: [R] int64; slots other than 0 occur once.
        last_token, lengths: [slots + 1] int64.
        ring: [slots + 1, width] int64, contiguous.
    """
    rows, width = slot.shape[0], ring.shape[1]
    chosen = choices.view(rows, -1)
    owner = _owners(slot, fed, ws)
    length = torch.add(start, fed, out=ws.take((rows,), torch.int64))
    lengths.index_copy_(0, owner, length)
    last = torch.clamp_min(emitted, 1, out=ws.take((rows,), torch.int64)).sub_(1)
    newest = torch.gather(chosen, 1, last.unsqueeze(1), out=ws.take((rows, 1), torch.int64))
    last_token.index_copy_(0, owner, newest.view(rows))
    step = ws.take((chosen.shape[1],), torch.int64)
    torch.arange(1, chosen.shape[1] + 1, out=step)
    shown = torch.le(step, emitted.unsqueeze(1), out=ws.take(chosen.shape, torch.bool))
    cell = torch.add(length.sub_(emitted).unsqueeze(1), step, out=ws.take(chosen.shape, torch.int64))
    page = torch.mul(owner.unsqueeze(1), shown, out=ws.take(chosen.shape, torch.int64))
    cell.remainder_(width).add_(page, alpha=width)
    ring.view(-1).index_copy_(0, cell.view(-1), chosen.reshape(-1))


@op("end_runs")
def end_runs(
    emitted: torch.Tensor,
    slot: torch.Tensor,
    last_token: torch.Tensor,
    lengths: torch.Tensor,
    stops: torch.Tensor,
    end: torch.Tensor,
    *,
    ws: Workspace,
) -> None:
    """Requests whose newest token is a stop token are over: ``end[slot] = lengths[slot] + 1``, in place.

    Args:
        emitted, slot: [R] int64; where nothing was emitted nothing ends.
        last_token, lengths, end: [slots + 1] int64; stops: [slots + 1, S] int64, -1 for none.
    """
    rows = slot.shape[0]
    newest = torch.index_select(last_token, 0, slot, out=ws.take((rows,), torch.int64))
    over = _stops_at(newest.unsqueeze(1), slot, stops, ws).view(rows)
    over.logical_and_(torch.gt(emitted, 0, out=ws.take((rows,), torch.bool)))
    last = torch.index_select(lengths, 0, slot, out=ws.take((rows,), torch.int64)).add_(1)
    known = torch.index_select(end, 0, slot, out=ws.take((rows,), torch.int64))
    end.index_copy_(0, slot, torch.where(over, last, known, out=newest))


@op("log_step")
def log_step(emitted: torch.Tensor, log: torch.Tensor, step: torch.Tensor, *, ws: Workspace) -> None:
    """emitted [R] i64 -> columns 0 .. R - 1 of row ``step % steps`` of the log, and ``step += 1``, in place.

    Args:
        log: [steps, N] int64, N >= R.
        step: [1] int64.
    """
    row = torch.remainder(step, log.shape[0], out=ws.take((1,), torch.int64))
    log[:, : emitted.shape[0]].index_copy_(0, row, emitted.unsqueeze(0))
    step.add_(1)


# -- drafting -------------------------------------------------------------------------------------------


@op("shift_tokens", out=lambda tokens, count, newest: like(tokens))
def shift_tokens(
    tokens: torch.Tensor, count: torch.Tensor, newest: torch.Tensor, *, out: torch.Tensor, ws: Workspace
) -> None:
    """tokens [R, C], count, newest [R] i64 -> [R, C]: the token behind each, ``newest`` behind a request's last."""
    rows, width = tokens.shape
    out[:, : width - 1].copy_(tokens[:, 1:])
    out[:, width - 1].fill_(0)
    last = torch.clamp(count, 1, width, out=ws.take((rows,), torch.int64)).sub_(1)
    out.scatter_(1, last.unsqueeze(1), newest.unsqueeze(1))


@op("later", out=lambda position, by: Spec(tuple(position.shape), torch.int64))
def later(position: torch.Tensor, by: int, *, out: torch.Tensor, ws: Workspace) -> None:
    """position [N] i64 -> [N] i64: the position ``by`` behind each."""
    torch.add(position, by, out=out)


@op("spread_rows", out=lambda x, query_len: Spec((x.shape[0] * query_len,), x.dtype))
def spread_rows(x: torch.Tensor, query_len: int, *, out: torch.Tensor, ws: Workspace) -> None:
    """x [R] -> [R*T]: a request's value at each of its T rows."""
    out.view(-1, query_len).copy_(x.unsqueeze(1))


@op("add_to_streams", out=lambda streams, x: like(streams))
def add_to_streams(streams: torch.Tensor, x: torch.Tensor, *, out: torch.Tensor, ws: Workspace) -> None:
    """streams [M, n, D], x [M, D] -> [M, n, D]: ``x`` added to each stream of its row."""
    torch.add(streams, x.unsqueeze(1), out=out)


@op("draft_at", out=lambda slot, drafts, place: Spec((slot.shape[0], 1), torch.int64))
def draft_at(slot: torch.Tensor, drafts: torch.Tensor, place: int, *, out: torch.Tensor, ws: Workspace) -> None:
    """slot [R] i64, drafts [slots + 1, K] -> [R, 1]: ``drafts[slot, place]``."""
    torch.index_select(drafts[:, place : place + 1], 0, slot, out=out)


@op("store_draft")
def store_draft(
    token: torch.Tensor, fed: torch.Tensor, slot: torch.Tensor, drafts: torch.Tensor, place: int, *, ws: Workspace
) -> None:
    """token [R] i64 -> ``drafts[slot, place]``, in place; nothing where ``fed`` is 0.

    Args:
        fed, slot: [R] int64; slots other than 0 occur once.
        drafts: [slots + 1, K] int64, place < K.
    """
    drafts[:, place].index_copy_(0, _owners(slot, fed, ws), token)


@op("drop_drafts")
def drop_drafts(fed: torch.Tensor, slot: torch.Tensor, drafts: torch.Tensor, *, ws: Workspace) -> None:
    """``drafts[slot] = -1`` in place, for requests whose ``fed`` is not 0: what was proposed before is stale."""
    owner = _owners(slot, fed, ws)
    row = ws.take((slot.shape[0], drafts.shape[1]), torch.int64)
    row.fill_(-1)
    drafts.index_copy_(0, owner, row)
