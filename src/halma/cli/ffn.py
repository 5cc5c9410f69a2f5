"""``halma ffn``: text out of a model whose experts are on other ranks than its attention."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halma.cli.generate import options_of
from halma.cli.generate_report import result_of, run_engine
from halma.cli.mtp import MTP_HELP, drafts_of, with_mtp
from halma.cli.output import at_least_one, emit_json, print_table
from halma.cli.prompts import read_prompts
from halma.cli.spread import by_turns, print_texts
from halma.cli.team import Team, assembled
from halma.hal.errors import RequestError

if TYPE_CHECKING:
    from halma.hal.backend import Backend
    from halma.hal.collectives.ring_plan import RingGeometry
    from halma.hal.collectives.rings import Rings
    from halma.models.deepseek_v4.engine import Request
    from halma.models.deepseek_v4.load import ModelSource
    from halma.models.deepseek_v4.runner import RunnerOptions


def ffn(
    attention_ranks: Annotated[int, typer.Option(help="Ranks that attend and decode, with requests of their own.")],
    ffn_ranks: Annotated[int, typer.Option(help="Ranks that hold the experts and serve them.")],
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
        int, typer.Option(help="Requests that a rank decodes together; a single prompt is repeated for all ranks.")
    ] = 1,
    context: Annotated[int | None, typer.Option(help="Tokens of context; by default what the prompts need.")] = None,
    arithmetic: Annotated[
        str | None, typer.Option(help="exact or shipping; by default exact on cpu, shipping elsewhere.")
    ] = None,
    chunk: Annotated[int, typer.Option(help="Most prompt tokens in one step.")] = 64,
    mtp: Annotated[str | None, typer.Option(help=MTP_HELP)] = None,
    depth: Annotated[int, typer.Option(help="Items that an attention rank may have under way; a power of two.")] = 2,
    tp: Annotated[int, typer.Option(help="Ranks that share a role's part: not written yet, 1 alone.")] = 1,
    graph: Annotated[bool | None, typer.Option(help="Capture and replay; default: HALMA_GRAPH.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the end-of-text token.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Generate text with attention and experts on ranks of their own, as torchrun starts them."""
    for option, value in (
        ("--attention-ranks", attention_ranks), ("--ffn-ranks", ffn_ranks), ("--batch", batch), ("--chunk", chunk),
        ("--max-tokens", max_tokens),
    ):  # fmt: skip
        at_least_one(option, value)
    if context is not None:
        at_least_one("--context", context)
    if tp != 1:
        raise RequestError(
            "a role's ranks do not share their part yet",
            asked=f"--tp {tp} beside --attention-ranks and --ffn-ranks",
            found="attention ranks hold all heads, FFN ranks whole experts",
            do="more --attention-ranks or --ffn-ranks; halma generate --tp N divides every matrix",
        )
    drafts = drafts_of(mtp)
    asked = f"--attention-ranks {attention_ranks} --ffn-ranks {ffn_ranks}"
    with assembled(attention_ranks + ffn_ranks, "ffn", asked) as team:
        chosen = team.together("the backend", lambda: team.backend(backend))
        from halma.models.deepseek_v4.load import resolve_model

        source = team.together("the model", lambda: resolve_model(model))
        prompts = team.from_first(
            "the prompts", lambda: read_prompts(prompt, file, prompt_ids, lambda text: source.codec.encode(text))
        )
        if len(prompts) == 1:
            prompts = prompts * (batch * attention_ranks)
        longest, share = max(map(len, prompts)), -(-len(prompts) // attention_ranks)

        def sized() -> RunnerOptions:
            found = options_of(
                chosen, source, min(batch, share), context or longest + max_tokens, chunk, graph, arithmetic
            )
            return with_mtp(found, drafts, source.config, longest)

        options = team.together("the options", sized)
        requests = source.requests(
            prompts, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, ignore_eos=ignore_eos
        )
        geometry = team.together(
            "the roles", lambda: _geometry(source, chosen, options, attention_ranks, ffn_ranks, depth)
        )
        part = _Part(team, source, chosen, options, geometry, requests[team.rank :: attention_ranks], drafts)
        everybody = part.play()
    if not team.speaks:
        return
    result = _merged(everybody, attention_ranks, len(requests))
    if json:
        emit_json(result)
    else:
        _print(result, source, requests)


def _geometry(
    source: ModelSource, backend: Backend, options: RunnerOptions, attention: int, ffn: int, depth: int
) -> RingGeometry:
    from halma.models.deepseek_v4.load import default_carrier
    from halma.models.deepseek_v4.roles import geometry_of

    return geometry_of(
        source.config,
        attention=attention,
        ffn=ffn,
        max_tokens=options.most_rows,
        carrier=default_carrier(backend, options.arithmetic),
        arithmetic=options.arithmetic,
        mtp=options.mtp > 0,
        depth=depth,
    )


@dataclass
class _Part:
    """One rank's part of the command."""

    team: Team
    source: ModelSource
    backend: Backend
    options: RunnerOptions
    geometry: RingGeometry
    requests: list[Request]
    drafts: int | str | None

    def play(self) -> list[dict[str, Any]]:
        """Every rank's report, by rank."""
        with self._rings() as rings:
            mine = self._attend(rings) if rings.attends else self._serve(rings)
            mine["memory_bytes"]["rings"] = rings.nbytes
            return self.team.ranks.exchange("the report", mine)

    @contextlib.contextmanager
    def _rings(self) -> Iterator[Rings]:
        import torch.distributed as distributed

        import halma
        from halma.models.deepseek_v4.roles import opened

        team = self.team
        group = team.together(
            "the group", lambda: halma.collectives(world=distributed.group.WORLD, backend=self.backend)
        )
        with contextlib.ExitStack() as held:
            yield team.together("the rings", lambda: held.enter_context(opened(group, self.geometry)))

    def _attend(self, rings: Rings) -> dict[str, Any]:
        from halma.models.deepseek_v4.engine import Engine
        from halma.models.deepseek_v4.experts import FarExperts
        from halma.models.deepseek_v4.load import load_v4

        loaded = self.team.together(
            "loading", lambda: load_v4(self.source, self.backend, self.options, experts=FarExperts(rings))
        )
        # From here on nobody waits for an attention rank, and it waits for FFN ranks alone.
        engine = Engine(loaded.runner, drafts=self.drafts)
        generations = [engine.submit(request) for request in self.requests]
        if not generations:
            rings.finish()
            return {"role": "attention", "generations": [], "memory_bytes": {"weights": loaded.weight_bytes}}
        variants = sorted({"sample" if request.temperature > 0 else "greedy" for request in self.requests})
        loaded.runner.prepare(loaded.runner.descriptors(variants))
        engine.start()
        result = result_of(loaded, engine, generations, run_engine(engine))
        result["role"] = "attention"
        if self.drafts is not None:
            result["mtp"] = engine.drafting()
        rings.finish()
        loaded.runner.close()
        return result

    def _serve(self, rings: Rings) -> dict[str, Any]:
        from halma.models.deepseek_v4.roles import ServingOptions, expert_server

        first, last = rings.geometry.experts[rings.number : rings.number + 2]
        given = self.options
        graph = given.graph and "ffn" not in given.eager_roles
        options = ServingOptions(graph, given.strict, given.checked, given.environment_routes)

        def ready() -> tuple[Any, int]:
            held = self._held((first, last))
            return expert_server(rings, held, self.backend, options), held.nbytes

        server, nbytes = self.team.together("loading", ready)
        served = server.serve()
        return {
            "role": "ffn",
            "experts": [first, last],
            "served": served,
            "memory_bytes": {"weights": nbytes},
        }

    def _held(self, part: tuple[int, int]) -> Any:
        from halma.models.deepseek_v4.load import load_expert_part

        return load_expert_part(self.source, self.backend, self.options, part, ranks=self.team.size)


def _merged(everybody: list[dict[str, Any]], attention: int, count: int) -> dict[str, Any]:
    """One report: requests went to the attention ranks by turns."""
    first, ffn = everybody[0], everybody[attention:]
    generations = by_turns([one["generations"] for one in everybody[:attention]], count)
    return {
        **first,
        "schema": "halma.ffn/1",
        "generations": generations,
        "tokens_per_second": sum(one.get("tokens_per_second", 0.0) for one in everybody[:attention]),
        "attention_ranks": [
            {"requests": len(one["generations"]), "memory_bytes": one["memory_bytes"]} for one in everybody[:attention]
        ],
        "ffn_ranks": [{name: one[name] for name in ("experts", "served", "memory_bytes")} for one in ffn],
    }


def _print(result: dict[str, Any], source: ModelSource, requests: list[Request]) -> None:
    print_texts(source, requests, result["generations"])
    if not sys.stdout.isatty():
        return
    rows = [
        (f"FFN {number}", f"experts {one['experts'][0]} to {one['experts'][1] - 1}: {one['served']['items']} items, "
         f"{one['served']['rows']} rows, {one['served']['pairs']} pairs")
        for number, one in enumerate(result["ffn_ranks"])
    ]  # fmt: skip
    rows += [
        (f"attention {number}", f"{one['requests']} requests") for number, one in enumerate(result["attention_ranks"])
    ]
    print_table(("", ""), [*rows, ("tokens/s", f"{result['tokens_per_second']:.1f}")])
