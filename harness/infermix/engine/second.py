"""Another model beside the target (a draft): KV, runner and sampler of its own around the same kinds of parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infermix.cost.kv import kv_bytes_per_token
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.engine.graphs import StepGraphs
from infermix.engine.joints import make_joint
from infermix.engine.loader import load_model, load_tokenizer
from infermix.engine.runner import ModelRunner
from infermix.engine.self_check import collect_reference, self_check
from infermix.engine.weights import weight_bytes
from infermix.errors import Unsupported, UserError
from infermix.roles.component import Role
from infermix.roles.kv_space import KVBudget
from infermix.roles.quantizer import QuantizerContext
from infermix.spec.experiment import ModelSource
from infermix.toolkit.sampling import TokenSampler

if TYPE_CHECKING:
    from infermix.engine.assembly import Assembly
    from infermix.roles.engine import Tokenizer
    from infermix.roles.facts import ModelFacts, ResolvedSource

#: Share of the KV memory that a second model may take, at most.
_MOST_OF_KV = 0.25


class SecondModel:
    """A model whose sequences sit in the target's lanes. Query lengths 1 and 2 are captured where graphs are on."""

    def __init__(
        self,
        build: Assembly,
        model: Any,
        facts: ModelFacts,
        capture: bool,
        tokenizer: Tokenizer | None = None,
        *,
        rounded: bool,
    ) -> None:
        """`rounded`: a quantizer that loses something has been at the model, perhaps at its activations, too."""
        self.facts, self.tokenizer = facts, tokenizer
        # As it is now: a quantizer may have made it smaller than its checkpoint.
        self.weight_bytes = weight_bytes(model)
        attention, layout = build.part(Role.ATTENTION), build.part(Role.KV)
        with torch.inference_mode():
            joint = make_joint(model, facts, layout)
            joint.detach()
            reference = collect_reference(
                model, joint, seed=build.context.seed, of="the second model as loaded", rounded=rounded
            )
        shape = layout.shape(joint.groups, replace(self._budget(build, facts), states=joint.states))
        self.space, store = layout.space(shape), layout.store(shape, build.device, build.dtype)
        with torch.inference_mode():
            self.self_check = self_check(
                model, joint, attention, layout, device=build.device, dtype=build.dtype, reference=reference,
                exact=build.lossless(Role.ATTENTION) and build.lossless(Role.KV), kv_error=build.kv_error(),
            )  # fmt: skip
        joint.attach(attention, store)
        self.sampler = TokenSampler(build.max_num_seqs, facts.vocab_size, build.device, ())
        self.runner = ModelRunner(joint, self.space, store, shape, self.sampler.next_ids, facts.vocab_size)
        self.kv_bytes = store.allocated_bytes()
        if capture and not self.space.recompute:
            self.runner.graphs = StepGraphs(joint, shape, self.sampler.next_ids, build.max_num_seqs, (1, 2))
            with torch.inference_mode():
                for done in self.runner.graphs.capture_all():
                    build.context.progress("capture second model", done)

    @staticmethod
    def _budget(build: Assembly, facts: ModelFacts) -> KVBudget:
        """The same number of sequences, beside the target's stated memory; on a GPU a share of what is free."""
        own, target = kv_bytes_per_token(facts), kv_bytes_per_token(build.context.facts)
        share = min(_MOST_OF_KV, own / (own + target)) if own + target else _MOST_OF_KV
        free = None
        if build.device.type == "cuda":
            free = int(torch.cuda.mem_get_info(build.device)[0] * build.context.kv_memory_fraction * share)
        return KVBudget(
            max_num_seqs=build.max_num_seqs,
            max_model_len=build.context.max_model_len,
            element_bytes=build.dtype.itemsize,
            max_bytes=free,
        )


def second_models(build: Assembly, capture: bool) -> Callable[..., SecondModel]:
    """`second(source=None, quantizer=None, model=None, facts=None)` for `DecoderContext`.

    Without `source` it is the target's own checkpoint; `quantizer` names a quantizer and its options; `model` (with
    `facts`) takes a module that exists already. Raises `UserError` for a source that cannot be read and `Unsupported`
    for a model that the joint must not drive.
    """

    def second(
        source: str | None = None,
        quantizer: str | None = None,
        quantizer_options: dict[str, Any] | None = None,
        model: Any = None,
        facts: ModelFacts | None = None,
    ) -> SecondModel:
        if model is not None:
            assert facts is not None
            return SecondModel(build, model, facts, capture, rounded=not build.lossless(Role.QUANTIZER))
        resolved, found = _find(build, source)
        if found.refusal:
            raise Unsupported(found.refusal)
        if "model:bidirectional" in found.features:
            raise Unsupported(f"{found.source} fills in masks and predicts no next token, so it cannot draft")
        loaded = load_model(
            resolved, found, dtype=build.context.dtype, device=str(build.device), seed=build.context.seed,
            progress=build.context.progress,
        )  # fmt: skip
        lossless = quantizer is None or _quantize(build, loaded.model, quantizer, quantizer_options or {})
        return SecondModel(build, loaded.model, found, capture, load_tokenizer(resolved), rounded=not lossless)

    return second


def _find(build: Assembly, source: str | None) -> tuple[ResolvedSource, ModelFacts]:
    if source is None:
        return build.context.source, build.context.facts
    resolved = resolve_source(ModelSource(source=source), build.context.base or Path())
    return resolved, read_model_facts(resolved, dtype=build.context.dtype)


def _quantize(build: Assembly, model: Any, name: str, options: dict[str, Any]) -> bool:
    """Change the model in place; whether that is lossless."""
    if build.context.find is None:
        raise UserError("this engine was built without a catalogue, so no quantizer can be named for a second model")
    component = build.context.find(Role.QUANTIZER, name).component
    chosen = component.options(**options)
    quantizer = component.build(chosen, None)
    if quantizer.load_arguments():
        raise Unsupported(f"quantizer {name!r} works at load, which a second model does not offer")
    quantizer.apply(model, QuantizerContext(str(build.device), build.context.dtype, None, build.context.progress))
    return component.lossless(chosen)
