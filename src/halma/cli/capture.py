"""``halma capture``: a model's ladder, captured, and what each descriptor cost or why it stays eager."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halma.cli.capture_arena import show_arena
from halma.cli.output import at_least_one, emit_json, print_table, progress_bar
from halma.cli.team import Team, assembled, divisible
from halma.hal.errors import RequestError
from halma.hal.settings import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from halma.hal.backend import Backend
    from halma.hal.graph.descriptor import Descriptor
    from halma.hal.graph.session_report import SessionReport
    from halma.models.deepseek_v4.load import Loaded, ModelSource
    from halma.models.deepseek_v4.ranks import Ranks
    from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def capture(
    model: Annotated[str, typer.Option(help="A checkpoint directory, or tiny-v4, which comes with halma.")] = "tiny-v4",
    backend: Annotated[str | None, typer.Option(help="cpu, cuda, musa or a plugin's name.")] = None,
    order: Annotated[str, typer.Option(help="descending, ascending or shuffled(SEED); none of them matters.")] = (
        "descending"
    ),
    scratch: Annotated[bool, typer.Option(help="In a scratch session, which gives everything back.")] = False,
    budget: Annotated[str | None, typer.Option(help="Most bytes for workspace and graphs: 512MiB, 2GiB.")] = None,
    reserve: Annotated[str, typer.Option(help="Bytes of free memory that captures must leave: 512MiB.")] = "0",
    max_requests: Annotated[int, typer.Option(help="Requests that the state holds; the ladder's exact maximum.")] = 4,
    sizes: Annotated[str | None, typer.Option(help="Numbers of requests to capture: 1,2,4; default: doubling.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of the longest request.")] = 512,
    chunk: Annotated[int, typer.Option(help="Most prompt tokens in one step.")] = 64,
    compare_unshared: Annotated[
        bool,
        typer.Option("--compare-unshared", help="Capture each graph in a workspace and a pool of its own, too: both."),
    ] = False,
    arena: Annotated[
        str | None, typer.Option(help="channel or slots: show the plan of the memory that ranks share, and stop.")
    ] = None,
    world: Annotated[int, typer.Option(help="Ranks, for --arena.")] = 2,
    query_len: Annotated[int, typer.Option(help="Tokens a request in a step, drafts included, for --arena.")] = 1,
    tp: Annotated[
        int, typer.Option(help="Ranks that share the model: torchrun --nproc-per-node N -m halma capture --tp N ...")
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with a picture of memory over capture order.")] = None,
) -> None:
    """Capture a model's ladder and report each descriptor: nodes, milliseconds, bytes, why not."""
    limit = None if budget is None else byte_count("--budget", budget)
    left = byte_count("--reserve", reserve)
    for option, value in (("--context", context), ("--chunk", chunk)):
        at_least_one(option, value)
    wanted = _sizes(sizes, max_requests, order, limit, left)
    if arena is not None:
        _refuse_ranks(tp, f"--arena {arena}", "--world N, which needs no ranks")
        show_arena(
            model, arena, backend=backend, world=world, sizes=wanted, query_len=query_len, chunk=chunk, json=json
        )
        return
    if html is not None:
        _refuse_unwritable(html)
    if compare_unshared:
        _refuse_ranks(tp, "--compare-unshared", "one of the two: the ranks' memory has room for one ladder")
    with assembled(tp, "capture") as team:
        # Alone this comes before torch is imported: what is wrong is answered at once.
        chosen = team.together("the backend", lambda: team.backend(backend))
        from halma.models.deepseek_v4.load import default_carrier, resolve_model

        source = team.together("the model", lambda: divisible(resolve_model(model), tp))
        options = team.together(
            "the options", lambda: _options(chosen, source, max_requests, wanted, context, chunk, limit, left)
        )
        silent = json or not team.speaks
        carrier = default_carrier(chosen, options.arithmetic)
        with team.divided(chosen, source.config, max_requests * chunk, carrier) as ranks:
            loaded = _loaded(team, source, chosen, options, ranks, silent=silent)
            result = _measure(team, loaded.runner, order, scratch=scratch, compare=compare_unshared, silent=silent)
            if team.size > 1:
                result["ranks"] = _by_rank(team, ranks, result)
    if not team.speaks:
        return
    document = {"schema": "halma.capture/1", "model": loaded.name, **_limits(options), **result}
    if html is not None:
        _write_page(html, document)
    if json:
        emit_json(document)
    else:
        _print(document)


def _refuse_ranks(tp: int, other: str, do: str) -> None:
    if tp > 1:
        raise RequestError("this is one rank's alone", asked=f"{other} with --tp {tp}", do=do)


def _options(
    backend: Backend,
    source: ModelSource,
    max_requests: int,
    sizes: tuple[int, ...],
    context: int,
    chunk: int,
    budget: int | None,
    reserve: int,
) -> RunnerOptions:
    from halma.models.deepseek_v4.load import default_arithmetic, with_need
    from halma.models.deepseek_v4.runner import RunnerOptions

    options = RunnerOptions(
        max_requests=max_requests,
        chunk=chunk,
        batches=sizes,
        graph=settings().graph,
        eager_roles=settings().graph_switch.roles_off,
        capture_prefill=True,
        checked=settings().checked,
        budget=budget,
        reserve=reserve,
        arithmetic=default_arithmetic(backend, None),
        environment_routes=settings().routes,
    )
    return with_need(options, context, source.config)


def _loaded(
    team: Team, source: ModelSource, backend: Backend, options: RunnerOptions, ranks: Ranks, *, silent: bool
) -> Loaded:
    from halma.models.deepseek_v4.load import load_v4

    with progress_bar("loading", disable=silent) as loading:
        return team.together("loading", lambda: load_v4(source, backend, options, ranks=ranks, progress=loading))


def _by_rank(team: Team, ranks: Ranks, result: dict[str, Any]) -> list[dict[str, int]]:
    """What each rank's memory came to; in all other figures rank 0 speaks for itself."""
    names = ("workspace_bytes", "graph_bytes", "pool_bytes", "pool_growth", "captured")
    mine = {"arena_bytes": ranks.nbytes, **{name: result[name] for name in names}}
    return [{"rank": rank, **one} for rank, one in enumerate(team.ranks.exchange("the report", mine))]


def byte_count(option: str, text: str) -> int:
    """``4096``, ``512MiB``, ``1.5GB`` as bytes; KiB and its like are powers of 1024, KB and its like of 1000.

    Raises:
        RequestError: it cannot be read.
    """
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise RequestError(
            f"{option} takes a number of bytes",
            asked=f"{option} {text}",
            found="neither digits nor digits with a unit such as MiB or GB",
            do=f"{option} 512MiB, or {option} 536870912",
        )
    power = " kmgt".index(found[2].lower() or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def _sizes(text: str | None, max_requests: int, order: str, budget: int | None, reserve: int) -> tuple[int, ...]:
    """The numbers of requests, after everything that can be refused without a model was."""
    from halma.hal.graph.budget import MemoryBudget
    from halma.hal.graph.ladder import decode_ladder
    from halma.hal.graph.orders import ordered

    try:
        sizes = None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise RequestError(
            "sizes must be integers",
            asked=f"--sizes {text}",
            found="a part between commas that is none",
            do="--sizes 1,2,4",
        ) from None
    if max_requests < 1:
        raise RequestError(
            "a ladder needs a request",
            asked=f"--max-requests {max_requests}",
            found="a step of none",
            do="--max-requests 1 or more",
        )
    MemoryBudget(budget, reserve)
    ordered((), order)
    return tuple(one.num_requests for one in decode_ladder(max_requests, sizes=sizes))


def _limits(options: RunnerOptions) -> dict[str, Any]:
    return {
        "max_requests": options.max_requests,
        "context": options.max_context,
        "budget_bytes": options.budget,
        "reserve_bytes": options.reserve,
    }


def _measure(team: Team, runner: V4Runner, order: str, *, scratch: bool, compare: bool, silent: bool) -> dict[str, Any]:
    from halma.models.deepseek_v4.profiling import profile, unshared

    descriptors = runner.descriptors()
    begin = time.perf_counter()

    def captured() -> SessionReport:
        if scratch:
            return profile(runner, descriptors, order=order, progress=progress)
        runner.prepare(descriptors, progress, order)
        return runner.session.report()

    with _capturing("capturing", len(descriptors), not silent) as progress:
        report = team.together("capturing", captured)
    headroom = [{"name": one.name, "bytes": one.nbytes, "reason": one.reason} for one in runner.headroom]
    result = {"seconds": round(time.perf_counter() - begin, 3), **report.as_json(), "headroom": headroom}
    if compare:
        with _capturing("capturing unshared", len(descriptors), not silent) as progress:
            apart = unshared(runner, [row.descriptor for row in report.rows], progress=progress)
        result["unshared"] = _compared(report, apart)
    runner.close()
    return result


def _compared(report: SessionReport, apart: list[SessionReport]) -> dict[str, Any]:
    """The same ladder, each graph with a workspace and a pool of its own, beside the shared ones."""
    total = sum(one.total_bytes for one in apart)
    allocating: dict[str, int] = {}
    for op, count in ((op, count) for one in apart for op, count in one.allocating.items()):
        allocating[op] = allocating.get(op, 0) + count
    return {
        "total_bytes": total,
        "workspace_bytes": sum(one.workspace_bytes for one in apart),
        "pool_bytes": sum(one.pool_bytes for one in apart),
        "graph_bytes": sum(one.graph_bytes for one in apart),
        "allocating": dict(sorted(allocating.items())),
        "saved_bytes": total - report.total_bytes,
        "times": round(total / report.total_bytes, 2) if report.total_bytes else 0.0,
        "descriptors": [one.total_bytes for one in apart],
    }


@contextmanager
def _capturing(label: str, total: int, show: bool) -> Iterator[Callable[[Descriptor], None]]:
    with progress_bar(label, total=total, disable=not show) as advance:
        done = itertools.count(1)
        yield lambda descriptor: advance(next(done), total, str(descriptor))


def _refuse_unwritable(path: Path) -> None:
    """Before the work, which may take minutes; what happens to the folder meanwhile is seen when it is written."""
    folder = path.absolute().parent
    if path.is_dir():
        found = f"{path} is a folder"
    elif not folder.is_dir():
        found = f"there is no folder {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        found = f"no permission to write {path if path.exists() else folder}"
    else:
        return
    raise _unwritable(path, found)


def _unwritable(path: Path, found: str) -> RequestError:
    return RequestError(
        "the page cannot be written", asked=f"--html {path}", found=found, do="--html capture.html, or another file"
    )


def _write_page(path: Path, document: dict[str, Any]) -> None:
    from halma.cli.capture_page import page

    try:
        path.write_text(page(document), encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error
    print(f"halma: wrote {path}", file=sys.stderr)


def _print(document: dict[str, Any]) -> None:
    rows = [
        (
            row["descriptor"],
            row["nodes"] if not row["why_not"] else "-",
            f"{row['milliseconds']:.1f}",
            f"{row['bytes']:,}",
            row["why_not"],
        )
        for row in document["descriptors"]
    ]
    title = (
        f"{document['model']} on {document['backend']}, {document['kind']}, {document['order']}: "
        f"{document['captured']} of {len(rows)} captured"
    )
    print_table(("descriptor", "nodes", "ms", "bytes", "why not"), rows, title=title)
    summary = [
        ("evidence", document["evidence"]),
        ("workspace", f"{document['workspace_bytes']:,} bytes, shared by all"),
        ("graphs", _beyond(document)),
        *((("pool", _pool(document)),) if document["pool_bytes"] else ()),
        ("total", f"{document['total_bytes']:,} bytes"),
        *(
            (f"kept free: {one['name']}", one["reason"] if one["bytes"] else f"nothing: {one['reason']}")
            for one in document["headroom"]
        ),
    ]
    if "unshared" in document:
        apart = document["unshared"]
        summary += [
            ("unshared", f"{apart['total_bytes']:,} bytes, {apart['times']:g} times as many"),
            ("unshared, of it", f"workspaces {apart['workspace_bytes']:,}, pools {apart['pool_bytes']:,} bytes"),
            ("unshared, made in pools", _made(apart["allocating"])),
        ]
    print_table(("", ""), summary, title="")
    if "ranks" in document:
        rows = [tuple(f"{value:,}" for value in one.values()) for one in document["ranks"]]
        print_table(("rank", "arena", "workspace", "graphs", "pool", "pool grown by", "captured"), rows, title="")


def _pool(document: dict[str, Any]) -> str:
    return (
        f"{document['pool_bytes']:,} bytes for what ops allocate, grown by {document['pool_growth']:,} since it was "
        f"primed; results made there: {_made(document['allocating'])}"
    )


def _made(allocating: dict[str, int]) -> str:
    return ", ".join(f"{op} ({count})" for op, count in allocating.items()) or "none, only temporaries of library calls"


def _beyond(document: dict[str, Any]) -> str:
    if document["graph_bytes_measured"]:
        return f"{document['graph_bytes']:,} bytes beyond it, from the driver's free memory"
    return "no tensors beyond it; free memory here is not this process's alone, so nothing else is charged"
