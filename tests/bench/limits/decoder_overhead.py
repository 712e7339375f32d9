"""A decoder's own Python: time in `launch` and `collect` outside of forwards, sampling and waiting for the device.

Forwards are those of the target, of a draft model, of draft heads and of a draft layer; what chooses among their
outputs (trees, masks, acceptance) is the decoder's own, and so is what it launches on the device for that. What a
decoder replays from a graph (`eagle`: a pass over new tokens, a round of guesses; `medusa`: all heads) has forwards
inside, among what is done with their outputs: the replay as a whole counts as a forward, lists and copies before and
behind it as the decoder's own. Where that is launched operator by operator (on a CPU, or without graphs), only
embedding, layer and head count as forwards. What `beam` replays (ranking continuations) is all its own.

Threads that a decoder lets work beside a forward (`constrained`: grammar masks of several sequences) count as far as
it waits for them behind that forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Skips all layers of SmolLM2-135M but four.
_SKIPPED = tuple(range(2, 28))
#: Row -> decoder and its options. The heads of `write_random_heads` accept next to nothing, and so does `lookahead`
#: on random weights, but trees are as large as ever.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "autoregressive": ("autoregressive", {}),
    "prompt_lookup": ("prompt_lookup", {}),
    "jacobi": ("jacobi", {}),
    "lookahead": ("lookahead", {}),
    "synthetic_acceptance": ("synthetic_acceptance", {}),
    "self_speculative": ("self_speculative", {"skip_layers": _SKIPPED}),
    "speculative": ("speculative", {"draft": "target"}),
    "medusa": ("medusa", {"heads": "medusa"}),
    "eagle": ("eagle", {"heads": "eagle"}),
    "constrained": ("autoregressive", {}),
    "beam": ("beam", {"num_beams": 4}),
}
#: Of these, those that replay work of their own from graphs: their engines are measured with graphs.
REPLAYING = frozenset({"beam", "eagle", "medusa"})


class OwnTime:
    """Seconds of an engine's decoder outside of what it waits for; a clock that stands still otherwise."""

    def __init__(self, engine: Any) -> None:
        self.seconds = self._foreign = 0.0
        self._wait = torch.cuda.synchronize if engine._runner._next_ids.is_cuda else _nothing
        self._undo: list[tuple[Any, str, Any]] = []
        for owner, name in foreign_calls(engine):
            self._replace(owner, name, self._not_counted)
        for name in ("launch", "collect"):
            self._replace(engine._decoder, name, self._counted)

    def __call__(self) -> float:
        return self.seconds

    def detach(self) -> None:
        for owner, name, own in reversed(self._undo):
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    def _replace(self, owner: Any, name: str, wrapped: Callable[..., Any]) -> None:
        self._undo.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, wrapped(getattr(owner, name)))

    def _not_counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The wait for what a forward launched belongs to the forward, not to whoever reads its result."""

        def timed(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self._wait()
                self._foreign += time.perf_counter() - start

        return timed

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            self._wait()
            start, before = time.perf_counter(), self._foreign
            found = call(*given)
            self.seconds += time.perf_counter() - start - (self._foreign - before)
            return found

        return timed


class OwnLaunches(OwnTime):
    """Operators that an engine's decoder calls outside of the same, views of tensors apart.

    Each is a launch or two on a GPU. On a CPU copies to the device and back are not seen.
    """

    def __init__(self, engine: Any) -> None:
        self._mode, self._on = _Operators(), False
        super().__init__(engine)

    @property
    def names(self) -> list[str]:
        return self._mode.names

    def _not_counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def hidden(*given: Any, **named: Any) -> Any:
            if not self._on:
                return call(*given, **named)
            with self._switched(False):
                return call(*given, **named)

        return hidden

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any) -> Any:
            with self._switched(True):
                return call(*given)

        return watched

    @contextmanager
    def _switched(self, on: bool) -> Iterator[None]:
        self._switch(on)
        try:
            yield
        finally:
            self._switch(not on)

    def _switch(self, on: bool) -> None:
        self._on = on
        if on:
            self._mode.__enter__()
        else:
            self._mode.__exit__(None, None, None)


class _Operators(TorchDispatchMode):
    """Notes the names of operators that make or change tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.empty.memory_format:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def foreign_calls(engine: Any) -> list[tuple[Any, str]]:
    """Methods that are forwards or sampling: of the target, a draft model, draft heads, a draft layer."""
    decoder = engine._decoder
    second = getattr(getattr(decoder, "_draft", None), "_second", None)
    runners = [engine._runner, *([second.runner] if second else [])]
    samplers = [engine._sampler, *([second.sampler] if second else [])]
    found: list[tuple[Any, str]] = [(runner, "forward") for runner in runners]
    found += [(each, name) for each in samplers for name in ("sample", "sample_rows", "probabilities")]
    drafter = getattr(decoder, "_drafter", None)
    guesses = getattr(drafter, "_guesses", None)
    if hasattr(guesses, "_heads"):
        found += _replays(guesses, guesses._heads)
    if hasattr(drafter, "_rounds"):
        found += _replays(drafter._rounds, drafter._rounds.guess)
        found += _replays(drafter._together, drafter._together.extension)
    return found


def _replays(padded: Any, work: Any) -> list[tuple[Any, str]]:
    """The replay of what is captured; of what is not, the forwards inside."""
    if getattr(padded, "_captured", None):
        return [(padded, "run")]
    return [(work, name) for name in ("_embed", "_draft", "_head", "best") if hasattr(work, name)]


def write_random_heads(folder: Path, width: int, vocab_size: int) -> None:
    """Heads of a model of that size in `folder`/medusa and `folder`/eagle."""
    from infermix_decoders.eagle_layer import EagleDraft, EagleShape
    from infermix_decoders.head_files import EAGLE_FILES, MEDUSA_FILES, write_heads
    from infermix_decoders.medusa_heads import MedusaHeads
    from infermix_decoders.train_eagle import config_of

    heads = MedusaHeads(4, 1, width, vocab_size).bfloat16()
    write_heads(
        folder / "medusa", MEDUSA_FILES[0], heads.state_dict(), {"medusa_num_heads": 4, "medusa_num_layers": 1}
    )
    shape = EagleShape(width, 2 * width, 4, 2, width // 4, rope_theta=10000.0, eps=1e-6, bias=True)
    write_heads(folder / "eagle", EAGLE_FILES[0], EagleDraft(shape).bfloat16().state_dict(), config_of(shape))


def constrain(engine: Any) -> None:
    """Put JSON masks over its decoder, with a made-up vocabulary: shapes have no tokenizer."""
    import xgrammar
    from infermix.toolkit.masking import MaskedDecoder
    from infermix_xgrammar.constrained import GrammarMasks

    size = engine._context.facts.vocab_size
    letters = [chr(code) for code in range(32, 127)]
    pieces = ["</s>", *(letters[index % 95] + letters[index // 95 % 95] * (index >= 95) for index in range(size - 1))]
    info = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=[0])
    masks = GrammarMasks(xgrammar.GrammarCompiler(info).compile_builtin_json_grammar())
    engine._decoder, engine._lag = MaskedDecoder(engine._decoder, masks), 0


def _nothing() -> None:
    """A CPU has done what it was asked to do."""
