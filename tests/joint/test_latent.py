"""Latent attention over compressed rows computes what the model's own expanded attention computes."""

from __future__ import annotations

from typing import Any

import packed_walk as walk
import pytest
import torch
from infermix.engine.adapters import mla
from infermix.engine.bridge import Joint
from infermix.engine.self_check import self_check
from infermix.errors import Unsupported, WrongResult
from infermix.roles.kv_space import KVBudget, KVGroup
from infermix.roles.quantizer import QuantizerContext
from infermix_kv.latent import LatentLayout
from infermix_reference.attention_eager import EagerAttention
from infermix_reference.attention_sdpa import SdpaAttention
from infermix_reference.kv_paged import PagedLayout
from infermix_reference.quantizer_rtn import RtnQuantizer
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

#: Families whose MLA modules have `expand_kv`; between them complex, interleaved and plain rotary keys.
FAMILIES = ("deepseek_v2", "deepseek_v3", "axk1", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu")
CONTEXT = QuantizerContext("cpu", "float32")


def latent_joint(model: Any, adapter: type[mla.LatentAttention] = mla.LatentAttention) -> Joint:
    return Joint(model, latent=adapter(model))


@pytest.fixture(scope="module")
def deepseek() -> Any:
    return tiny_model("deepseek_v3")


@pytest.mark.parametrize("attention", [EagerAttention, SdpaAttention])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_expanded_full_forward(family: str, attention: type) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    joint = latent_joint(tiny_model(family))
    assert walk.packed_error(joint, attention(), LatentLayout(4)) < walk.TOLERANCE
    assert [(group.num_kv_heads, group.key_dim, group.value_dim) for group in joint.groups] == [(1, 16 + 8, 16)]


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_queries_without_a_latent_of_their_own(family: str) -> None:
    joint = latent_joint(tiny_model(family, q_lora_rank=None))
    assert walk.packed_error(joint, EagerAttention(), LatentLayout(4)) < walk.TOLERANCE


def test_yarn_scales_the_scores() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4}
    rope["original_max_position_embeddings"] = 32
    joint = latent_joint(tiny_model("deepseek_v3", rope_parameters=rope))
    assert joint.layers[0].scale != pytest.approx((16 + 8) ** -0.5)
    assert walk.packed_error(joint, EagerAttention(), LatentLayout(4)) < walk.TOLERANCE


def test_latent_and_expanded_agree_on_one_model(deepseek: Any) -> None:
    """Attaching the one leaves nothing behind for the other."""
    for _ in range(2):
        assert walk.packed_error(latent_joint(deepseek), EagerAttention(), LatentLayout(4)) < walk.TOLERANCE
        expanded = Joint(deepseek)
        assert walk.packed_error(expanded, EagerAttention(), "paged") < walk.TOLERANCE
        assert expanded.groups[0].key_dim == 24
        assert expanded.groups[0].num_kv_heads == 4


def test_a_token_of_deepseek_v3_takes_576_numbers_a_layer() -> None:
    """61 layers x (512 + 64) x 2 bytes; the store is built on the meta device and holds no values of its own."""
    groups = (KVGroup(tuple(range(61)), 1, 576, 512, shared_values=True),)
    layout = LatentLayout(16)
    shape = layout.shape(groups, KVBudget(max_num_seqs=2, max_model_len=160, element_bytes=2))
    assert shape.bytes_per_token == 61 * (512 + 64) * 2
    assert layout.store(shape, "meta", torch.bfloat16).allocated_bytes() == 21 * 16 * 61 * 576 * 2 == shape.bytes


class WithoutRotary(mla.LatentAttention):
    """Mistake: the rotary part of the row does not count in the scores."""

    @staticmethod
    def absorb(module: Any, query: Tensor) -> Tensor:
        absorbed = mla.LatentAttention.absorb(module, query)
        absorbed[..., -module.qk_rope_head_dim :] = 0
        return absorbed


class ValuesAsKeys(mla.LatentAttention):
    """Mistake: queries are absorbed through the value part of the projection, where the widths allow it."""

    @staticmethod
    def absorb(module: Any, query: Tensor) -> Tensor:
        flipped = module.kv_b_proj.weight.flip(0)
        plain, rotated = query.split((module.qk_nope_head_dim, module.qk_rope_head_dim), dim=-1)
        keys = flipped.view(query.shape[1], -1, flipped.shape[1])[:, : module.qk_nope_head_dim]
        return torch.cat((torch.matmul(plain, keys), rotated), dim=-1)


@pytest.mark.parametrize("mutant", [WithoutRotary, ValuesAsKeys])
def test_a_wrong_absorption_is_caught(deepseek: Any, mutant: type[mla.LatentAttention]) -> None:
    joint = latent_joint(deepseek, mutant)
    assert walk.packed_error(joint, EagerAttention(), LatentLayout(4)) > 10 * walk.TOLERANCE


@pytest.mark.parametrize("mutant", [walk.WrongScale, walk.Leaking])
def test_a_wrong_attention_is_caught(deepseek: Any, mutant: type[EagerAttention]) -> None:
    assert walk.packed_error(latent_joint(deepseek), mutant(), LatentLayout(4)) > 10 * walk.TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_self_check_admits_it_and_refuses_mistakes(dtype: torch.dtype) -> None:
    model = tiny_model("deepseek_v3").to(dtype)
    given = {"device": torch.device("cpu"), "dtype": dtype}
    report = self_check(model, latent_joint(model), EagerAttention(), LatentLayout(4), **given)
    assert report["attention"]["relative_error"] <= report["attention"]["tolerance"]
    with pytest.raises(WrongResult):
        self_check(model, latent_joint(model, WithoutRotary), EagerAttention(), LatentLayout(4), **given)


def test_quantizers_leave_the_up_projection_alone(deepseek: Any) -> None:
    model = tiny_model("deepseek_v3")
    adapter = mla.LatentAttention(model)
    adapter.keep()
    report = RtnQuantizer(bits=8, granularity="channel", group_size=64, symmetric=True).apply(model, CONTEXT)
    assert [name for name in report.skipped if name.endswith("kv_b_proj")]
    assert any(name.endswith("o_proj") for name in report.kernels)
    assert not any(name.endswith("kv_b_proj") for name in report.kernels)
    assert walk.packed_error(latent_joint(model), EagerAttention(), LatentLayout(4)) < walk.TOLERANCE


def test_a_quantized_up_projection_is_refused() -> None:
    model = tiny_model("deepseek_v3")
    RtnQuantizer(bits=8, granularity="channel", group_size=64, symmetric=True).apply(model, CONTEXT)
    with pytest.raises(Unsupported, match="kv_b_proj was quantized"):
        mla.LatentAttention(model)


def test_a_model_without_latents_is_refused() -> None:
    with pytest.raises(Unsupported, match="no latent attention"):
        mla.LatentAttention(nn.Linear(2, 2))


def test_groups_must_be_those_of_the_config(deepseek: Any) -> None:
    wrong = (KVGroup((0, 1, 2, 3), 1, 16 + 4, 16, shared_values=True),)
    with pytest.raises(Unsupported, match="the config says KV groups"):
        Joint(deepseek, wrong, latent=mla.LatentAttention(deepseek))
    assert "expand_kv" not in vars(deepseek.model.layers[0].self_attn)
    assert walk.packed_error(Joint(deepseek), EagerAttention(), PagedLayout(4)) < walk.TOLERANCE
