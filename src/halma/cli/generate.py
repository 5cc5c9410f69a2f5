"""``halma generate``: text out of a model."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halma.cli.generate_report import parallel_of, print_summary, result_of, run_engine
from halma.cli.mtp import AHEAD_HELP, MTP_HELP, drafts_of, with_mtp
from halma.cli.output import at_least_one, emit_json, note_simulated, progress_bar
from halma.cli.prompts import read_prompts
from halma.cli.spread import EP_HELP, Serving, check_parallel, generate_spread
from halma.cli.team import Team, assembled, divisible
from halma.hal.errors import RequestError
from halma.hal.settings import settings

if TYPE_CHECKING:
    from halma.hal.backend import Backend
    from halma.models.deepseek_v4.engine import Engine, Generation, Request
    from halma.models.deepseek_v4.load import Loaded, ModelSource
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
    mtp: Annotated[str | None, typer.Option(help=MTP_HELP)] = None,
    ahead: Annotated[int, typer.Option(help=AHEAD_HELP)] = 1,
    tp: Annotated[
        int, typer.Option(help="Ranks that share the model: torchrun --nproc-per-node N -m halma generate --tp N ...")
    ] = 1,
    ep: Annotated[int, typer.Option(help=EP_HELP)] = 1,
    graph: Annotated[bool | None, typer.Option(help="Capture and replay; default: HALMA_GRAPH.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the end-of-text token.")] = False,
    stop: Annotated[
        list[str] | None, typer.Option(help="End where this text first appears, after it; may be repeated.")
    ] = None,
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
    at_least_one("--ep", ep)
    if tp < 1:
        raise RequestError("--tp takes a number from 1 on", asked=f"--tp {tp}", do="--tp 1 or more")
    drafts = drafts_of(mtp)
    # Ranks that share their attention have the same requests: one group of them, or several that exchange rows.
    groups, asked = check_parallel(ep, tp, drafts)
    with assembled(tp * groups, "generate", asked) as team:
        # Alone this comes before torch is imported: a wrong name is answered at once.
        chosen = team.together("the backend", lambda: team.backend(backend))
        if chosen.evidence == "simulated" and team.speaks:
            note_simulated(chosen.name)
        from halma.models.deepseek_v4.load import resolve_model

        source = team.together("the model", lambda: divisible(resolve_model(model), tp, ep))
        prompts = team.from_first(
            "the prompts", lambda: read_prompts(prompt, file, prompt_ids, lambda text: source.codec.encode(text))
        )
        if len(prompts) == 1:
            prompts = prompts * (batch * groups)
        longest, share = max(map(len, prompts)), -(-len(prompts) // groups)
        need = context or longest + max_tokens

        def sized() -> RunnerOptions:
            found = options_of(chosen, source, min(batch, share), need, chunk, graph, arithmetic)
            return with_mtp(found, drafts, source.config, longest)

        options = team.together("the options", sized)
        requests = source.requests(
            prompts, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, ignore_eos=ignore_eos
        )
        requests = [replace(request, stop_text=tuple(stop or ())) for request in requests]
        if temperature == 0 and top_p < 1 and team.speaks:
            print("halma: note: --top-p has no effect at temperature 0, which is greedy", file=sys.stderr)
        if groups > 1:
            generate_spread(team, source, chosen, options, requests, Serving(tp, drafts, ahead, json))
            return
        show = _Show(source, stream=stream and not json and team.speaks)
        tabled = team.from_first(
            "what to report", lambda: not json and (sys.stdout.isatty() if table is None else table)
        )
        how = _How(drafts, ahead, ep > 1, silent=json or not team.speaks, measured=json or tabled)
        result = _generated(team, source, chosen, options, requests, show, how)
    if not team.speaks:
        return
    if json:
        emit_json(result)
    elif tabled:
        print_summary(result)


@dataclass(frozen=True)
class _How:
    """How to serve: the engine's options, whether each rank has a part of the experts (``parted``) or of each expert,
    whether to say how it goes, and to measure for a report afterwards."""

    drafts: int | str | None
    ahead: int
    parted: bool
    silent: bool
    measured: bool


def options_of(
    backend: Backend,
    source: ModelSource,
    at_once: int,
    need: int,
    chunk: int,
    graph: bool | None,
    arithmetic: str | None,
) -> RunnerOptions:
    """A runner's options as the command line gives them. Raises RequestError: the context is too long, and so on."""
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
    how: _How,
) -> dict[str, Any]:
    """Load, run, report: on every rank. Their requests are the same, so all that they decide is."""
    from halma.models.deepseek_v4.experts import OWN_EXPERTS
    from halma.models.deepseek_v4.load import default_carrier, load_v4
    from halma.models.deepseek_v4.parted import PartedExperts

    carrier = default_carrier(backend, options.arithmetic)
    with team.divided(backend, source.config, options.most_rows, carrier) as ranks:
        experts = PartedExperts(source.config, ranks) if how.parted else OWN_EXPERTS
        with progress_bar("loading", disable=how.silent) as loading:

            def load() -> Loaded:
                return load_v4(source, backend, options, ranks=ranks, experts=experts, progress=loading)

            loaded = team.together("loading", load)
        for note in loaded.notes if team.speaks else ():
            print(f"halma: note: {note}", file=sys.stderr)
        engine = team.together("the engine", lambda: _engine(loaded, how, show))
        generations = team.together("the requests", lambda: [engine.submit(request) for request in requests])
        _capture(team, loaded, requests, silent=how.silent)
        team.together("measuring", engine.start)
        run = run_engine(engine)
        show.rest(generations)
        tokens = [(generation.tokens, generation.finish) for generation in generations]
        team.together("the tokens", lambda: ranks.require_same("their tokens", tokens))
        result = result_of(loaded, engine, generations, run)
        if how.drafts is not None and how.measured:
            result["mtp"] = {**(engine.drafting() or {}), "time_share": _time_share(loaded)}
        if team.size > 1:
            result["tensor_parallel"] = parallel_of(team, ranks, loaded)
        if how.parted:
            held = team.ranks.exchange("the experts of each", experts.held)
            result["expert_parallel"] = [{"experts": one} for one in held]
        loaded.runner.close()
    return result


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


def _engine(loaded: Loaded, how: _How, show: _Show) -> Engine:
    from halma.models.deepseek_v4.engine import Engine

    decoder = None if loaded.codec is None else loaded.codec.decode
    return Engine(loaded.runner, ahead=how.ahead, drafts=how.drafts, decoder=decoder, on_token=show.token)


def _capture(team: Team, loaded: Loaded, requests: list[Request], *, silent: bool) -> None:
    variants = sorted({"sample" if request.temperature > 0 else "greedy" for request in requests})
    descriptors = loaded.runner.descriptors(variants)
    with progress_bar("capturing", total=len(descriptors), disable=silent) as capturing:
        done = itertools.count(1)

        def progress(descriptor: object) -> None:
            capturing(next(done), len(descriptors), str(descriptor))

        team.together("capturing", lambda: loaded.runner.prepare(descriptors, progress=progress))


def _time_share(loaded: Loaded) -> dict[str, Any]:
    from halma.models.deepseek_v4.engine_costs import time_share

    options = loaded.runner.options
    return time_share(loaded.runner, options.max_requests, options.mtp)
