"""A byte tokenizer, an engine with known probabilities, and a tiny random Llama."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from infermix.errors import UserError
from infermix.roles.engine import EngineReport, Score, ScoreRequest
from infermix.roles.evaluator import EvaluatorContext
from infermix.roles.request import FinishReason, Request, TokenEvent

torch.set_num_threads(1)

BOS, EOS, OFFSET = 1, 2, 3


class ByteTokenizer:
    """Ids are UTF-8 bytes plus 3."""

    eos_token_ids = (EOS,)
    bos_token_id: int | None = BOS
    vocab_size = 256 + OFFSET

    def encode(self, text: str) -> list[int]:
        return [byte + OFFSET for byte in text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(i - OFFSET for i in token_ids if i >= OFFSET).decode(errors="replace")

    def apply_chat(self, messages: object) -> list[int]:
        raise UserError("no chat template")


class TableEngine:
    """Next-token logits are a function of the tokens so far; greedy generation follows them."""

    def __init__(self, next_logits: Callable[[tuple[int, ...]], torch.Tensor], tokenizer: object = None) -> None:
        self.next_logits, self.tokenizer = next_logits, tokenizer or ByteTokenizer()
        self.scored: list[ScoreRequest] = []
        self.waiting: list[Request] = []
        self.closed = False

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[TokenEvent]:
        request = self.waiting.pop(0)
        tokens = list(request.prompt_ids)
        for _ in range(request.sampling.max_new_tokens):
            tokens.append(int(self.next_logits(tuple(tokens)).argmax()))
        new = tuple(tokens[len(request.prompt_ids) :])
        return [TokenEvent(request.request_id, new, 0, FinishReason.LENGTH)]

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        self.scored.extend(requests)
        return [self._score(request) for request in requests]

    def _score(self, request: ScoreRequest) -> Score:
        ids = request.token_ids
        logits = torch.stack([self.next_logits(ids[:i]) for i in range(request.first, len(ids))]).float()
        targets = torch.tensor(ids[request.first :])[:, None]
        logprobs = logits.double().log_softmax(-1).gather(1, targets)[:, 0]
        return Score(logprobs.tolist(), logits.argmax(-1).tolist(), logits if request.want_logits else None)

    def report(self) -> EngineReport:
        return EngineReport()

    def reset(self) -> None:
        self.waiting.clear()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
def table_engine() -> type[TableEngine]:
    return TableEngine


@pytest.fixture
def copycat() -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Gives a repetition of the last token probability 1/2 and spreads the rest evenly over the 258 others."""

    def next_logits(tokens: tuple[int, ...]) -> torch.Tensor:
        logits = torch.full((ByteTokenizer.vocab_size,), -math.log(2 * (ByteTokenizer.vocab_size - 1)))
        logits[tokens[-1]] = -math.log(2)
        return logits

    return next_logits


@pytest.fixture
def evaluator_context(tmp_path: Path) -> Callable[..., EvaluatorContext]:
    def no_reference() -> object:
        raise AssertionError("this evaluator asked for a reference engine")

    def make(reference: Callable[[], object] = no_reference) -> EvaluatorContext:
        return EvaluatorContext(base=tmp_path, seed=0, reference=reference)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def _llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=ByteTokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=0,
        initializer_range=0.4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.fixture
def llama(_llama: torch.nn.Module) -> torch.nn.Module:
    """A fresh copy, since engines change settings of the model they are given."""
    return copy.deepcopy(_llama)


@pytest.fixture
def ticks() -> Callable[[], int]:
    """A clock that advances by one at each look."""
    counter = itertools.count(1)
    return lambda: next(counter)
