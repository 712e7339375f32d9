"""Multi-head latent attention over what it compresses to (DeepSeek-V2, arXiv 2405.04434, section 2.1).

transformers' MLA modules expand the latent of a token into keys and values of every head before they attend. Here the
latent and the rotary key stay one row, and the expansion moves to the other side: with the key part `U` and the value
part `V` of `kv_b_proj`, `q . (U c) = (U^T q) . c` and `sum_i p_i (V c_i) = V (sum_i p_i c_i)`. So attention runs over
one KV head whose value is the first part of its key. Prefill is absorbed as well: exact, with more FLOPs per pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from infermix.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator


class KeptLinear(nn.Linear):
    """A linear whose weight is read by others than its own product: quantizers and packers leave it as it is."""


class LatentAttention:
    """Lets the MLA modules of a model hand over latents. Raises `Unsupported` when it has none, or cannot absorb.

    `attach` replaces `expand_kv` on the instances, `detach` gives the modules their own back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(_latent_modules(model))
        if not self._modules:
            raise Unsupported(
                f"{type(model).__name__} has no latent attention that could stay compressed (kv: paged stores its "
                "keys and values)"
            )
        for name, module in self._modules:
            _check_projection(name, module)

    def keep(self) -> None:
        """Mark the up-projections, so that no quantizer replaces the weights that `absorb` reads."""
        for _, module in self._modules:
            kept = KeptLinear(module.kv_b_proj.in_features, module.kv_b_proj.out_features, bias=False, device="meta")
            kept.weight = module.kv_b_proj.weight
            module.kv_b_proj = kept

    def attach(self) -> None:
        for _, module in self._modules:
            module.expand_kv = _stay_latent

    def detach(self) -> None:
        for _, module in self._modules:
            module.__dict__.pop("expand_kv", None)

    @staticmethod
    def absorb(module: Any, query: Tensor) -> Tensor:
        """`query [B, H, n, nope + rope]` -> `[B, H, n, latent + rope]`, to be compared with latents."""
        plain, rotated = query.split((module.qk_nope_head_dim, module.qk_rope_head_dim), dim=-1)
        keys = _projection(module)[:, : module.qk_nope_head_dim]
        return torch.cat((torch.matmul(plain, keys), rotated), dim=-1)

    @staticmethod
    def expand(module: Any, out: Tensor) -> Tensor:
        """`out [T, H, latent]`, weighted latents -> `[T, H, Dv]`."""
        values = _projection(module)[:, module.qk_nope_head_dim :]
        return torch.matmul(out.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)


def _latent_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(type(module), "expand_kv") and hasattr(module, "kv_b_proj"):
            yield name, module


def _projection(module: Any) -> Tensor:
    """`[H, nope + Dv, latent]`, a view of the weight of `kv_b_proj`."""
    weight: Tensor = module.kv_b_proj.weight
    return weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[1])


def _check_projection(name: str, module: Any) -> None:
    linear = module.kv_b_proj
    plain = isinstance(linear, nn.Linear) and type(linear.weight) in (Tensor, nn.Parameter)
    if not plain or not linear.weight.is_floating_point():
        raise Unsupported(
            f"{name}.kv_b_proj was quantized ({type(linear).__name__}): latent attention multiplies with its plain "
            "weight (use a quantizer that converts linears after loading and leaves this one out, or kv: paged)"
        )
    if linear.bias is not None:
        raise Unsupported(f"{name}.kv_b_proj has a bias, which cannot be absorbed")


def _stay_latent(latent: Tensor, rotary_key: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of `expand_kv`: `[B, 1, n, latent + rope]` as key, its first `latent` numbers as value."""
    key = torch.cat((latent, rotary_key), dim=-1)
    return key, key[..., : latent.shape[-1]]
