"""Prompts whose last token is written again: what may come out, over every decoder, and bytes of vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding import DRAFTING, generate
from infermix.errors import Unsupported
from infermix.roles.request import Request, SamplingParams
from infermix_decoders.token_bytes import bytes_of_tokens
from infermix_decoders.token_healing import HealingDecoder, Pieces

Build = Callable[..., Any]
STOP = 5
#: Token i is a text of one to three letters; the stop token and a few others have none.
PIECES = [b"", *(b"abcdefghijklmnop"[i : i + 1 + i % 3] for i in range(15))]
PIECES += [bytes([97 + i // 9, 97 + i % 9]) for i in range(96 - len(PIECES))]
PIECES[STOP] = b""


def healed(engine: Any, num_tokens: int = 2) -> Any:
    engine._decoder = HealingDecoder(engine._decoder, Pieces(PIECES), num_tokens)
    engine._prepare = engine._decoder.prepare
    return engine


def requests(**sampling: Any) -> list[Request]:
    return [
        Request(
            request_id=str(seed), prompt_ids=(7, 9 + seed, 30 + seed, 20 + 3 * seed, 1),
            sampling=SamplingParams(max_new_tokens=9, seed=seed, **sampling),
        )
        for seed in range(5)
    ]  # fmt: skip


def text(tokens: Any) -> bytes:
    return b"".join(PIECES[token] for token in tokens)


def test_outputs_begin_with_what_was_taken(build_engine: Build) -> None:
    plain = generate(build_engine(), requests())
    found = generate(healed(build_engine()), requests(temperature=50.0))
    ends = [text(request.prompt_ids[-2:]) for request in requests()]
    assert all(text(tokens).startswith(end) for tokens, end in zip(found.values(), ends, strict=True))
    assert not all(text(tokens).startswith(end) for tokens, end in zip(plain.values(), ends, strict=True))
    assert any(tuple(found[each.request_id][:2]) != each.prompt_ids[-2:] for each in requests())


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_same_tokens_over_every_decoder(build_engine: Build, sampling: dict[str, Any]) -> None:
    expected = generate(healed(build_engine()), requests(**sampling))
    for decoder in DRAFTING:
        assert generate(healed(build_engine(parts={"decoder": decoder})), requests(**sampling)) == expected, decoder[
            0
        ]


def test_what_may_follow() -> None:
    pieces = Pieces([b"", b"a", b"ab", b"abc", b"abd", b"b", b"bc", b"ab\xff", b"b"])
    assert pieces.allowed(b"ab").nonzero().flatten().tolist() == [1, 2, 3, 4, 7]
    assert pieces.allowed(b"abx").sum() == 0  # nothing makes up an x
    assert pieces.allowed(b"abbc").nonzero().flatten().tolist() == [1, 2]
    assert pieces.allowed(b"b").nonzero().flatten().tolist() == [5, 6, 8]
    assert pieces.allowed(b"\xff").sum() == 0


def test_special_tokens_and_the_first_one_stay() -> None:
    decoder = HealingDecoder(SimpleNamespace(), Pieces(PIECES), 3)
    assert decoder.prepare(Request(request_id="r", prompt_ids=(9, 8, STOP, 7))).prompt_ids == (9, 8, STOP)
    assert decoder.prepare(Request(request_id="r", prompt_ids=(9, 8))).prompt_ids == (9,)
    ends = decoder.prepare(Request(request_id="r", prompt_ids=(9, STOP)))
    assert (ends.prompt_ids, ends.healed) == ((9, STOP), b"")  # type: ignore[attr-defined]


def test_without_a_tokenizer(build_engine: Build) -> None:
    with pytest.raises(Unsupported, match="needs a tokenizer"):
        build_engine(parts={"decoder": "token_healing"})


def test_an_inner_decoder_needs_its_parts(build_engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from infermix_decoders import token_healing

    monkeypatch.setattr(token_healing, "bytes_of_tokens", lambda tokenizer, size: PIECES)
    monkeypatch.setattr("infermix.engine.assembly.load_tokenizer", lambda source: SimpleNamespace())
    parts = {"decoder": ("token_healing", {"decoder": "lookahead"}), "kv": "none"}
    with pytest.raises(Unsupported, match="'lookahead' needs kv:move"):
        build_engine(parts=parts)
    build_engine(parts={**parts, "kv": "paged"})


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_bytes_of_a_vocabulary(kind: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    sample = "naïve 你好 def f(x): return  x\n"
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind != "byte level"))
    if kind == "byte level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        alphabet = sorted(set(sample.replace(" ", "▁")))
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([sample] * 9, trainer)
    backend = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    pieces = bytes_of_tokens(SimpleNamespace(backend=backend, special_token_ids=(0,)), 500)
    assert len(pieces) == 500
    assert pieces[0] == b""
    assert b"".join(pieces[token] for token in backend.encode(sample)) == sample.encode()


def test_masks_have_the_size_of_the_vocabulary() -> None:
    assert torch.equal(Pieces([b"a", b"b"]).allowed(b"a"), torch.tensor([True, False]))
