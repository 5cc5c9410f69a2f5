"""``halma bench decode``: what a step costs and gives, with MTP and without, at several batch sizes."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halma.cli.mtp import AHEAD_HELP, MTP_HELP, PUBLISHED, drafts_of, with_mtp
from halma.cli.output import at_least_one, emit_json, print_table, progress_bar
from halma.hal.errors import RequestError
from halma.hal.settings import settings

if TYPE_CHECKING:
    from halma.hal.backend import Backend
    from halma.models.deepseek_v4.engine import Request
    from halma.models.deepseek_v4.load import Loaded, ModelSource
    from halma.models.deepseek_v4.runner import RunnerOptions

WARM = 4
"""Steps before the measured ones."""
TEXT = (
    "the river had risen in the night and the bridge below the mill was under water so the men who came to work from "
    "the other side stood on the bank with their tools on their shoulders and waited for the ferry while the miller "
    "counted the sacks that were still dry and the boys of the village threw sticks into the stream to see how fast it "
    "ran and which of them would be the first to reach the bend where the old willow leaned over the road to the town"
)
"""Prompts are this text from different words on, so that no two requests have the same."""
WORDS = 24


def bench(
    what: Annotated[str, typer.Argument(help="decode: steps of requests that are all under way.")],
    model: Annotated[str, typer.Option(help="A checkpoint directory, or tiny-v4, which comes with halma.")] = "tiny-v4",
    backend: Annotated[str | None, typer.Option(help="cpu, cuda, musa or a plugin's name.")] = None,
    mtp: Annotated[str | None, typer.Option(help=MTP_HELP + " Measured beside steps without.")] = None,
    batch: Annotated[str, typer.Option(help="Numbers of requests: 1,4,16,64.")] = "1",
    steps: Annotated[int, typer.Option(help="Measured steps.")] = 32,
    ahead: Annotated[int, typer.Option(help=AHEAD_HELP)] = 1,
    context: Annotated[int | None, typer.Option(help="Tokens of context; by default what the steps need.")] = None,
    arithmetic: Annotated[
        str | None, typer.Option(help="exact or shipping; by default exact on cpu, shipping elsewhere.")
    ] = None,
    graph: Annotated[bool | None, typer.Option(help="Capture and replay; default: HALMA_GRAPH.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Measure decode steps: tokens a second, milliseconds a step, acceptance of drafts."""
    if what != "decode":
        raise RequestError(f"there is no benchmark called {what!r}", do="halma bench decode")
    sizes = _sizes(batch)
    at_least_one("--steps", steps)
    if context is not None:
        at_least_one("--context", context)
    drafts = drafts_of(mtp)
    import halma

    chosen = halma.backend(backend)
    from halma.models.deepseek_v4.load import load_v4, resolve_model

    source = resolve_model(model)
    arms = [None] if drafts is None else [None, drafts]
    planned = [_planned(chosen, source, size, arm, steps, context, arithmetic, graph) for size in sizes for arm in arms]
    with progress_bar("loading", disable=json) as loading:
        # The arm with the most: its weights hold the MTP module where one is asked for.
        largest = max((options for options, _ in planned), key=lambda one: (one.mtp, one.max_requests))
        loaded = load_v4(source, chosen, largest, progress=loading)
    rows = [
        _measured(chosen, loaded, options, requests, steps, ahead, arm)
        for (options, requests), arm in zip(planned, arms * len(sizes), strict=True)
    ]
    document = {
        "schema": "halma.bench/1",
        "benchmark": "decode",
        "model": loaded.name,
        "backend": chosen.name,
        "evidence": chosen.evidence,
        "device": chosen.device.properties().get("name", ""),
        "arithmetic": largest.arithmetic,
        "steps": steps,
        "ahead": ahead,
        "rows": _against_plain(rows),
        "published": PUBLISHED,
    }
    if json:
        emit_json(document)
    else:
        _print(document)


def _sizes(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise RequestError("--batch takes numbers of requests", asked=f"--batch {text}", do="--batch 1,4,16,64")
    return found


def _planned(
    backend: Backend,
    source: ModelSource,
    size: int,
    drafts: int | str | None,
    steps: int,
    context: int | None,
    arithmetic: str | None,
    graph: bool | None,
) -> tuple[RunnerOptions, list[Request]]:
    """The runner of one arm and what it serves: requests that are all under way until the last measured step."""
    from halma.models.deepseek_v4.engine import MOST_AHEAD, Request
    from halma.models.deepseek_v4.load import default_arithmetic, with_need
    from halma.models.deepseek_v4.runner import MAX_DRAFTS, RunnerOptions

    prompts = _prompts(source, size)
    longest = max(map(len, prompts))
    width = 1 if drafts is None else 1 + (drafts if isinstance(drafts, int) else MAX_DRAFTS)
    answer = (WARM + steps + MOST_AHEAD + 1) * width
    need = longest + answer
    if context is not None and context < need:
        raise RequestError(
            "the measured steps do not fit into the context",
            asked=f"--context {context}",
            found=f"{need} tokens are needed: {longest} of prompt, {answer} that {steps} steps may give",
            do=f"--context {need}, or fewer --steps",
        )
    options = RunnerOptions(
        max_requests=size,
        batches=(size,),
        graph=settings().graph if graph is None else graph,
        eager_roles=settings().graph_switch.roles_off,
        checked=settings().checked,
        strict=settings().strict,
        arithmetic=default_arithmetic(backend, arithmetic),
        environment_routes=settings().routes,
    )
    options = with_mtp(with_need(options, context or need, source.config), drafts, source.config, longest)
    return options, [Request(prompt, answer) for prompt in prompts]


def _prompts(source: ModelSource, size: int) -> list[tuple[int, ...]]:
    words, codec = TEXT.split(), source.codec_or_none
    starts = [number * 5 % len(words) for number in range(size)]  # 5 and the number of words have no common divisor
    if codec is not None:
        return [codec.encode(" ".join((words * 2)[start : start + WORDS])) for start in starts]
    vocabulary = source.config.vocab_size  # without a tokenizer any tokens will do, as long as they differ
    return [tuple((start * 7919 + place * 104729) % vocabulary for place in range(WORDS)) for start in range(size)]


def _measured(
    backend: Backend,
    loaded: Loaded,
    options: RunnerOptions,
    requests: list[Request],
    steps: int,
    ahead: int,
    drafts: int | str | None,
) -> dict[str, Any]:
    from halma.models.deepseek_v4.engine import Engine
    from halma.models.deepseek_v4.engine_costs import time_share
    from halma.models.deepseek_v4.runner import V4Runner

    model = loaded.runner.model
    runner = V4Runner(loaded.config, model.weights, backend, options, carrier=model.carrier)
    runner.prepare(runner.descriptors(("greedy",)))
    engine = Engine(runner, ahead=ahead, drafts=drafts)
    engine.start()
    generations = [engine.submit(request) for request in requests]
    for _ in range(WARM):
        engine.step()
    engine.drain()
    before, waits = replace(engine.counters), engine.host_waits
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    engine.drain()
    seconds = time.perf_counter() - begin
    tokens = engine.counters.tokens - before.tokens
    row = {
        "requests": len(requests),
        "mtp": drafts,
        "milliseconds_per_step": seconds / steps * 1e3,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "replayed_steps": engine.counters.replayed - before.replayed,
        "host_waits": engine.host_waits - waits,
        "back_pressure": engine.counters.back_pressure - before.back_pressure,
        "drafting": engine.drafting(),
    }
    for generation in generations:
        engine.cancel(generation)
    engine.run()
    row["time_share"] = time_share(runner, len(requests), options.mtp) if options.mtp else None
    runner.close()
    return row


def _against_plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beside each row with MTP: its cost and speed as a multiple of those of the row without, just before it."""
    for plain, row in itertools.pairwise(rows):
        if row["mtp"] is not None:
            row["step_over_plain"] = row["milliseconds_per_step"] / plain["milliseconds_per_step"]
            row["speedup"] = row["tokens_per_second"] / plain["tokens_per_second"]
    return rows


def _print(document: dict[str, Any]) -> None:
    table: list[tuple[str, ...]] = []
    for row in document["rows"]:
        drafting, share = row["drafting"], row["time_share"]
        cells = [str(row["requests"]), str(row["mtp"] or "-")]
        cells += [f"{row['milliseconds_per_step']:.2f}", f"{row['tokens_per_second']:.1f}"]
        if drafting is None:
            table.append((*cells, "", "", "", "", ""))
            continue
        length = drafting["mean_accepted_length"]
        cells += ["" if length is None else f"{length:.2f}", " ".join(f"{one:.2f}" for one in drafting["acceptance"])]
        cells += [f"{row['step_over_plain']:.2f}", f"{row['speedup']:.2f}"]
        table.append((*cells, share["reason"] if share["draft"] is None else f"{share['draft']:.0%}"))
    title = f"{document['model']} on {document['backend']} ({document['evidence']}), {document['arithmetic']}"
    headers = ("batch", "mtp", "ms/step", "tokens/s", "length", "acceptance", "step/plain", "speedup", "drafting")
    print_table(headers, table, title=title)
    if any(row["mtp"] == PUBLISHED["drafts"] for row in document["rows"]):
        print(PUBLISHED["text"])
