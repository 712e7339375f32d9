"""Needs against provides: which mixes work, through which declared adapters, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infermix.roles.component import Choice, Features, Role, meets
from infermix.roles.facts import MachineFacts, ModelFacts

#: Who is expected to offer a feature, by its prefix; only used to word a refusal.
_PROVIDERS = {
    "attn": Role.ATTENTION,
    "head_dim": Role.ATTENTION,
    "kv": Role.KV,
    "view": Role.KV,
    "engine": Role.ENGINE,
}


#: Why a model asks for a feature of the KV layout.
_LAYOUT_HINTS = {
    "kv:state": " (a layout that keeps the states of its recurrent layers)",
    "kv:recompute": " (tokens see what is behind them: their keys change with every step, as in kv: none)",
}
#: Why a model asks for a feature of the decoder.
_DECODER_HINTS = {"decoder:unmasks": " (it fills in masks and predicts no next token, as for decoder: diffusion)"}

#: What to do where nothing provides a feature.
_WAYS_OUT = {
    "decoder:search": " (greedy outputs of one prompt are equal: set temperature above 0, or take a decoder that "
    "searches)",
    "decoder:plain": " (one token of every sequence a step, as decoder: autoregressive)",
    "model:bidirectional": " (models that fill in masks do, with is_causal: false in their config)",
    "model:mask_token": " (its config has no mask_token_id: set parts.decoder.mask_token_id)",
}

#: What no engine can do for a model with this feature, and why.
_IMPOSSIBLE = {
    "model:bidirectional": (
        frozenset({"engine:score", "engine:score_decode", "engine:logits"}),
        "which no engine does for a model that fills in masks: a token's probability would need all before it and "
        "nothing behind it",
    )
}

#: What must not meet, since the figures would say nothing: the features, and why.
_MEANINGLESS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("decoder:drafts", "workload:random_tokens", "workload:ignore_eos"),
        "how many drafts are accepted on random tokens beyond the end of a text says nothing about speculation: use "
        "real prompts",
    ),
    (
        ("decoder:confident", "workload:random_tokens", "workload:ignore_eos"),
        "how many predictions reach a threshold on random tokens beyond the end of a text says nothing: use real "
        "prompts",
    ),
    (("decoder:search", "workload:sampled"), "a search is deterministic and draws nothing: set temperature to 0"),
    (("decoder:search", "workload:stop_texts"), "a search knows stop tokens only: use stop_token_ids"),
    (("decoder:search", "workload:repetition_penalty"), "a search applies no repetition penalty: set it to 1"),
    (("engine:simulated", "scheduler:swap"), "the time of swaps is not simulated: use preemption: recompute"),
    (
        ("engine:no_token_times", "goodput:itl_s"),
        "no request can be held to measure.goodput.itl_s without times of its tokens: set engine.detail to tokens",
    ),
    (("engine:hands_over", "kv:state"), "states of recurrent layers are not handed over from worker to worker"),
    (("engine:hands_over", "decoder:search"), "rows of a search are not handed over from worker to worker"),
    (
        ("engine:hands_over", "decoder:drafts"),
        "what the decoder knows of a prompt is not handed over from worker to worker",
    ),
    (
        ("decoder:draft_model", "kv:drops_decoding"),
        "what the layout drops while the draft model runs ahead does not come back when its drafts are rejected",
    ),
    (
        ("decoder:search", "scheduler:swap"),
        "rows of a search are not swapped to the host: use preemption: recompute",
    ),
)


@dataclass(frozen=True)
class Match:
    """The outcome: one sentence per problem, and feature -> adapter for what goes through one."""

    problems: tuple[str, ...]
    adapters: Mapping[str, str]
    choices: Mapping[Role, Choice]
    transforms: tuple[Choice, ...] = ()


def match(
    choices: Mapping[Role, Choice],
    evaluators: Iterable[Choice],
    model: ModelFacts,
    machine: MachineFacts,
    transforms: Sequence[Choice] = (),
    limits: Features = frozenset(),
    inner: Sequence[Choice] = (),
) -> Match:
    """Check a mix. `choices` and `transforms` come back with `via` filled in; `model.dtype` is the cell's dtype.

    `inner` are decoders inside the decoder: what they need is checked, too. `limits` are features `limits:KEY`
    and `goodput:KEY`, one for each limit that the experiment states.
    """
    rules = _Rules(choices, transforms, model, machine, limits)
    problems: list[str] = list(rules.model_problems())
    adapters: dict[str, str] = {}
    matched: dict[Role, Choice] = {}
    for role, choice in choices.items():
        via = rules.resolve(role, choice, problems)
        matched[role] = replace(choice, via=via) if via else choice
        adapters.update(via)
    adapted: list[Choice] = []
    for choice in transforms:
        via = rules.resolve(Role.TRANSFORM, choice, problems)
        adapted.append(replace(choice, via=via) if via else choice)
        adapters.update(via)
    for role, others in ((Role.DECODER, inner), (Role.EVALUATOR, evaluators)):
        for choice in others:
            rules.resolve(role, choice, problems)
    problems += rules.meaningless()
    return Match(tuple(problems), adapters, matched, tuple(adapted))


class _Rules:
    """Features of one mix: every provided one, and those that exist only through an adapter."""

    def __init__(
        self,
        choices: Mapping[Role, Choice],
        transforms: Sequence[Choice],
        model: ModelFacts,
        machine: MachineFacts,
        limits: Features,
    ) -> None:
        self._choices, self._model, self._machine = choices, model, machine
        everyone = (*choices.values(), *transforms)
        parts = frozenset[str]().union(*(self._evaluate(choice, "provides") for choice in everyone))
        hardware = {name for name in machine.provides if not name.startswith("dtype:")}
        offered = {name for name in model.features if name.startswith("model:")}
        self._impossible = {need: why for name in offered if name in _IMPOSSIBLE
                            for needs, why in (_IMPOSSIBLE[name],) for need in needs}  # fmt: skip
        self._provided = (parts - self._impossible.keys()) | hardware | limits | offered | {f"dtype:{model.dtype}"}
        self._adapters: dict[str, str] = {}
        for choice in everyone:
            self._adapters.update(self._evaluate(choice, "adapters"))

    def _evaluate(self, choice: Choice, rule: str) -> Any:
        function: Callable[..., Any] = getattr(choice.component, rule)
        return function(choice.options, self._model, self._machine)

    def resolve(self, role: Role, choice: Choice, problems: list[str]) -> dict[str, str]:
        """The adapters that a choice runs through; what nobody offers is added to `problems`."""
        via: dict[str, str] = {}
        for need in sorted(self._evaluate(choice, "needs")):
            if meets(need, self._provided):
                continue
            adapted = [name for name in need.split("|") if name in self._adapters]
            if adapted:
                via[adapted[0]] = self._adapters[adapted[0]]
            else:
                problems.append(f"{_title(role, choice)} needs {_readable(need)}, {self._absence(need)}")
        return via

    def meaningless(self) -> Iterator[str]:
        """Mixes that would run and be measured for nothing."""
        for names, why in _MEANINGLESS:
            if set(names) <= self._provided:
                owners = dict.fromkeys(
                    _title(role, choice)
                    for name in names
                    for role, choice in self._choices.items()
                    if name in self._evaluate(choice, "provides")
                )
                yield f"{' with '.join(owners)}: {why}"

    def model_problems(self) -> Iterator[str]:
        """What the model and the dtype ask of the attention backend and the machine."""
        if f"dtype:{self._model.dtype}" not in self._machine.provides:
            yield f"{self._machine.name} does not compute in {self._model.dtype}"
        yield from self._layout_problems()
        yield from self._decoder_problems()
        yield from self._weights_problems()
        attention = self._choices.get(Role.ATTENTION)
        if attention is None:
            return
        provided = self._evaluate(attention, "provides")
        for need in sorted(_model_needs(self._model)):
            if not meets(need, provided):
                title = _title(Role.ATTENTION, attention)
                yield f"the model needs {need}, which {title} does not provide"

    def _layout_problems(self) -> Iterator[str]:
        """What the model asks of the KV layout, where the engine takes one."""
        kv = self._choices.get(Role.KV)
        if kv is None:
            return
        provided = self._evaluate(kv, "provides")
        for need in sorted(name for name in self._model.features if name.startswith("kv:")):
            if not meets(need, provided):
                why = _LAYOUT_HINTS.get(need, "")
                yield f"the model needs {need}{why}, which {_title(Role.KV, kv)} does not provide"

    def _decoder_problems(self) -> Iterator[str]:
        """What the model asks of the decoder, or of an engine that decodes by itself."""
        role = Role.DECODER if Role.DECODER in self._choices else Role.ENGINE
        decoder = self._choices.get(role)
        if decoder is None:
            return
        provided = self._evaluate(decoder, "provides")
        for need in sorted(name for name in self._model.features if name.startswith("decoder:")):
            if not meets(need, provided):
                why = _DECODER_HINTS.get(need, "")
                yield f"the model needs {need}{why}, which {_title(role, decoder)} does not provide"

    def _weights_problems(self) -> Iterator[str]:
        """A checkpoint of quantized weights asks for a quantizer that reads them, where the engine takes one."""
        quantizer = self._choices.get(Role.QUANTIZER)
        if quantizer is None:
            return
        provided = self._evaluate(quantizer, "provides")
        for need in sorted(name for name in self._model.features if name.startswith("weights:")):
            if not meets(need, provided):
                title, method = _title(Role.QUANTIZER, quantizer), need.partition(":")[2]
                yield f"the model's weights are packed by {method} (`{need}`), which {title} does not read"

    def _absence(self, need: str) -> str:
        if need in self._impossible:
            return self._impossible[need]
        prefix = need.partition(":")[0]
        choice = self._choices.get(_PROVIDERS.get(prefix, Role.WORKLOAD))
        if prefix in ("device", "sm"):
            return f"this cell runs on {self._machine.device} ({self._machine.name})"
        if prefix == "limits":
            return "which this experiment does not set"
        if prefix == "dtype":
            return f"this cell computes in {self._model.dtype}"
        if prefix == "model":
            return f"which {self._model.model_type} models do not have{_WAYS_OUT.get(need, '')}"
        if choice is not None and prefix in _PROVIDERS:
            return f"which {_title(_PROVIDERS[prefix], choice)} does not provide"
        return f"which nothing in this cell provides{_WAYS_OUT.get(need, '')}"


def _model_needs(model: ModelFacts) -> set[str]:
    widths = {f"head_dim:{layer.key_dim}" for layer in model.layers if layer.kind == "attention"}
    return {name for name in model.features if name.startswith("attn:")} | widths


def _title(role: Role, choice: Choice) -> str:
    return f"{role.value} {choice.component.name!r}"


def _readable(need: str) -> str:
    return " or ".join(need.split("|"))
