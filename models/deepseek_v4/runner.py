"""Runs steps of one model on one backend: plans memory, seals it, captures the ladder, replays.

The runner knows shapes and graphs; it does not know requests. :mod:`halma.models.deepseek_v4.engine` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from halma.hal.backend import Backend
from halma.hal.decisions import decisions
from halma.hal.dispatch import Ops
from halma.hal.errors import ModelError, RequestError
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.eager import eager_step
from halma.hal.graph.ladder import decode_ladder, doubling, fit, largest_of
from halma.hal.graph.session import CaptureSession
from halma.hal.policy import headroom_for
from halma.hal.registry import default_registry
from halma.hal.settings import GraphSwitch
from halma.hal.workspace import Workspace
from halma.models.deepseek_v4.boundary import mixer_of
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.drafter import require_mtp
from halma.models.deepseek_v4.experts import OWN_EXPERTS, Experts
from halma.models.deepseek_v4.headroom import need_headroom
from halma.models.deepseek_v4.identity import program_facts
from halma.models.deepseek_v4.inputs import V4Inputs
from halma.models.deepseek_v4.program import Tap, V4Model
from halma.models.deepseek_v4.ranks import ONE_RANK, Ranks
from halma.models.deepseek_v4.rope import rope_frequencies
from halma.models.deepseek_v4.state import LOG_STEPS, TOKEN_RING, RowFormats, StatePlan, build_state
from halma.models.deepseek_v4.steps import STEPS
from halma.models.deepseek_v4.weights import V4Weights
from halma.ops import families as _families  # noqa: F401  (defines every op that a step calls)

MAX_DRAFTS = 8


@dataclass(frozen=True)
class RunnerOptions:
    """Sizes and switches of a runner.

    Args:
        max_requests: requests that may be alive at once.
        max_context: tokens of the longest request, prompt and answer.
        chunk: most prompt tokens in one step.
        mtp: most tokens that the MTP module drafts at a time, up to 8; 0 leaves it out. Steps then verify instead of
            decoding.
        mtp_lengths: numbers of drafts that steps are made for, 0 to ``mtp``, ``mtp`` among them; by default it alone.
        batches: numbers of requests that decode is captured for; the maximum is always among them.
        graph: capture and replay; off means that every step runs eagerly.
        eager_roles: roles that run eagerly though ``graph`` is on.
        capture_prefill: capture prefill chunks too. Worth it where prompts keep coming; a graph that is
            replayed once costs more than it saves.
        strict: a step that would run eagerly though ``graph`` is on is an error; prefill is captured then.
        checked: poison the workspace's memory as it is freed.
        arithmetic: ``exact`` or ``shipping``, as the weights were loaded.
        index_format: ``index_fp4`` or ``index_fp8`` keys in shipping arithmetic.
        budget: most bytes that workspace and graphs may take; None: no limit.
        reserve: bytes of free device memory that captures must leave.
        pages: pages of the compressed stores; all requests at full length by default.
        routes: op name to route name, explicit choices.
    """

    max_requests: int = 1
    max_context: int = 1024
    chunk: int = 64
    mtp: int = 0
    mtp_lengths: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1,)
    graph: bool = True
    eager_roles: frozenset[str] = frozenset()
    capture_prefill: bool = False
    strict: bool = False
    checked: bool = False
    arithmetic: str = "exact"
    index_format: str = "index_fp4"
    budget: int | None = None
    reserve: int = 0
    pages: int | None = None
    routes: Mapping[str, str] | None = None
    environment_routes: Mapping[str, str] | None = None

    @property
    def switch(self) -> GraphSwitch:
        """What may be captured."""
        return GraphSwitch(self.graph, self.eager_roles)

    @property
    def captures_prefill(self) -> bool:
        """Whether prefill is captured where anything is."""
        return self.capture_prefill or self.strict

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Numbers of drafts that steps are made for, ascending; none without MTP.

        Raises:
            RequestError: out of range, or without the largest.
        """
        lengths = tuple(sorted(set(self.mtp_lengths or ((self.mtp,) if self.mtp else ()))))
        wrong = [length for length in lengths if not 0 <= length <= self.mtp]
        if not 0 <= self.mtp <= MAX_DRAFTS or wrong or (lengths and lengths[-1] != self.mtp):
            raise RequestError(
                "these numbers of drafts are out of range",
                asked=f"mtp={self.mtp}, mtp_lengths={self.mtp_lengths}",
                do=f"mtp = 0 to {MAX_DRAFTS}; lengths from 0 to mtp, mtp itself among them",
            )
        return lengths if self.mtp else ()

    @property
    def most_rows(self) -> int:
        """Rows of the largest step: a prompt's chunk, or every request with all its drafts."""
        return max(self.chunk, self.max_requests * (self.mtp + 1))


class V4Runner:
    """A model on a backend, ready to step.

    Args:
        config, weights: the model; the weights live on the backend's device in ``carrier`` or a packed format.
        backend: where it runs.
        options: see :class:`RunnerOptions`.
        carrier: dtype of activations.
        ranks: those that share the model; every one of them makes the same steps in the same order.
        experts: who does the feed-forward sublayers; by default this rank, with the weights' own experts.
        tap: watches intermediate values of eager steps (golden cases); forbids graphs.
    """

    def __init__(
        self,
        config: V4Config,
        weights: V4Weights,
        backend: Backend,
        options: RunnerOptions,
        *,
        carrier: torch.dtype = torch.float32,
        ranks: Ranks = ONE_RANK,
        experts: Experts = OWN_EXPERTS,
        tap: Tap | None = None,
    ) -> None:
        if options.max_context > config.max_position_embeddings:
            raise RequestError(
                "the context asked for is longer than the model allows",
                asked=f"{options.max_context} tokens of context",
                found=f"max_position_embeddings is {config.max_position_embeddings}",
                do=f"ask for at most {config.max_position_embeddings} tokens, prompt and answer together",
            )
        if tap is not None and options.graph:
            raise RequestError("a tap watches eager steps only", do="pass graph=False")
        drafts = options.draft_lengths
        if options.mtp:
            _check_module(config, weights)
        if experts.even and len(drafts) > 1:
            raise RequestError(
                "ranks that exchange rows need one number of drafts",
                asked=f"steps of {', '.join(map(str, drafts))} drafts",
                found="each token that a step drafts is an exchange, and all ranks' steps have equally many",
                do=f"one number of drafts: mtp={options.mtp} without other mtp_lengths",
            )
        self.config = config
        self.backend = backend
        self.facts = program_facts(config, backend, options, carrier, ranks, experts)
        self.headroom = headroom_for(backend, self.facts, options.most_rows)
        """What captures leave free beside the reserve, and the device holds beside weights and state."""
        self.reserve = options.reserve + sum(one.nbytes for one in self.headroom)
        self.options = options
        device = backend.device.torch_device
        self.plan = StatePlan.of(
            config,
            slots=options.max_requests,
            max_context=options.max_context,
            max_query_len=options.chunk,
            pages=options.pages,
            drafts=options.mtp,
        )
        self.ring = backend.memory.pinned((options.max_requests + 1, TOKEN_RING), torch.int64)
        """Emitted tokens by position, where the host reads them; the state's ring is the device's view of it."""
        self.log = backend.memory.pinned((LOG_STEPS, options.max_requests), torch.int64)
        """How many tokens each row of a step emitted, by ``step % LOG_STEPS``; the device's view is the state's log."""
        self.steps = 0
        """Steps made: the number that the next one has on the device too."""
        self.ring.zero_()
        self.log.zero_()
        formats = RowFormats.of(options.arithmetic, options.index_format)
        ring, log = backend.memory.on_device(self.ring), backend.memory.on_device(self.log)
        state = build_state(config, self.plan, formats, dtype=carrier, device=device, ring=ring, log=log)
        need_headroom(backend, self.headroom, "weights and state are there, workspace and graphs are to come")
        self.workspace = Workspace(device, checked=options.checked)
        default_registry().load_routes()
        frequencies = rope_frequencies(config, dtype=carrier, device=device)
        side = backend.device.new_stream("side")
        ops = self.ops_on(self.workspace)
        self.model = V4Model(
            config, weights, state, ops, self.workspace, side, frequencies, carrier, ranks, tap, options.arithmetic,
            experts,
        )  # fmt: skip
        self.inputs = V4Inputs(backend, options.max_requests, options.max_requests * self.plan.max_query_len)
        self.session = CaptureSession(
            backend,
            self.workspace,
            "persistent",
            switch=options.switch,
            strict=options.strict,
            budget=options.budget,
            reserve=self.reserve,
            agreement=ranks.agreement,
            arenas=ranks.arenas,
            inputs=self.inputs.read_by,
        )
        self.capacities = doubling(self.plan.page_tokens, self.plan.pages_per_slot * self.plan.page_tokens)
        self.chunks = doubling(min(8, options.chunk), options.chunk)
        self._decode = decode_ladder(
            options.max_requests,
            sizes=sorted({b for b in options.batches if b < options.max_requests}),
            query_lens=tuple(length + 1 for length in drafts) or (1,),
            context_capacities=self.capacities,
            role="verify" if drafts else "decode",
        )
        self._prefill = decode_ladder(
            1, query_lens=self.chunks, context_capacities=self.capacities, role="prefill", limit=options.max_requests
        )

    def ops_on(self, workspace: Workspace) -> Ops:
        """The operators of a program that takes its memory from ``workspace``."""
        return Ops(
            workspace,
            backend=self.backend.name,
            routes=self.options.routes,
            environment=self.options.environment_routes,
            facts=self.facts,
        )

    # -- shapes -------------------------------------------------------------------------------------

    def decode_descriptor(self, requests: int, context: int, variant: str) -> Descriptor:
        """The smallest decode descriptor that holds ``requests`` and, after the step, ``context`` tokens.

        Raises:
            RequestError: there is none; with MTP every step verifies, or the module would miss tokens.
        """
        return _held(
            fit(self._decode, role="decode", num_requests=requests, context=context), requests, 1, context, variant
        )

    def verify_descriptor(self, requests: int, drafts: int, context: int, variant: str) -> Descriptor:
        """The smallest descriptor that verifies ``drafts`` tokens of each of ``requests``, and drafts as many.

        Args:
            context: tokens that the longest request may have behind the step.

        Raises:
            RequestError: there is none; steps are made for ``draft_lengths`` of the options alone.
        """
        made = [one for one in self._decode if one.query_len == drafts + 1]
        found = fit(made, role="verify", num_requests=requests, query_len=drafts + 1, context=context)
        return _held(found, requests, drafts + 1, context, variant)

    def prefill_descriptor(self, tokens: int, context: int, variant: str) -> Descriptor:
        """The smallest one-request prefill descriptor for ``tokens`` new tokens and ``context`` after them."""
        found = fit(self._prefill, role="prefill", num_requests=1, query_len=tokens, context=context)
        return _held(found, 1, tokens, context, variant)

    def descriptors(self, variants: Iterable[str] = ("greedy",)) -> list[Descriptor]:
        """The whole ladder: decode or verify, and prefill, every capacity, largest first."""
        made = [replace(one, variant=variant) for one in (*self._decode, *self._prefill) for variant in variants]
        return sorted(made, key=lambda d: (d.num_tokens, d.context_capacity, d.role, d.variant), reverse=True)

    # -- life ---------------------------------------------------------------------------------------

    def prepare(
        self,
        descriptors: Iterable[Descriptor] | None = None,
        progress: Callable[[Descriptor], None] | None = None,
        order: str = "descending",
    ) -> None:
        """Plan the descriptors, seal the workspace, capture. Every later step must fit what was planned.

        Raises:
            ModelError: they leave less than the backend wants free for this program.
        """
        for one in self.headroom:
            decisions.record(one.decision())
        self.capture_into(
            self.session, list(self.descriptors() if descriptors is None else descriptors), progress, order
        )
        need_headroom(self.backend, self.headroom, "weights, state, workspace and graphs are there")

    def capture_into(
        self,
        session: CaptureSession,
        wanted: Sequence[Descriptor],
        progress: Callable[[Descriptor], None] | None = None,
        order: str = "descending",
    ) -> None:
        """Capture ``wanted`` in a session of this runner's backend; the steps take memory from its workspace."""
        own = session.workspace is self.workspace
        ops = self.model.ops if own else self.ops_on(session.workspace)
        model = replace(self.model, workspace=session.workspace, ops=ops, tap=None)
        prefill = self.options.captures_prefill
        with torch.no_grad():
            session.capture_all(
                [one for one in wanted if one.role != "prefill" or prefill],
                lambda descriptor: self._program(descriptor, model),
                order,
                progress,
                plan=self._representatives(wanted),
                limit=self.options.max_requests,
            )
            # What warm-ups left: tokens of the null slot, and steps that the host does not count.
            self.model.state.lengths[0].zero_()
            self.model.state.step.fill_(self.steps)

    def _representatives(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        """The largest of every kind of step: programs of one kind take memory in the same places.

        One request or one token is a kind of its own, since ops may do without the scratch that several rows need; so
        are steps whose boundaries between sublayers are one call, of the target's rows and of the drafts'.
        """
        kinds: dict[tuple[object, ...], list[Descriptor]] = {}
        for d in descriptors:
            indexed = any(
                k.indexed and d.context_capacity // k.ratio > self.config.index_topk for k in self.config.layers
            )
            whole = tuple(mixer_of(self.model, rows) is not None for rows in (d.num_tokens, d.num_requests))
            kinds.setdefault((d.role, d.variant, indexed, d.num_requests == 1, d.query_len == 1, whole), []).append(d)
        return [largest_of(group) for group in kinds.values()]

    def _program(self, descriptor: Descriptor, model: V4Model) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        inputs = self.inputs.views(descriptor)
        step = STEPS[descriptor.role]

        def program() -> tuple[torch.Tensor, torch.Tensor]:
            return step(model, inputs, descriptor)

        return program

    def step(self, descriptor: Descriptor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step: a replay if this very descriptor was captured, else eagerly with a recorded reason.

        Returns (next tokens [R], logits [R, V], of several ranks each its own part [R, V/N]), of a step that verifies
        (choices [R, T], emitted [R]); both are overwritten by the next step.

        Raises:
            StaleInputError: the inputs that it reads were neither filled nor kept since the last step (G12).
        """
        with torch.no_grad():
            try:
                found = self._run(descriptor)
            except BaseException:
                self.model.state.step.fill_(self.steps)  # it may have got as far as its commit
                raise
        self.steps += 1
        return found

    def _run(self, descriptor: Descriptor) -> tuple[torch.Tensor, torch.Tensor]:
        self.model.experts.begin_step()
        graph = self.session.find(descriptor)
        if graph is not None:
            return graph.replay()
        with self.model.ranks.step(descriptor):
            return eager_step(
                self._program(descriptor, self.model),
                self.workspace,
                self.backend,
                step=descriptor,
                inputs=self.inputs.read_by(descriptor),
            )

    def close(self) -> None:
        """Destroy the graphs."""
        self.session.close()


def _check_module(config: V4Config, weights: V4Weights) -> None:
    require_mtp(config)
    if len(weights.mtp) != 1:
        raise ModelError(
            "MTP needs the weights of one module",
            asked="speculative decoding with MTP",
            found=f"{len(weights.mtp)} modules are loaded, the configuration has {config.num_mtp}",
            do="load the weights with the drafter; a model with several modules runs without MTP",
        )


def _held(found: Descriptor | None, requests: int, tokens: int, context: int, variant: str) -> Descriptor:
    if found is None:
        raise RequestError(
            "no shape of this runner holds the step",
            asked=f"{requests} requests of {tokens} tokens, {context} tokens of context",
            do="raise max_requests, chunk or max_context of its options",
        )
    return replace(found, variant=variant)
