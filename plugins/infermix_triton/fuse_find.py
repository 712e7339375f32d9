"""Finding what can be fused in a model, by structure and by numbers, never by the model's name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from infermix_kernels.reference import ops as reference
from torch import Tensor, nn

from infermix_triton.fused_operators import Activation

#: Rounding of one norm or activation, relative to the norm of its result.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Mismatch(Exception):
    """Why something is not what a fused module computes."""


@dataclass(frozen=True)
class NormFacts:
    """RMSNorm by `weight + offset`."""

    weight: nn.Parameter
    eps: float
    offset: float


@dataclass(frozen=True)
class MLPParts:
    """`down(activation(gate(x)) * up(x))`; `gate_up` are two linears, or one that is merged already."""

    gate_up: tuple[nn.Linear, ...]
    down: nn.Linear
    activation: Activation


@dataclass(frozen=True)
class LayerParts:
    """A decoder layer: norm, attention, norm, gated MLP. `qkv` are three linears, or one that is merged already."""

    attention: nn.Module
    qkv: tuple[nn.Linear, ...]
    o: nn.Linear
    norms: dict[str, NormFacts]
    mlp: MLPParts


@dataclass(frozen=True)
class Body:
    """The module that runs `layers`, its final norm and its rotary module, by the names it has for them."""

    module: nn.Module
    layers: str
    norm: str
    rotary: str


def find_body(model: nn.Module) -> Body:
    """Raises `Mismatch`."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) and _attention_of(child[0]) is not None:
                return _body(module, name)
    raise Mismatch("no list of layers with an attention module each")


def _body(module: nn.Module, layers: str) -> Body:
    norms = [name for name, child in module.named_children() if is_norm(child)]
    rotaries = [name for name, child in module.named_children() if hasattr(child, "inv_freq")]
    if len(norms) != 1 or len(rotaries) != 1:
        raise Mismatch(f"{len(norms)} norms and {len(rotaries)} rotary modules beside the layers, not one of each")
    rotary = module.get_submodule(rotaries[0])
    if list(inspect.signature(rotary.forward).parameters) != ["x", "position_ids"]:
        raise Mismatch("its rotary module takes more than positions")
    if getattr(rotary, "rope_type", "default") in ("dynamic", "longrope"):
        raise Mismatch("its rotary angles depend on the longest sequence of a batch")
    return Body(module, layers, norms[0], rotaries[0])


def layer_parts(layer: nn.Module) -> LayerParts:
    """Raises `Mismatch` with what is too much or missing."""
    attention = _attention_of(layer)
    if attention is None:
        raise Mismatch("no attention module")
    children = [child for child in layer.children() if child is not attention]
    norms = [child for child in children if is_norm(child)]
    others = [child for child in children if not is_norm(child) and _has_parameters(child)]
    if len(norms) != 2 or len(others) != 1:
        raise Mismatch(f"{len(norms)} norms and {len(others)} modules besides attention, not 2 and an MLP")
    head_norms = {
        key: norm_facts(getattr(attention, name)) for key, name in (("q", "q_norm"), ("k", "k_norm"))
        if isinstance(getattr(attention, name, None), nn.Module)
    }  # fmt: skip
    parts = LayerParts(
        attention=attention,
        qkv=_linears(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        o=_linear(attention, "o_proj"),
        norms={"attention": norm_facts(norms[0]), "mlp": norm_facts(norms[1]), **head_norms},
        mlp=mlp_parts(others[0]),
    )
    _refuse_leftovers(layer, parts)
    return parts


def mlp_parts(module: nn.Module) -> MLPParts:
    """Raises `Mismatch`."""
    gate_up = _linears(module, ("gate_proj", "up_proj"), "gate_up_proj")
    parts = MLPParts(gate_up, _linear(module, "down_proj"), _activation_of(module))
    _require_only(module, (*gate_up, parts.down))
    return parts


def is_norm(module: nn.Module) -> bool:
    """Parameters, all of them vectors, and no children."""
    parameters = list(module.parameters())
    return not list(module.children()) and bool(parameters) and all(each.dim() == 1 for each in parameters)


def norm_facts(module: nn.Module) -> NormFacts:
    """RMSNorm, recognised by what it does to random rows, large and small. Raises `Mismatch`."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, nn.Parameter) or not isinstance(eps, float) or len(list(module.parameters())) != 1:
        raise Mismatch(f"{type(module).__name__} has more or less than a weight and an eps")
    x = random_rows(3, weight.shape[0], weight) * torch.tensor([[1.0], [30.0], [3 * eps**0.5]]).to(weight)
    seen = module(x)
    for offset in (0.0, 1.0):
        if relative_error(seen, reference.rms_norm(x, weight, eps, weight_offset=offset)) < tolerance(weight.dtype):
            return NormFacts(weight, eps, offset)
    raise Mismatch(f"{type(module).__name__} is no RMSNorm")


def random_rows(num_rows: int, width: int, like: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, width, generator=generator).to(like.device, like.dtype)


def relative_error(seen: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of the expected."""
    left, right = seen.double(), expected.double()
    return float((left - right).norm() / right.norm().clamp_min(1e-30))


def tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCES[dtype]


def _attention_of(layer: nn.Module) -> nn.Module | None:
    found = [child for child in layer.children() if isinstance(getattr(child, "layer_idx", None), int)]
    return found[0] if len(found) == 1 and _has_parameters(found[0]) else None


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _linear(module: nn.Module, name: str) -> nn.Linear:
    child = getattr(module, name, None)
    if type(child) is not nn.Linear:
        raise Mismatch(f"{type(module).__name__} has no linear {name}")
    return child


def _linears(module: nn.Module, names: Sequence[str], merged: str) -> tuple[nn.Linear, ...]:
    if hasattr(module, merged):
        return (_linear(module, merged),)
    return tuple(_linear(module, name) for name in names)


def _activation_of(module: nn.Module) -> Activation:
    function = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    if not callable(function):
        raise Mismatch(f"{type(module).__name__} has no activation function")
    x = torch.linspace(-6, 6, 101)
    known: tuple[tuple[Activation, Tensor], ...] = (
        ("silu", F.silu(x)), ("gelu_tanh", F.gelu(x, approximate="tanh")), ("gelu_erf", F.gelu(x)),
    )  # fmt: skip
    seen = function(x)
    for name, expected in known:
        if relative_error(seen, expected) < 1e-5:
            return name
    raise Mismatch(f"the activation of {type(module).__name__} is neither SiLU nor GELU")


def _refuse_leftovers(layer: nn.Module, parts: LayerParts) -> None:
    """Parameters of the attention module itself (sinks) are handed to the attention function as before."""
    norms = [facts.weight for facts in parts.norms.values()]
    own = [*parts.attention.parameters(recurse=False), *norms]
    _require_only(layer, (*parts.qkv, parts.o, *parts.mlp.gate_up, parts.mlp.down), own)


def _require_only(module: nn.Module, linears: Iterable[nn.Linear], own: Iterable[Tensor] = ()) -> None:
    known = {id(parameter) for linear in linears for parameter in linear.parameters()} | {id(each) for each in own}
    for name, parameter in module.named_parameters():
        if id(parameter) not in known:
            raise Mismatch(f"{type(module).__name__} has a parameter {name} with no place in a fused layer")
