"""A plugin of small fake components, and a small model config, for tests that plan without real parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from infermix.plugins import Catalogue
from infermix.roles.component import PART_ROLES, Component, Options, Provenance, Registered, Role
from infermix.roles.facts import MachineFacts
from infermix.roles.kv_space import KVBudget, KVGroup, KVShape
from infermix.roles.workload import WorkloadOptions
from msgspec import Meta

MACHINE = MachineFacts("cpu", "test machine", 64 << 30, 8)
GPU = MachineFacts("cuda", "test gpu", 80 << 30, 8, 90)

CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write_config(directory: Path, **changes: Any) -> Path:
    path = directory / "tiny.json"
    path.write_bytes(msgspec.json.encode({**CONFIG, **changes}))
    return path


class Blocks(Options, frozen=True, kw_only=True):
    block_size: Annotated[int, Meta(ge=1, description="tokens in one block")] = 16


class Running(Options, frozen=True, kw_only=True):
    max_num_seqs: Annotated[int, Meta(ge=1, description="most at once")] = 4


class Fuse(Options, frozen=True, kw_only=True):
    norms: Annotated[bool, Meta(description="fuse norms as well")] = True


class Load(WorkloadOptions, frozen=True, kw_only=True):
    tokens: Annotated[int, Meta(ge=1, description="per request")] = 64
    told: Annotated[bool, Meta(description="false: only the data tells how long a request is")] = True

    def max_request_tokens(self) -> int | None:
        return self.tokens if self.told else None


class Layout:
    """Sizes without a store: planning needs no more."""

    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape:
        per_token = sum(group.bytes_per_token(budget.element_bytes) for group in groups)
        tokens = budget.max_num_seqs * budget.max_model_len
        return KVShape(
            groups, tokens, 1, budget.max_num_seqs, budget.max_model_len, int(per_token * tokens), per_token
        )


def component(role: Role, name: str, **fields: Any) -> Component:
    defaults = {"summary": f"fake {name}", "build": lambda options, context: Layout()}
    return Component(role=role, name=name, **{**defaults, **fields})


def features(*names: str) -> Any:
    return lambda options, model, machine: frozenset(names)


PARTS = (
    component(Role.ATTENTION, "sdpa", needs=features("view:dense"), provides=features("head_dim:*")),
    component(
        Role.ATTENTION, "windowed", needs=features("view:dense|view:paged"),
        provides=features("head_dim:64", "attn:sliding_window"),
    ),
    component(Role.ATTENTION, "small", needs=features("dtype:float16"), provides=features("head_dim:32")),
    component(Role.ATTENTION, "gpu", needs=features("device:cuda", "sm:90"), provides=features("head_dim:*")),
    component(
        Role.KV, "paged", options=Blocks, provides=features("view:paged", "kv:truncate"),
        adapters=lambda o, m, h: {"view:dense": "gather"},
    ),
    component(Role.KV, "dense", provides=features("view:dense")),
    component(Role.KV, "opaque"),
    component(Role.QUANTIZER, "none"),
    component(Role.QUANTIZER, "half", weight_bits=lambda options: 8.0),
    component(Role.QUANTIZER, "absent", requires=("a_library_that_is_not_here",), extra="absent"),
    component(Role.DECODER, "autoregressive"),
    component(Role.DECODER, "speculative", needs=features("kv:truncate"), provides=features("decoder:drafts")),
    component(Role.SCHEDULER, "continuous", options=Running),
    component(Role.TRANSFORM, "fuse", options=Fuse, needs=features("device:cuda|device:cpu")),
    component(Role.TRANSFORM, "gpu", needs=features("device:cuda")),
    component(Role.TRANSFORM, "softer", provides=features("extra:thing")),
    component(Role.DECODER, "thing", needs=features("extra:thing")),
    component(
        Role.ENGINE, "native", hosts=frozenset((*PART_ROLES, Role.TRANSFORM)), provides=features("engine:score")
    ),
    component(Role.ENGINE, "whole", hosts=frozenset({Role.QUANTIZER})),
    component(Role.WORKLOAD, "load", options=Load),
    component(
        Role.WORKLOAD, "noise", options=Load, provides=features("workload:random_tokens", "workload:ignore_eos")
    ),
    component(Role.EVALUATOR, "score", needs=features("engine:score")),
)  # fmt: skip


def catalogue(errors: Mapping[str, str] | None = None) -> Catalogue:
    """Only the fakes, so that tests do not depend on what is installed."""
    provenance = Provenance("fake", "1", "fake_parts")
    by_role: dict[Role, dict[str, Registered]] = {role: {} for role in Role}
    for part in PARTS:
        reason = f"needs {part.requires[0]}: pip install infermix[{part.extra}]" if part.requires else None
        by_role[part.role][part.name] = Registered(part, provenance, reason)
    return Catalogue(by_role, errors or {})
