"""Builds a native engine from the chosen parts: load, transform, quantize, size the KV, check, warm up, capture."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from infermix.engine.adapters.mla import LatentAttention
from infermix.engine.capture import DecoderCapture, capture, why_not_captured
from infermix.engine.components import NativeOptions
from infermix.engine.inner_decoder import inner_decoder
from infermix.engine.isolated import Prepared, prepare
from infermix.engine.joints import make_joint, stays_latent
from infermix.engine.lanes import Lanes
from infermix.engine.loader import LoadedModel, load_model, load_tokenizer
from infermix.engine.native import NativeEngine
from infermix.engine.offload import make_swapper, swaps, with_swap_space
from infermix.engine.part_facts import count_values, qualified_name, table_facts
from infermix.engine.quantize import quantize
from infermix.engine.replicas import Replicas
from infermix.engine.runner import ModelRunner
from infermix.engine.second import second_models
from infermix.engine.self_check import Reference, collect_reference, self_check
from infermix.engine.step_log import StepLog
from infermix.engine.transforms import Transforms
from infermix.engine.warm import warm_up
from infermix.engine.weights import weight_bytes
from infermix.errors import OutOfMemory, Unsupported, UserError
from infermix.paths import cache_dir
from infermix.roles.attention import TuneContext
from infermix.roles.component import Choice, Role, meets
from infermix.roles.decoder import DecoderContext, DecoderOptions
from infermix.roles.engine import EngineContext, EngineReport
from infermix.roles.kv_space import KVBudget, KVShape
from infermix.roles.transform import TransformContext
from infermix.toolkit.isolated import IsolatedQuantizer
from infermix.toolkit.routing import make_router
from infermix.toolkit.sampling import TokenSampler, TorchSelector

if TYPE_CHECKING:
    from infermix.engine.bridge import Joint
    from infermix.roles.kv_space import KVLayout, KVSpace

#: Left free on a GPU beside weights and KV, for activations of a prefill and the workspace of its products.
_ACTIVATION_RESERVE_BYTES = 2 << 30


class Assembly:
    """State of one assembly; each method is one timed phase."""

    def __init__(self, options: NativeOptions, context: EngineContext) -> None:
        self.options, self.context = options, context
        self.device = torch.device(context.machine.device)
        self.dtype = getattr(torch, context.dtype)
        self.report = EngineReport()
        self.max_num_seqs = options.max_num_seqs or context.max_num_seqs
        self.transforms = Transforms(context.transforms, self._transform_context())
        self.reference: Reference | None = None
        self.prepared: Prepared | None = None
        #: Of every replica's KV, sized before the first one has taken its memory.
        self.shape: KVShape | None = None

    def _transform_context(self) -> TransformContext:
        context = self.context
        return TransformContext(
            device=str(self.device), dtype=context.dtype, seed=context.seed, facts=context.facts,
            max_num_seqs=self.max_num_seqs, max_model_len=context.max_model_len, tune=self.tunes,
            progress=context.progress,
        )  # fmt: skip

    @property
    def rows_per_sequence(self) -> int:
        options = self.context.parts[Role.DECODER].options
        return options.rows_per_sequence() if isinstance(options, DecoderOptions) else 1

    @property
    def tunes(self) -> bool:
        return self.options.tune == "auto" and self.device.type == "cuda"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.context.progress(name, 0.0)
        start = self.context.clock_ns()
        yield
        self.report.setup_s[name] = (self.context.clock_ns() - start) / 1e9

    def part(self, role: Role, build_context: Any = None) -> Any:
        choice = self.context.parts[role]
        return choice.component.build(choice.options, build_context)

    def lossless(self, role: Role) -> bool:
        choice = self.context.parts[role]
        return choice.component.lossless(choice.options)

    def provides(self, role: Role) -> frozenset[str]:
        choice = self.context.parts[role]
        return choice.component.provides(choice.options, self.context.facts, self.context.machine)

    def kv_error(self) -> float | None:
        """What the KV layout loses, where that is all that the parts of attention lose."""
        choice = self.context.parts[Role.KV]
        return choice.component.kv_error(choice.options) if self.lossless(Role.ATTENTION) else None

    def executed(self, role: Role, part: Any, **facts: Any) -> None:
        choice: Choice = self.context.parts[role]
        via = {"via": dict(choice.via)} if choice.via else {}
        self.report.executed[role.value] = {"class": qualified_name(part), **facts, **via}


def assemble(options: NativeOptions, context: EngineContext) -> NativeEngine | Replicas:
    """A ready engine. Raises `UserError` for bad input, `Unsupported` when the model or a part must not run."""
    build = Assembly(options, context)
    _refuse_unmet(build)
    with build.phase("load"):
        loaded, tokenizer = _load(build)
    attention, layout = build.part(Role.ATTENTION), build.part(Role.KV)
    joint = _change_model(build, loaded, tokenizer, layout)
    serving = [_serve(build, loaded, tokenizer, attention, layout, joint) for _ in range(options.replicas)]
    if len(serving) == 1:
        return serving[0][0]
    build.report.executed["engine"] |= {"replicas": options.replicas, "router": options.router}
    build.report.kv_bytes = options.replicas * (build.report.kv_bytes or 0)
    engines, attach = zip(*serving, strict=True)
    return Replicas(engines, attach, make_router(options.router, options.replicas), build.report)


def _serve(
    build: Assembly, loaded: LoadedModel, tokenizer: Any, attention: Any, layout: KVLayout, joint: Joint
) -> tuple[NativeEngine, Callable[[], None]]:
    """An engine around the loaded model, and what makes the model use its KV again after another one's."""
    options, context = build.options, build.context
    with build.phase("decoder"):
        decoder = build.part(Role.DECODER, _decoder_context(build, loaded, tokenizer))
    with build.phase("allocate"):
        shape = build.shape = build.shape or _size_kv(build, layout, joint)
        _refuse_misfits(build, decoder, shape)
        space, store = layout.space(shape), layout.store(shape, build.device, build.dtype)
        swapper = make_swapper(context, store, shape, build.report)
    if build.tunes and hasattr(attention, "tune"):
        with build.phase("tune"):
            tuned = dict(attention.tune(_tune_context(build, joint, shape, space)))
            build.report.executed.setdefault("engine", {})["tuned_attention"] = tuned
    if options.self_check and not build.report.self_check:
        with build.phase("self_check"), torch.inference_mode():
            build.report.self_check = self_check(
                loaded.model,
                joint,
                attention,
                layout,
                device=build.device,
                dtype=build.dtype,
                reference=build.reference,
                exact=build.lossless(Role.ATTENTION) and build.lossless(Role.KV),
                kv_error=build.kv_error(),
            )
    attach = functools.partial(joint.attach, attention, store, keep_hidden=getattr(decoder, "reads_hidden", False))
    attach()
    selector = build.transforms.selector or TorchSelector()
    sampler = TokenSampler(build.max_num_seqs, context.facts.vocab_size, build.device, loaded.eos_token_ids, selector)
    runner = ModelRunner(joint, space, store, shape, sampler.next_ids, context.facts.vocab_size)
    if build.transforms or build.device.type == "cuda":
        with build.phase("warm"), torch.inference_mode():
            warm_up(joint, space, shape)
    with build.phase("capture"):
        build.report.graphs = capture(
            build, runner, joint, shape, space, sampler.next_ids, selector, *_captured_shapes(decoder)
        )
    scheduler = build.part(Role.SCHEDULER, max(1, build.max_num_seqs // build.rows_per_sequence))
    _report_parts(build, attention, layout, space, store, scheduler, decoder, shape)
    engine = NativeEngine(
        context=context, report=build.report, tokenizer=tokenizer, eos_token_ids=loaded.eos_token_ids, joint=joint,
        runner=runner, sampler=sampler, space=_seen_space(decoder, space, shape), store=store, shape=shape,
        scheduler=scheduler, decoder=decoder, lanes=Lanes(build.max_num_seqs), lag=_lag(build, decoder),
        swapper=swapper, log=StepLog(context.clock_ns) if options.step_log else None,
    )  # fmt: skip
    return engine, attach


def _decoder_context(build: Assembly, loaded: LoadedModel, tokenizer: Any) -> DecoderContext:
    context = build.context
    made = DecoderContext(
        facts=context.facts, device=str(build.device), dtype=context.dtype, max_num_seqs=build.max_num_seqs,
        max_model_len=context.max_model_len, seed=context.seed, model=loaded.model, tokenizer=tokenizer,
        eos_token_ids=loaded.eos_token_ids, weight_bytes=build.report.weight_bytes, base=context.base,
        progress=context.progress, clock_ns=context.clock_ns, capture=DecoderCapture(build),
        second=second_models(build, capture=why_not_captured(build, recompute=False) is None),
    )  # fmt: skip
    return replace(made, inner=functools.partial(inner_decoder, build, made))


def _seen_space(decoder: Any, space: KVSpace, shape: KVShape) -> KVSpace:
    """The space of scheduler and engine: a decoder may keep several rows behind one sequence."""
    seen: KVSpace = decoder.wrap_space(space, shape) if hasattr(decoder, "wrap_space") else space
    return seen


def _tune_context(build: Assembly, joint: Joint, shape: KVShape, space: KVSpace) -> TuneContext:
    return TuneContext(
        layers=tuple(joint.layers.values()),
        block_size=0 if space.fixed_rows else shape.block_size,
        device=str(build.device),
        dtype=build.context.dtype,
        max_num_seqs=build.max_num_seqs,
        max_model_len=build.context.max_model_len,
        folder=cache_dir("kernels"),
        progress=build.context.progress,
    )


def _lag(build: Assembly, decoder: Any) -> int:
    """Steps that the host stays behind; none where the decoder needs the tokens before it launches."""
    if getattr(decoder, "reads_tokens", False):
        return 0
    overlap = build.options.overlap
    return int(overlap == "on" or (overlap == "auto" and build.device.type == "cuda"))


def _query_lens(decoder: Any) -> tuple[int, ...]:
    """Query lengths that the decoder launches uniformly; one token per sequence unless it says otherwise."""
    return tuple(getattr(decoder, "query_lens", (1,)))


def _captured_shapes(decoder: Any) -> tuple[tuple[int, ...], bool]:
    """Uniform query lengths, and whether longer ones than one may be trees."""
    return _query_lens(decoder), getattr(decoder, "draft_trees", False)


def _refuse_unmet(build: Assembly) -> None:
    """What the model asks of layout and decoder, for whoever comes here without a plan."""
    for role, prefix in ((Role.KV, "kv:"), (Role.DECODER, "decoder:")):
        for need in sorted(name for name in build.context.facts.features if name.startswith(prefix)):
            if not meets(need, build.provides(role)):
                name = build.context.parts[role].component.name
                raise Unsupported(f"the model needs {need}, which {role.value} {name!r} does not provide")


def _refuse_misfits(build: Assembly, decoder: Any, shape: KVShape) -> None:
    """Drafts must fit into what a ring takes at once and what can be cut off again; trees need help of two parts.

    `plan` says the latter of a decoder that it knows; here it holds for one inside another as well.
    """
    query_lens, trees = _captured_shapes(decoder)
    for role, feature in ((Role.KV, "kv:move"), (Role.ATTENTION, "attn:tree_mask")):
        if trees and feature not in build.provides(role):
            name = build.context.parts[role].component.name
            raise Unsupported(f"{role.value} {name!r} does not provide {feature}, which drafts in a tree need")
    longest = max(query_lens)
    if shape.max_query_len is not None and longest > shape.max_query_len:
        raise UserError(
            f"the decoder verifies rows of {longest} tokens, the KV layout takes {shape.max_query_len}",
            key="parts.kv.max_chunk_tokens",
            hint=f"at least {longest}, or fewer draft tokens",
        )
    if shape.max_truncate is not None and longest - 1 > shape.max_truncate:
        raise UserError(
            f"the decoder drafts {longest - 1} tokens, of which the KV layout can take back {shape.max_truncate}",
            key="parts.kv",
            hint="fewer draft tokens, or a layout that keeps more",
        )


def _change_model(build: Assembly, loaded: LoadedModel, tokenizer: Any, layout: KVLayout) -> Joint:
    """Transforms and quantizer in their order; returns the joint over what they leave.

    The reference of the self-check is collected before anything that must not change the logits: before everything
    when the quantizer is lossless, otherwise between the quantizer and what follows it.
    """
    model, lossless = loaded.model, build.lossless(Role.QUANTIZER)
    if lossless:
        _collect_reference(build, model, layout, "the model as loaded")
    if stays_latent(build.context.facts, layout):
        LatentAttention(model).keep()
    build.transforms.apply("before_quantizer", model, build.phase)
    with build.phase("quantize"):
        _quantize(build, loaded, tokenizer)
    if not lossless:
        _collect_reference(build, model, layout, "the quantized model")
    build.report.weight_bytes = 0
    if build.options.linears == "packed":
        with build.phase("pack_linears"):
            _pack_linears(build, loaded)
    build.transforms.apply("after_quantizer", model, build.phase)
    if build.transforms:
        build.report.executed["transforms"] = build.transforms.executed
    build.report.weight_bytes += weight_bytes(model)
    with build.phase("joint"), torch.inference_mode():
        return make_joint(model, build.context.facts, layout)


def _collect_reference(build: Assembly, model: torch.nn.Module, layout: KVLayout, of: str) -> None:
    if not build.options.self_check:
        return
    with build.phase("reference"):
        joint = make_joint(model, build.context.facts, layout)
        joint.detach()
        build.reference = collect_reference(
            model, joint, seed=build.context.seed, of=of, rounded=not build.lossless(Role.QUANTIZER)
        )


def _load(build: Assembly) -> tuple[LoadedModel, Any]:
    context = build.context
    quantizer = build.part(Role.QUANTIZER)
    if isinstance(quantizer, IsolatedQuantizer):
        build.prepared = prepare(quantizer, context.parts[Role.QUANTIZER].options, context)
    prepared = build.prepared
    loaded = load_model(
        prepared.source if prepared else context.source,
        context.facts,
        dtype=context.dtype,
        device=str(build.device),
        load_arguments=quantizer.load_arguments(),
        seed=context.seed,
        progress=context.progress,
        packed=getattr(prepared.reader if prepared else quantizer, "reads_packed", False),
    )
    return loaded, load_tokenizer(context.source)


def _quantize(build: Assembly, loaded: LoadedModel, tokenizer: Any) -> None:
    quantizer, options = build.part(Role.QUANTIZER), build.context.parts[Role.QUANTIZER].options
    if build.prepared is not None:
        report = build.prepared.read(loaded, build.context, tune=build.tunes)
    else:
        report = quantize(loaded, quantizer, options, build.context, tokenizer, tune=build.tunes)
    build.executed(
        Role.QUANTIZER,
        quantizer,
        method=report.method,
        bits_per_weight=report.bits_per_weight,
        quantized_bytes=report.quantized_bytes,
        kernels=count_values(report.kernels),
        skipped=len(report.skipped),
        **report.details,
    )


def _pack_linears(build: Assembly, loaded: LoadedModel) -> None:
    from infermix.engine.packed_linears import pack_linears

    packed = pack_linears(loaded.model)
    build.report.executed["engine"] = {"packed_linears": packed}
    build.report.weight_bytes = packed["packed_bytes"]


def _size_kv(build: Assembly, layout: KVLayout, joint: Joint) -> KVShape:
    context = build.context
    budget = KVBudget(
        max_num_seqs=build.max_num_seqs,
        max_model_len=context.max_model_len,
        element_bytes=build.dtype.itemsize,
        max_bytes=None if (most := _kv_bytes(build)) is None else most // build.options.replicas,
        states=joint.states,
    )
    shape = layout.shape(joint.groups, budget)
    return with_swap_space(shape, build.context, build.options.replicas) if swaps(build.context) else shape


def _kv_bytes(build: Assembly) -> int | None:
    """What the KV may take: stated by the user, or what the device has left under the stated fraction."""
    if build.context.kv_memory_bytes is not None or build.device.type != "cuda":
        return build.context.kv_memory_bytes
    free, total = torch.cuda.mem_get_info(build.device)
    allowed = int(build.context.kv_memory_fraction * total) - (total - free) - _ACTIVATION_RESERVE_BYTES
    if allowed <= 0:
        raise OutOfMemory(
            f"after the weights {free / 1e9:.1f} GB of {total / 1e9:.1f} GB are free: no room for any KV "
            f"(kv_memory_fraction {build.context.kv_memory_fraction})"
        )
    return allowed


def _report_parts(
    build: Assembly, attention: Any, layout: Any, space: Any, store: Any, scheduler: Any, decoder: Any, shape: KVShape
) -> None:
    build.executed(Role.ATTENTION, attention)
    build.executed(
        Role.KV,
        layout,
        space=qualified_name(space),
        store=qualified_name(store),
        block_size=shape.block_size,
        num_blocks=shape.num_blocks,
        **table_facts(shape),
    )
    build.executed(Role.SCHEDULER, scheduler)
    build.executed(Role.DECODER, decoder, **getattr(decoder, "details", {}))
    build.report.executed.setdefault("engine", {}).update(
        transformers=importlib.metadata.version("transformers"), max_num_seqs=build.max_num_seqs,
        max_model_len=build.context.max_model_len,
    )  # fmt: skip
    build.report.kv_bytes = store.allocated_bytes()
    build.report.kv_bytes_per_token = shape.bytes_per_token
    build.report.kv_allocated_bytes_per_token = shape.bytes_of_sequence(shape.max_model_len) / shape.max_model_len
