"""Conformance of decoders: a model that is one line of arithmetic, driven step by step."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Many
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from infermix.roles.component import Component
from infermix.roles.decoder import Decoder, DecoderContext, Emission, Forward, Runner, Sampler, Want
from infermix.roles.kv_space import KVBudget, KVGroup, KVShape, KVSpace
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.conformance.component import example_machine, example_model
from infermix.toolkit.conformance.scheduler import make_sequence
from infermix.toolkit.conformance.unmasking import check_unmasking
from infermix.toolkit.paged_space import PagedSpace, paged_shape
from infermix.toolkit.tree_verification import DraftTree

#: Tokens that the toy model ever says.
VOCABULARY = 31


def next_token(tokens: Many[int]) -> int:
    """The toy model: its greedy continuation depends on every token and on their number."""
    return (7 * sum(tokens) + 3 * len(tokens) + tokens[-1]) % VOCABULARY


class _ToyRunner:
    def forward(self, plan: Plan, want: Want = Want()) -> Forward:
        rows: list[list[int]] = []
        sequences: list[Sequence] = []
        hidden_rows: list[int] = []
        first_rows: dict[int, int] = {}
        total = 0
        for entry in plan.entries:
            texts = _texts(entry, want)
            rows += texts
            sequences += [entry.sequence] * len(texts)
            first_rows[entry.sequence.seq_id] = total
            total += entry.num_new_tokens
            hidden_rows += range(total - len(texts), total)
        logits = torch.zeros(len(rows), example_model().vocab_size)
        for row, tokens in enumerate(rows):
            logits[row, next_token(tokens)] = 1.0
        lanes = torch.tensor([seq.lane for seq in sequences], dtype=torch.int64)
        forward = Forward(logits, sequences, lanes, [len(tokens) for tokens in rows])
        if want.hidden:
            generator = torch.Generator().manual_seed(total)
            forward.hidden = torch.randn(total, example_model().hidden_size, generator=generator)
            forward.hidden_rows, forward.first_rows = hidden_rows, first_rows
        return forward

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        return True

    def copy(self, pairs: Many[tuple[int, int]]) -> None:
        """Nothing is stored."""


def _texts(entry: Scheduled, want: Want) -> list[list[int]]:
    """What stands before every wanted row of an entry."""
    seq = entry.sequence
    known = [*seq.tokens[: seq.num_computed + entry.num_own_tokens], *entry.draft_ids]
    ends = range(seq.num_computed + 1, len(known) + 1)
    if want.all_logits:
        return [known[:end] for end in ends]
    if entry.num_own_tokens != seq.num_uncomputed:
        return []
    if entry.draft_parents:
        own, tree = (
            seq.tokens[: seq.num_computed + entry.num_own_tokens],
            DraftTree(entry.draft_ids, entry.draft_parents),
        )
        return [[*own, *tree.branch(node)] for node in range(-1, len(entry.draft_ids))]
    first = entry.num_own_tokens - 1 if want.draft_logits else entry.num_new_tokens - 1
    stop = None if want.most_drafts is None else first + 1 + want.most_drafts
    return [known[:end] for end in ends[first:stop]]


class _ToySampler:
    """Greedy."""

    def sample(self, forward: Forward) -> Tensor:
        return forward.logits.argmax(-1)

    def sample_rows(self, forward: Forward, drafts: Many[tuple[int, ...]]) -> Tensor:
        assert len(drafts) == len(forward.logits), f"drafts for {len(drafts)} of {len(forward.logits)} rows"
        return forward.logits.argmax(-1)

    def probabilities(self, forward: Forward, drafts: Many[tuple[int, ...]]) -> Tensor:
        return forward.logits.double()

    def accept(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """Nothing is penalised."""


class _ToySecond:
    """A second model that agrees with the first on most tokens; tokens in flight live here, as on a device."""

    tokenizer = None
    weight_bytes = 1
    kv_bytes = 0

    def __init__(self) -> None:
        self.facts = example_model()
        self.runner = self.sampler = self.space = self
        self._in_flight: dict[int, list[int]] = {}

    def forward(self, plan: Plan, want: Want = Want()) -> Forward:
        sequences = [entry.sequence for entry in plan.entries]
        logits = torch.zeros(len(sequences), example_model().vocab_size)
        for row, seq in enumerate(sequences):
            sampled = self._in_flight.get(seq.seq_id, []) if seq.num_inflight else []
            token = next_token([*seq.tokens, *sampled[-seq.num_inflight :]])
            logits[row, token if token % 5 else 1] = 1.0
        return Forward(logits, sequences, torch.tensor([seq.lane for seq in sequences]))

    def sample(self, forward: Forward) -> Tensor:
        ids = forward.logits.argmax(-1)
        for seq, token in zip(forward.sequences, ids.tolist(), strict=True):
            self._in_flight.setdefault(seq.seq_id, []).append(token)
        return ids

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        return True

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Nothing is stored."""

    def release(self, seq_id: int) -> None:
        """Nothing is stored."""

    def forget(self, lane: int) -> None:
        """Nothing is stored."""


class _ToyPlain:
    """What a decoder wraps that works on others: one token a step."""

    def launch(self, plan: Plan, runner: Runner, sampler: Sampler) -> tuple[Forward, Tensor]:
        forward = runner.forward(plan)
        return forward, sampler.sample(forward)

    def collect(self, ticket: tuple[Forward, Tensor]) -> list[Emission]:
        forward, ids = ticket
        return [Emission(seq, (token,)) for seq, token in zip(forward.sequences, ids.tolist(), strict=True)]


class _ToyTokenizer:
    """Token i is the i-th letter from "A" on, as byte-level vocabularies write it."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    special_token_ids: tuple[int, ...] = ()
    vocab_size = VOCABULARY

    @property
    def backend(self) -> Any:
        vocabulary = {chr(ord("A") + token): token for token in range(VOCABULARY)}
        decoder = SimpleNamespace(decoder="ByteLevel()")
        return SimpleNamespace(get_vocab=lambda: vocabulary, backend_tokenizer=decoder)

    def encode(self, text: str) -> list[int]:
        return [(ord(letter) - ord("A")) % VOCABULARY for letter in text]

    def decode(self, token_ids: Many[int]) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)

    def apply_chat(self, messages: Many[Any]) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))


def toy_context() -> DecoderContext:
    return DecoderContext(
        facts=example_model(), device="cpu", dtype="float32", max_num_seqs=4, max_model_len=4096, seed=0,
        second=lambda *given, **named: _ToySecond(), model=_example_model(), inner=lambda name, options: _ToyPlain(),
        tokenizer=_ToyTokenizer(),
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def _example_model() -> nn.Module:
    """Random weights that fit `example_model()`, for decoders that read or copy modules of the target."""
    from transformers import LlamaConfig, LlamaForCausalLM

    facts = example_model()
    layer = facts.layers[0]
    config = LlamaConfig(
        vocab_size=facts.vocab_size, hidden_size=facts.hidden_size, intermediate_size=512, head_dim=layer.key_dim,
        num_hidden_layers=facts.num_layers, num_attention_heads=layer.num_heads,
        num_key_value_heads=layer.num_kv_heads, max_position_embeddings=facts.max_position_embeddings,
    )  # fmt: skip
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def check_decoder(component: Component, options: Any = None, *, num_steps: int = 12) -> None:
    """Several sequences, one with its prompt in two chunks: nothing may come out before a prompt is complete.

    A lossless decoder must emit exactly the model's greedy continuation; every decoder gives each sequence of a
    complete prompt at least one token a step. Decoders that search or fill in masks have checks of their own.
    """
    options = component.options() if options is None else options
    if "decoder:unmasks" in component.provides(options, example_model(), example_machine("cpu")):
        check_unmasking(component, options, toy_context(), (_ToyRunner, _ToySampler), make_sequence)
        return
    decoder: Decoder = component.build(options, toy_context())
    if getattr(decoder, "returns_outputs", False):
        _check_search(decoder)
        return
    sequences = [make_sequence(index, prompt, 100) for index, prompt in enumerate((1, 4, 9))]
    for lane, seq in enumerate(sequences):
        seq.tokens[:] = [(5 * position + lane) % VOCABULARY for position in range(len(seq.tokens))]
        seq.lane = lane
    expected = {seq.seq_id: _continuation(seq.tokens, 40 * num_steps) for seq in sequences}
    for step in range(num_steps):
        entries = [
            Scheduled(seq, 5 if step == 0 and seq.num_uncomputed > 5 else seq.num_uncomputed) for seq in sequences
        ]
        _run_step(decoder, Plan(entries))
    for seq in sequences:
        emitted = seq.tokens[seq.num_prompt_tokens :]
        assert len(emitted) >= num_steps - 1, f"{len(emitted)} tokens in {num_steps} steps"
        if component.lossless(options):
            correct = expected[seq.seq_id][: len(emitted)]
            assert emitted == correct, f"{component.name} emits {emitted}, the model says {correct}"


def _check_search(decoder: Decoder) -> None:
    """Nothing comes out of a search before its end, then all outputs that were asked for, each of full length."""
    space = decoder.wrap_space(*_toy_space())  # type: ignore[attr-defined]
    seq, new, outputs = make_sequence(0, 7, 6), 6, 2
    seq.request = replace(seq.request, sampling=replace(seq.request.sampling, num_outputs=outputs, ignore_eos=True))
    seq.lane = 0
    emissions: list[Emission] = []
    for step in range(new):
        assert not emissions, f"an emission after {step} of {new} steps"
        assert space.reserve(seq.seq_id, seq.num_tokens)
        ticket = decoder.launch(Plan([Scheduled(seq, seq.num_uncomputed)]), _ToyRunner(), _ToySampler())
        seq.num_computed, seq.num_inflight = seq.num_tokens, seq.num_inflight + 1
        emissions = decoder.collect(ticket)
    found = [tokens for each in emissions for tokens in (each.token_ids, *each.alternatives)]
    assert [len(tokens) for tokens in found] == [new] * outputs, f"outputs {found} of {outputs} of {new} tokens"
    assert len(set(found)) == outputs, f"the same output twice: {found}"
    space.release(seq.seq_id)
    assert not space.usage().allocated_tokens, "a search that ended holds blocks"


def _toy_space() -> tuple[KVSpace, KVShape]:
    groups = (KVGroup((0,), 1, 8, 8),)
    shape = paged_shape(groups, KVBudget(16, 64, 4), block_size=4, per_token=64)
    return PagedSpace(shape), shape


def _run_step(decoder: Decoder, plan: Plan) -> None:
    complete = {e.sequence.seq_id for e in plan.entries if e.num_new_tokens == e.sequence.num_uncomputed}
    emissions = decoder.collect(decoder.launch(plan, _ToyRunner(), _ToySampler()))
    got = [emission.sequence.seq_id for emission in emissions]
    assert len(set(got)) == len(got), f"two emissions for one sequence in one step: {got}"
    assert set(got) == complete, f"tokens for {sorted(got)}, expected for {sorted(complete)}"
    for entry in plan.entries:
        entry.sequence.num_computed += entry.num_new_tokens
    for emission in emissions:
        assert emission.token_ids, f"an empty emission for {emission.sequence.request.request_id}"
        emission.sequence.tokens.extend(emission.token_ids)
        emission.sequence.num_computed = len(emission.sequence.tokens) - 1


def _continuation(tokens: Many[int], count: int) -> list[int]:
    known = list(tokens)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(tokens) :]
