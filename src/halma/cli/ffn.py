"""``halma ffn``: text out of a model whose experts are on other ranks than its attention."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halma.cli.generate import options_of
from halma.cli.generate_report import result_of, run_engine
from halma.cli.mtp import MTP_HELP, drafts_of, with_mtp
from halma.cli.output import at_least_one, emit_json, note_simulated, print_table
from halma.cli.prompts import read_prompts
from halma.cli.spread import by_turns, print_texts
from halma.cli.team import Team, assembled, divisible, world_of
from halma.models.deepseek_v4.role_ranks import ItemsChoice, RoleRanks, check_items

if TYPE_CHECKING:
    from halma.hal.backend import Backend
    from halma.hal.collectives.group import Group
    from halma.hal.collectives.ring_plan import RingGeometry
    from halma.hal.collectives.rings import Rings
    from halma.models.deepseek_v4.engine import Request
    from halma.models.deepseek_v4.load import ModelSource
    from halma.models.deepseek_v4.role_groups import Attending
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
    tp: Annotated[
        int, typer.Option(help="Attention ranks that share a model, a group of so many; FFN ranks hold whole experts.")
    ] = 1,
    items: Annotated[
        str,
        typer.Option(
            help="How FFN ranks learn of items: headers, worst-case (one graph for all, no header is read) or auto."
        ),
    ] = "auto",
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
    at_least_one("--tp", tp)
    roles = RoleRanks(attention_ranks, ffn_ranks, tp)
    way = check_items(items)
    drafts = drafts_of(mtp)
    asked = f"--attention-ranks {attention_ranks} --ffn-ranks {ffn_ranks}" + (f" --tp {tp}" if tp > 1 else "")
    with assembled(roles.size, "ffn", asked) as team:
        chosen = team.together("the backend", lambda: team.backend(backend))
        if chosen.evidence == "simulated" and team.speaks:
            note_simulated(chosen.name)
        from halma.models.deepseek_v4.load import resolve_model

        source = team.together("the model", lambda: divisible(resolve_model(model), tp))
        prompts = team.from_first(
            "the prompts", lambda: read_prompts(prompt, file, prompt_ids, lambda text: source.codec.encode(text))
        )
        if len(prompts) == 1:
            prompts = prompts * (batch * len(roles.groups))
        longest, share = max(map(len, prompts)), -(-len(prompts) // len(roles.groups))

        def sized() -> RunnerOptions:
            found = options_of(
                chosen, source, min(batch, share), context or longest + max_tokens, chunk, graph, arithmetic
            )
            return with_mtp(found, drafts, source.config, longest)

        options = team.together("the options", sized)
        requests = source.requests(
            prompts, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, ignore_eos=ignore_eos
        )
        geometry = team.together("the roles", lambda: _geometry(source, chosen, options, roles, depth))
        mine = requests[team.rank // tp :: len(roles.groups)]
        part = _Part(team, source, chosen, options, roles, geometry, mine, drafts, way)
        everybody = part.play()
    if not team.speaks:
        return
    result = _merged(everybody, roles, len(requests))
    if json:
        emit_json(result)
    else:
        _print(result, source, requests)


def _geometry(
    source: ModelSource, backend: Backend, options: RunnerOptions, roles: RoleRanks, depth: int
) -> RingGeometry:
    from halma.models.deepseek_v4.load import default_carrier
    from halma.models.deepseek_v4.roles import geometry_of

    return geometry_of(
        source.config,
        attention=len(roles.groups),
        ffn=roles.ffn,
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
    roles: RoleRanks
    geometry: RingGeometry
    requests: list[Request]
    drafts: int | str | None
    items: ItemsChoice

    def play(self) -> list[dict[str, Any]]:
        """Every rank's report, by rank."""
        with contextlib.ExitStack() as held:
            rings, shared = self._opened(held)
            serves = self.team.rank >= self.roles.attention
            mine = self._serve(rings) if serves and rings is not None else self._attend(rings, shared)
            mine["memory_bytes"]["rings"] = 0 if rings is None else rings.nbytes
            return self.team.ranks.exchange("the report", mine)

    def _opened(self, held: contextlib.ExitStack) -> tuple[Rings | None, Attending | None]:
        """This rank's rings, and its group of attention ranks where they share a model."""
        from halma.hal.collectives.common_terms import refuse_other_terms
        from halma.models.deepseek_v4.load import default_carrier
        from halma.models.deepseek_v4.role_groups import attending
        from halma.models.deepseek_v4.roles import opened

        team = self.team
        said = team.ranks.exchange("who is who", self.roles.terms())
        team.together(
            "the roles of all ranks",
            lambda: refuse_other_terms(
                "ranks were started for different roles", said, team.ranks.names, do="give every rank the same options"
            ),
        )
        group, rings_of = team.together("the groups", self._groups)
        rings = team.together(
            "the rings", lambda: None if rings_of is None else held.enter_context(opened(rings_of, self.geometry))
        )
        carrier, tokens = default_carrier(self.backend, self.options.arithmetic), self.options.most_rows

        def share() -> Attending | None:
            if group is None:
                return None
            made = attending(self.source.config, group, rings, tokens=tokens, carrier=carrier)
            return held.enter_context(made)

        return rings, team.together("the shared memory", share)

    def _groups(self) -> tuple[Group | None, Group | None]:
        """The ranks that this one shares a model with, and those that it has rings with."""
        import torch.distributed as distributed

        import halma

        if self.roles.tp == 1:
            return None, halma.collectives(world=distributed.group.WORLD, backend=self.backend)
        # Every process makes every group, in one order.
        made = [(ranks, world_of(self.backend, ranks)) for ranks in self.roles.groups]
        made.append((self.roles.rings, distributed.new_group(self.roles.rings, backend="gloo")))
        *shared, rings = [
            halma.collectives(world=world, backend=self.backend) if self.team.rank in ranks else None
            for ranks, world in made
        ]
        return next((one for one in shared if one is not None), None), rings

    def _attend(self, rings: Rings | None, shared: Attending | None) -> dict[str, Any]:
        from halma.models.deepseek_v4.engine import Engine
        from halma.models.deepseek_v4.experts import FarExperts
        from halma.models.deepseek_v4.load import load_v4
        from halma.models.deepseek_v4.ranks import ONE_RANK

        if shared is not None:
            ranks, experts, finish = shared.ranks, shared.experts, shared.finish
        else:
            assert rings is not None, "a rank without a group has rings"
            ranks, experts, finish = ONE_RANK, FarExperts(rings), rings.finish
        loaded = self.team.together(
            "loading", lambda: load_v4(self.source, self.backend, self.options, ranks=ranks, experts=experts)
        )
        # From here on nobody waits for an attention rank but its group, and it waits for that and FFN ranks alone.
        engine = Engine(loaded.runner, drafts=self.drafts)
        generations = [engine.submit(request) for request in self.requests]
        if not generations:
            finish()
            return {"role": "attention", "generations": [], "memory_bytes": {"weights": loaded.weight_bytes}}
        variants = sorted({"sample" if request.temperature > 0 else "greedy" for request in self.requests})
        loaded.runner.prepare(loaded.runner.descriptors(variants))
        engine.start()
        result = result_of(loaded, engine, generations, run_engine(engine))
        ranks.require_same("their tokens", [(one.tokens, one.finish) for one in generations])
        result["role"] = "attention"
        if self.drafts is not None:
            result["mtp"] = engine.drafting()
        finish()
        loaded.runner.close()
        return result

    def _serve(self, rings: Rings) -> dict[str, Any]:
        from halma.models.deepseek_v4.roles import ServingOptions, expert_server

        first, last = rings.geometry.experts[rings.number : rings.number + 2]
        given = self.options
        graph = given.graph and "ffn" not in given.eager_roles
        options = ServingOptions(graph, given.strict, given.checked, given.environment_routes, items=self.items)

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


def _merged(everybody: list[dict[str, Any]], roles: RoleRanks, count: int) -> dict[str, Any]:
    """One report: requests went to the groups of attention ranks by turns."""
    attention, ffn = everybody[: roles.attention], everybody[roles.attention :]
    groups = attention[:: roles.tp]
    return {
        **everybody[0],
        "schema": "halma.ffn/1",
        "tp": roles.tp,
        "generations": by_turns([one["generations"] for one in groups], count),
        "tokens_per_second": sum(one.get("tokens_per_second", 0.0) for one in groups),
        "attention_ranks": [
            {"requests": len(one["generations"]), "memory_bytes": one["memory_bytes"]} for one in attention
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
