"""``halma generate``: text out of a model."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halma.cli.output import at_least_one, emit_json, print_table, progress_bar
from halma.cli.team import Team, assembled, divisible
from halma.hal.errors import RequestError
from halma.hal.settings import settings

if TYPE_CHECKING:
    from halma.hal.backend import Backend
    from halma.models.deepseek_v4.engine import Engine, Generation, Request
    from halma.models.deepseek_v4.load import Loaded, ModelSource
    from halma.models.deepseek_v4.ranks import Ranks
    from halma.models.deepseek_v4.runner import RunnerOptions


def generate(
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Text to go on from; may be repeated.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids instead of text: 0,17,42.")] = None,
    model: Annotated[str, typer.Option(help="A checkpoint directory, or tiny-v4, which comes with halma.")] = "tiny-v4",
    backend: Annotated[str | None, typer.Option(help="cpu, cuda, musa or a plugin's name.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus: the likeliest tokens that hold this much probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same text, at any batch size.")] = 0,
    batch: Annotated[
        int, typer.Option(help="Requests decoded together; a single prompt is repeated with seeds seed, seed+1, ...")
    ] = 1,
    context: Annotated[int | None, typer.Option(help="Tokens of context; by default what the prompts need.")] = None,
    arithmetic: Annotated[
        str | None, typer.Option(help="exact or shipping; by default exact on cpu, shipping elsewhere.")
    ] = None,
    chunk: Annotated[int, typer.Option(help="Most prompt tokens in one step.")] = 64,
    tp: Annotated[
        int, typer.Option(help="Ranks that share the model: torchrun --nproc-per-node N -m halma generate --tp N ...")
    ] = 1,
    graph: Annotated[bool | None, typer.Option(help="Capture and replay; default: HALMA_GRAPH.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the end-of-text token.")] = False,
    stream: Annotated[bool, typer.Option(help="Show text as it comes.")] = True,
    table: Annotated[bool | None, typer.Option(help="End with a table; by default on a terminal.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Generate text: from --prompt, --file, or standard input."""
    if batch < 1:
        raise RequestError("a batch needs at least one request", asked=f"--batch {batch}", do="--batch 1 or more")
    if max_tokens < 1:
        raise RequestError("nothing to generate", asked=f"--max-tokens {max_tokens}", do="--max-tokens 1 or more")
    at_least_one("--chunk", chunk)
    if context is not None:
        at_least_one("--context", context)
    with assembled(tp, "generate") as team:
        # Alone this comes before torch is imported: a wrong name is answered at once.
        chosen = team.together("the backend", lambda: team.backend(backend))
        from halma.models.deepseek_v4.load import resolve_model

        source = team.together("the model", lambda: divisible(resolve_model(model), tp))
        prompts = team.from_first(
            "the prompts", lambda: _prompts(prompt, file, prompt_ids, lambda text: source.codec.encode(text))
        )
        if len(prompts) == 1:
            prompts = prompts * batch
        need = context or max(map(len, prompts)) + max_tokens
        options = team.together(
            "the options",
            lambda: _options(chosen, source, min(batch, len(prompts)), need, chunk, graph, arithmetic),
        )
        requests = source.requests(
            prompts, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, ignore_eos=ignore_eos
        )
        show = _Show(source, stream=stream and not json and team.speaks)
        result = _generated(team, source, chosen, options, requests, show, silent=json or not team.speaks)
    if not team.speaks:
        return
    if json:
        emit_json(result)
    elif table if table is not None else sys.stdout.isatty():
        _print_summary(result)


def _options(
    backend: Backend,
    source: ModelSource,
    at_once: int,
    need: int,
    chunk: int,
    graph: bool | None,
    arithmetic: str | None,
) -> RunnerOptions:
    from halma.models.deepseek_v4.load import default_arithmetic, with_need
    from halma.models.deepseek_v4.runner import RunnerOptions

    options = RunnerOptions(
        max_requests=at_once,
        chunk=chunk,
        graph=settings().graph if graph is None else graph,
        eager_roles=settings().graph_switch.roles_off,
        checked=settings().checked,
        strict=settings().strict,
        arithmetic=default_arithmetic(backend, arithmetic),
        environment_routes=settings().routes,
    )
    return with_need(options, need, source.config)


def _generated(
    team: Team,
    source: ModelSource,
    backend: Backend,
    options: RunnerOptions,
    requests: list[Request],
    show: _Show,
    *,
    silent: bool,
) -> dict[str, Any]:
    """Load, run, report: on every rank. Their requests are the same, so all that they decide is."""
    from halma.models.deepseek_v4.engine import Engine
    from halma.models.deepseek_v4.load import load_v4

    with team.divided(backend, source.config, max(options.max_requests, options.chunk)) as ranks:
        with progress_bar("loading", disable=silent) as loading:
            loaded = team.together("loading", lambda: load_v4(source, backend, options, ranks=ranks, progress=loading))
        for note in loaded.notes if team.speaks else ():
            print(f"halma: note: {note}", file=sys.stderr)
        engine = Engine(loaded.runner, on_token=show.token)
        generations = team.together("the requests", lambda: [engine.submit(request) for request in requests])
        run = _run(team, engine, loaded, requests, silent=silent)
        show.rest(generations)
        tokens = [(generation.tokens, generation.finish) for generation in generations]
        team.together("the tokens", lambda: ranks.require_same("their tokens", tokens))
        result = _result(loaded, engine, generations, run)
        if team.size > 1:
            result["tensor_parallel"] = _parallel(team, ranks, loaded)
        loaded.runner.close()
    return result


@dataclass(frozen=True)
class _Run:
    seconds: float
    prefill_seconds: float
    tokens: int


def _prompts(
    texts: list[str] | None, file: Path | None, ids: str | None, encode: Callable[[str], tuple[int, ...]]
) -> list[tuple[int, ...]]:
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


class _Show:
    """Streams the first request; the others are shown whole at the end."""

    def __init__(self, source: ModelSource, *, stream: bool) -> None:
        self._codec = source.codec_or_none
        self._stream = stream
        self._streams: dict[int, Any] = {}

    def token(self, generation: Generation, token: int) -> None:
        if not self._stream or generation.id != 0 or self._codec is None:
            return
        decoder = self._streams.setdefault(0, self._codec.stream())
        if not generation.tokens[:-1]:
            sys.stdout.write(self._codec.decode(list(generation.request.prompt)))
        sys.stdout.write(decoder.push(token))
        sys.stdout.flush()

    def rest(self, generations: list[Generation]) -> None:
        if not self._stream:
            return
        if 0 in self._streams:
            sys.stdout.write(self._streams[0].finish() + "\n")
        for number, generation in enumerate(generations[0 if self._codec is None else 1 :], start=2):
            shown = (
                str(generation.tokens)
                if self._codec is None
                else self._codec.decode([*generation.request.prompt, *generation.tokens])
            )
            sys.stdout.write(f"\n[{number}/{len(generations)}] {shown}\n")
        sys.stdout.flush()


def _run(team: Team, engine: Engine, loaded: Loaded, requests: list[Request], *, silent: bool) -> _Run:
    variants = sorted({"sample" if request.temperature > 0 else "greedy" for request in requests})
    descriptors = loaded.runner.descriptors(variants)
    with progress_bar("capturing", total=len(descriptors), disable=silent) as capturing:
        done = itertools.count(1)

        def progress(descriptor: object) -> None:
            capturing(next(done), len(descriptors), str(descriptor))

        team.together("capturing", lambda: loaded.runner.prepare(descriptors, progress=progress))
    begin = time.perf_counter()
    engine.step()
    first = time.perf_counter()
    already = engine.counters.tokens
    while engine.busy:
        engine.step()
    end = time.perf_counter()
    return _Run(end - first, first - begin, engine.counters.tokens - already)


def _result(loaded: Loaded, engine: Engine, generations: list[Generation], run: _Run) -> dict[str, Any]:
    runner, codec = loaded.runner, loaded.codec
    texts = ["" if codec is None else codec.decode(g.tokens) for g in generations]
    rate = run.tokens / run.seconds if run.seconds and run.tokens else 0.0
    return {
        "schema": "halma.generate/1",
        "text": texts[0],
        "token_ids": generations[0].tokens,
        "finish": generations[0].finish,
        "tokens_per_second": rate,
        "backend": runner.backend.name,
        "evidence": runner.backend.evidence,
        "arithmetic": runner.options.arithmetic,
        "model": loaded.name,
        "batch": runner.options.max_requests,
        "generations": [
            {"text": text, "token_ids": g.tokens, "finish": g.finish, "prompt_tokens": len(g.request.prompt)}
            for text, g in zip(texts, generations, strict=True)
        ],
        "seconds": {"first_step": run.prefill_seconds, "decode": run.seconds},
        "graphs": {
            "captured": len(runner.session),
            "replayed_steps": engine.counters.replayed,
            "eager_steps": engine.counters.eager,
            "why_eager": runner.session.eager_steps,
        },
        "memory_bytes": {
            "weights": loaded.weight_bytes,
            "state": runner.model.state.nbytes,
            "workspace": runner.workspace.report().total,
        },
    }


def _parallel(team: Team, ranks: Ranks, loaded: Loaded) -> dict[str, Any]:
    """How the model is divided, and what a decode step exchanges and how."""
    from halma.hal.decisions import decisions

    runner, config = loaded.runner, loaded.config
    mine = {"weights": loaded.weight_bytes, "state": runner.model.state.nbytes, "arena": ranks.nbytes}
    nbytes = runner.options.max_requests * config.hidden_size * runner.model.carrier.itemsize
    made = [decision for decision, _ in decisions.all("collective")]
    reduced = f"all_reduce of {nbytes} bytes"
    return {
        "size": team.size,
        "rank_memory_bytes": team.ranks.exchange("the report", mine),
        "all_reduces_per_step": 2 * config.num_hidden_layers + 1,
        "all_reduce_bytes": nbytes,
        "all_reduce_algorithm": next((one.chosen for one in made if one.subject.startswith(reduced)), "none was made"),
        "collectives": [{"call": one.subject, "algorithm": one.chosen, "why": one.reason} for one in made],
    }


def _print_summary(result: dict[str, Any]) -> None:
    memory, graphs = result["memory_bytes"], result["graphs"]
    rows = [
        ("backend", result["backend"]),
        ("evidence", result["evidence"]),
        ("arithmetic", result["arithmetic"]),
        ("tokens/s", f"{result['tokens_per_second']:.1f}"),
        (
            "graphs",
            f"{graphs['captured']} captured, {graphs['replayed_steps']} steps replayed, {graphs['eager_steps']} eager",
        ),
        *(
            (("why eager", "; ".join(f"{why} ({count})" for why, count in graphs["why_eager"].items())),)
            if graphs["why_eager"]
            else ()
        ),
        ("memory", ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in memory.items())),
    ]
    parallel = result.get("tensor_parallel")
    if parallel is not None:
        each = [f"{one['weights'] / 2**20:.1f} + {one['state'] / 2**20:.1f}" for one in parallel["rank_memory_bytes"]]
        way = f"{parallel['all_reduces_per_step']} of {parallel['all_reduce_bytes']} bytes a step"
        rows += [
            ("ranks", f"{parallel['size']}: weights and state {', '.join(each)} MiB"),
            ("all-reduces", f"{way}, by {parallel['all_reduce_algorithm']}"),
        ]
    print_table(("", ""), rows)
