"""``halma capture --arena``: the plan of the memory that ranks share, for a model's ladder. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from halma.cli.output import at_least_one, emit_json, print_table
from halma.hal.errors import ArenaError, RequestError

if TYPE_CHECKING:
    from halma.hal.arena.plan import ArenaPlan
    from halma.hal.capabilities import Unknown
    from halma.hal.graph.descriptor import Descriptor
    from halma.models.deepseek_v4.config import V4Config

KINDS = ("channel", "slots")
ELEMENT = 2
"""Bytes of an activation as it is sent: bf16."""


def show_arena(
    model: str,
    kind: str,
    *,
    backend: str | None,
    world: int,
    sizes: Sequence[int],
    query_len: int,
    chunk: int,
    json: bool,
) -> None:
    """Print the plan: bytes by lane or by descriptor; and what keeps it from being one.

    Raises:
        ArenaError: it does not fit, or no channel is written for that many ranks; every descriptor that would be
            left without is named.
    """
    if kind not in KINDS:
        raise RequestError(
            f'no kind of arena called "{kind}"',
            asked=f"--arena {kind}",
            found="kinds: " + ", ".join(KINDS),
            do="--arena channel, or --arena slots",
        )
    at_least_one("--world", world)
    at_least_one("--query-len", query_len)
    from halma.hal.graph.ladder import decode_ladder

    config = _config(model)
    role = "decode" if query_len == 1 else "verify"
    ladder = decode_ladder(max(sizes), sizes=sizes, query_lens=(query_len,), role=role)
    atomicity = _atomicity(backend)
    plan = _plan(kind, config, ladder, chunk, world, atomicity)
    if plan.reason:
        raise _refusal(plan, kind, config, ladder, chunk, atomicity)
    document = {"schema": "halma.arena/1", "model": model, **_document(plan, ladder)}
    if json:
        emit_json(document)
    else:
        _print(document)


def _config(model: str) -> V4Config:
    """A known configuration, or that of a checkpoint directory; weights are not looked for."""
    from halma.models.deepseek_v4.config import V4Config
    from halma.models.deepseek_v4.presets import PRESETS, model_directory, preset

    if model.lower() in [known.lower() for known in PRESETS]:
        return preset(model)
    return V4Config.from_file(model_directory(model) / "config.json")


def _atomicity(backend: str | None) -> int | Unknown | None:
    """What is known of stores to peers on a backend that was named; without one, lanes of all kinds are planned."""
    import halma

    return None if backend is None else halma.backend(backend).capabilities.remote_store_atomicity


def _plan(
    kind: str,
    config: V4Config,
    ladder: Sequence[Descriptor],
    chunk: int,
    world: int,
    atomicity: int | Unknown | None,
) -> ArenaPlan:
    from halma.hal.arena.plan import plan_channels, plan_slots

    token = ELEMENT * config.hidden_size
    if kind == "slots":
        calls = 2 * config.num_hidden_layers + 1  # one after attention and one after the experts, and the last norm's
        return plan_slots(
            ladder, calls_per_descriptor=calls, bytes_per_token=token, max_batched_tokens=chunk, size=world
        )
    largest = max(one.num_tokens for one in ladder) * token
    return plan_channels(largest=largest, size=world, atomicity=atomicity, bytes_per_token=token)


def _refusal(
    plan: ArenaPlan,
    kind: str,
    config: V4Config,
    ladder: Sequence[Descriptor],
    chunk: int,
    atomicity: int | Unknown | None,
) -> ArenaError:
    """The refusal in this command's words: which descriptors would be left without, and which options would help."""
    assert plan.size is not None
    smallest_first = sorted(ladder, key=lambda one: one.num_tokens)
    fitting = 0
    for count in range(1, len(ladder)):
        if _plan(kind, config, smallest_first[:count], chunk, plan.size, atomicity).reason:
            break
        fitting = count
    channel = _plan("channel", config, ladder, chunk, plan.size, atomicity)
    do = [f"--arena channel (needs {_mib(channel.nbytes)})"] if kind == "slots" and not channel.reason else []
    do += [f"--max-requests {smallest_first[fitting - 1].num_requests}"] if fitting else []
    return ArenaError(
        "the capture ladder does not fit the arena plan",
        asked=plan.asked(),
        found=(plan.reason, *(f"uncovered: {one}" for one in smallest_first[fitting:])),
        do=", or ".join(do) or plan.do,
    )


def _document(plan: ArenaPlan, ladder: Sequence[Descriptor]) -> dict[str, Any]:
    from halma.hal.arena.coverage import coverage

    found = coverage(plan, ladder)
    lanes = [
        {"channel": one.name, "lane": name, **asdict(lane), "bytes": lane.nbytes}
        for one in plan.channels
        for name, lane in one.lanes.items()
    ]
    runs = plan.slots.runs.values() if plan.slots is not None else ()
    slots = [
        {"descriptor": str(run.descriptor), "slots": run.calls, "box": run.nbytes + run.stride}
        | {"offset": run.offset, "bytes": run.calls * run.step}
        for run in runs
    ]
    return {
        "arena": plan.kind,
        "world": plan.size,
        "fingerprint": plan.fingerprint,
        "asked": plan.asked(),
        "bytes": plan.nbytes,
        "limit": plan.limit,
        "needed_bytes": plan.slots.needed_bytes if plan.slots is not None else plan.nbytes,
        "lanes": lanes,
        "slots": slots,
        "covered": len(found.covered),
        "uncovered": [{"descriptor": str(one), "reason": reason} for one, reason in found.uncovered],
    }


def _print(document: dict[str, Any]) -> None:
    title = f"{document['model']}: {document['asked']}"
    lanes = [
        (
            f"{row['channel']}.{row['lane']}",
            f"{row['buffers']} x {row['senders']}",
            f"{row['largest']:,}",
            f"{row['bytes']:,}",
        )
        for row in document["lanes"]
    ]
    print_table(("lane", "buffers x senders", "largest message", "bytes"), lanes, title=title)
    if document["slots"]:
        rows = [
            (row["descriptor"], row["slots"], f"{row['box']:,}", f"{row['bytes']:,}") for row in document["slots"]
        ]
        print_table(("descriptor", "slots", "bytes each", "bytes"), rows, title="")
    left = document["limit"] - document["needed_bytes"]
    summary = [
        ("total", f"{document['bytes']:,} bytes a rank ({_mib(document['bytes'])}), {left:,} left of the limit"),
        ("covered", f"{document['covered']} descriptors"),
        *((f"uncovered: {row['descriptor']}", row["reason"]) for row in document["uncovered"]),
    ]
    print_table(("", ""), summary, title="")


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.4g} MiB"
