"""The native engine over layouts that models ask for: MLA latents, states of recurrent layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.errors import UserError
from infermix.roles.engine import ScoreRequest
from infermix.roles.request import Request, SamplingParams

Build = Callable[..., Any]
LENGTHS = (3, 11, 6, 1)
NEW = 8

_COMMON = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "eos_token_id": 5, "initializer_range": 0.2}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
CONFIGS: dict[str, dict[str, Any]] = {
    "mamba": {**_COMMON, "state_size": 8, "time_step_rank": 4},
    "jamba": {
        **_COMMON, **_ATTENTION, "max_position_embeddings": 128, "attn_layer_period": 2, "attn_layer_offset": 1,
        "num_experts": 1, "num_experts_per_tok": 1, "mamba_d_state": 8, "use_mamba_kernels": False,
    },
    "deepseek_v3": {
        **_COMMON, **_ATTENTION, "max_position_embeddings": 128, "num_key_value_heads": 4, "kv_lora_rank": 16,
        "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        if family not in made:
            torch.manual_seed(0)
            made[family] = tmp_path_factory.mktemp(family)
            AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**CONFIGS[family])).save_pretrained(made[family])
        return made[family]

    return of


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(6, 96, (length,), generator=generator).tolist() for length in LENGTHS]
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    return [
        Request(request_id=str(number), prompt_ids=tuple(prompt), sampling=sampling)
        for number, prompt in enumerate(prompts)
    ]


def generated(engine: Any) -> dict[str, list[int]]:
    for request in requests():
        engine.submit(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests()}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return tokens


def expected(directory: Path) -> dict[str, list[int]]:
    """Greedy tokens by full forwards of transformers, without any cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    out = {}
    for request in requests():
        ids = list(request.prompt_ids)
        for _ in range(NEW):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        out[request.request_id] = ids[len(request.prompt_ids) :]
    return out


STATE, LATENT = ("state", {"block_size": 4}), ("latent", {"block_size": 4})
CASES = [("mamba", STATE), ("jamba", STATE), ("jamba", ("state", {"snapshots": 2})), ("deepseek_v3", LATENT)]


@pytest.mark.parametrize(
    ("family", "kv"), CASES, ids=lambda value: value if isinstance(value, str) else str(value[1])
)
def test_greedy_tokens_equal_full_forwards(build_engine: Build, checkpoint: Any, family: str, kv: Any) -> None:
    """Two run at a time, prompts in chunks, so that sequences join, wait and finish."""
    scheduler = ("continuous", {"max_num_seqs": 2, "max_num_batched_tokens": 5, "chunked": True})
    engine = build_engine({"kv": kv, "scheduler": scheduler}, model=checkpoint(family), max_model_len=32)
    assert generated(engine) == expected(checkpoint(family))
    assert engine.report().self_check["relative_error"] < 1e-4
    assert generated(engine) == expected(checkpoint(family))


@pytest.mark.parametrize(("family", "kv"), [("jamba", STATE), ("deepseek_v3", LATENT)])
def test_preemption_does_not_change_the_tokens(build_engine: Build, checkpoint: Any, family: str, kv: Any) -> None:
    full = build_engine({"kv": kv}, model=checkpoint(family), max_model_len=20).report()
    per_token = int(full.kv_bytes_per_token)
    blocks = 7 * 4 * per_token  # the longest sequence takes five, and the sink one
    states = full.kv_bytes - per_token * 4 * (5 * 8 + 1)
    engine = build_engine(
        {"kv": kv}, model=checkpoint(family), max_model_len=20, max_num_seqs=4,
        kv_memory_bytes=blocks + states * 5 // 9,
    )  # fmt: skip
    assert generated(engine) == expected(checkpoint(family))
    assert engine.report().counters["preemptions"] > 0


@pytest.mark.parametrize(
    ("family", "kv"), [("mamba", STATE), ("jamba", STATE), ("jamba", ("state", {"block_size": 4, "snapshots": 2}))],
    ids=str,
)  # fmt: skip
def test_states_swap_to_the_host_and_back(build_engine: Build, checkpoint: Any, family: str, kv: Any) -> None:
    """Little memory for blocks preempts; a model without attention is preempted by hand."""
    scheduler = ("continuous", {"preemption": "swap"})
    full = build_engine({"kv": kv}, model=checkpoint(family), max_model_len=20).report()
    memory = {"kv_swap_bytes": 10_000_000}
    if family == "jamba":
        per_token = int(full.kv_bytes_per_token)
        states = full.kv_bytes - per_token * 4 * (5 * 8 + 1)
        memory["kv_memory_bytes"] = 7 * 4 * per_token + states * 5 // 9
    engine = build_engine(
        {"kv": kv, "scheduler": scheduler}, model=checkpoint(family), max_model_len=20, max_num_seqs=4, **memory
    )
    if family == "jamba":
        assert generated(engine) == expected(checkpoint(family))
        counters = engine.report().counters
        assert counters["swaps_out"] == counters["swaps_in"] == counters["preemptions"] > 0
        return
    tokens = swapped_by_hand(engine)
    assert tokens == expected(checkpoint(family))
    assert engine.report().counters["swap_out_bytes"] == 4 * full.kv_bytes / 9


def swapped_by_hand(engine: Any) -> dict[str, list[int]]:
    """After three steps every sequence leaves, is written over, and comes back."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests()}
    for request in requests():
        engine.submit(request)
    step = 0
    while engine.has_work:
        step += 1
        if step == 4:
            running = list(engine._live.values())
            for sequence in running:
                engine._swapper.execute([engine._space.swap_out(sequence.seq_id, sequence.num_computed)])
            for tensor in engine._store.block_tensors(1):
                tensor.fill_(float("nan"))
            for sequence in reversed(running):
                engine._swapper.execute([engine._space.swap_in(sequence.seq_id, sequence.num_computed)])
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return tokens


@pytest.mark.parametrize(("family", "snapshots"), [("mamba", 0), ("jamba", 0), ("jamba", 2)])
def test_a_fork_begins_with_its_parents_state(
    build_engine: Build, checkpoint: Any, family: str, snapshots: int
) -> None:
    """In the midst of its tokens, and with snapshots behind the prompt but for its last token."""
    kv = ("state", {"block_size": 4, "snapshots": snapshots})
    engine, parent = build_engine({"kv": kv}, model=checkpoint(family), max_model_len=32), requests()[1]
    engine.submit(parent)
    tokens: dict[str, list[int]] = {"1": [], "late": [], "early": []}
    while len(tokens["1"]) < 3:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
        if len(tokens["1"]) == 1:
            engine.fork("1", dataclasses.replace(parent, request_id="early"))
    begun = tuple(tokens["1"])
    sampling = SamplingParams(max_new_tokens=NEW - 3, ignore_eos=True)
    engine.fork("1", Request(request_id="late", prompt_ids=parent.prompt_ids + begun, sampling=sampling))
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    assert tokens["1"] == tokens["early"] == [*begun, *tokens["late"]] == expected(checkpoint(family))["1"]
    early = NEW if snapshots else 11 + NEW - 1
    assert engine.report().counters["computed_tokens"] == 11 + NEW - 1 + NEW - 3 + early


def test_bytes_of_a_recurrent_model_do_not_grow(build_engine: Build, checkpoint: Any) -> None:
    sizes = [
        build_engine({"kv": "state"}, model=checkpoint("mamba"), max_model_len=length).report().kv_bytes
        for length in (16, 128)
    ]
    assert sizes[0] == sizes[1] == 9 * 2 * 128 * (4 + 8) * 4


def test_a_token_takes_its_latent_and_rotary_key(build_engine: Build, checkpoint: Any) -> None:
    latent = build_engine({"kv": LATENT}, model=checkpoint("deepseek_v3"))
    expanded = build_engine({"kv": "paged"}, model=checkpoint("deepseek_v3"))
    assert latent.report().kv_bytes_per_token == 2 * (16 + 8) * 4
    assert expanded.report().kv_bytes_per_token == 2 * 4 * (16 + 8 + 12) * 4
    assert generated(latent) == generated(expanded)


@pytest.mark.parametrize(("family", "kv"), [("mamba", STATE), ("deepseek_v3", LATENT)])
def test_scores_do_not_depend_on_the_protocol(build_engine: Build, checkpoint: Any, family: str, kv: Any) -> None:
    engine = build_engine({"kv": kv}, model=checkpoint(family), max_model_len=64)
    ids = tuple(torch.randint(6, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist())
    prefill, decode = engine.score([ScoreRequest(ids, 5), ScoreRequest(ids, 5, "decode")])
    torch.testing.assert_close(torch.tensor(prefill.logprobs), torch.tensor(decode.logprobs), rtol=1e-4, atol=1e-4)


def test_too_little_memory_for_one_state_is_refused(build_engine: Build, checkpoint: Any) -> None:
    with pytest.raises(UserError, match="do not hold the states of one sequence"):
        build_engine({"kv": "state"}, model=checkpoint("mamba"), kv_memory_bytes=1000)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("family", "kv"), [("jamba", STATE), ("deepseek_v3", LATENT)])
def test_on_a_device(build_engine: Build, checkpoint: Any, family: str, kv: Any) -> None:
    """Steps come out of captured graphs or say why not: recurrent layers cannot, loops over experts may not."""
    engine = build_engine({"kv": kv}, model=checkpoint(family), max_model_len=32, device="cuda")
    assert generated(engine) == expected(checkpoint(family))
    graphs, counters = engine.report().graphs, engine.report().counters
    assert (graphs["captured"] > 0) == (counters["graph_steps"] > 0)
    assert graphs["captured"] or graphs["reason"]
    assert family != "jamba" or "graph:no" in graphs["reason"]
