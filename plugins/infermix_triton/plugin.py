"""Native Triton parts. Kernels come from `infermix_kernels` and are imported when a part is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Features, Options, Role
from infermix.toolkit.group_sizes import group_needs
from infermix.toolkit.skip import UNTOUCHED
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.facts import MachineFacts, ModelFacts

#: As in `infermix_kernels.attention_checks`, which is not imported here.
_MAX_HEAD_DIM, _MAX_LATENT, _MAX_REST = 256, 512, 128
_HEAD_DIMS = (64, 80, 96, 128, 192, 256)
_MIN_CAPABILITY = 80
_FP8_CAPABILITY = 89
#: As in `infermix_kernels.sampling`, which is not imported here.
_MAX_VOCABULARY = 1 << 18


class AttentionOptions(Options, frozen=True):
    check_block_tables: Annotated[
        bool, Meta(description="debug: check block ids and lengths on the device before every call; slow, no graphs")
    ] = False


class SkinnyLinearOptions(Options, frozen=True):
    max_rows: Annotated[
        int, Meta(ge=1, le=16, description="most rows of a product that the kernel takes", extra={"unit": "rows"})
    ] = 8
    measure: Annotated[
        bool, Meta(description="in set-up, keep torch's product for the shapes and row counts where it is faster")
    ] = True


class W8A8Options(Options, frozen=True):
    skip: Annotated[
        tuple[str, ...], Meta(description="patterns (as in a shell) of module names that stay as they are")
    ] = UNTOUCHED


class W4A16Options(W8A8Options, frozen=True):
    group_size: Annotated[
        Literal[32, 64, 128, 256], Meta(description="weights that share a scale", extra={"unit": "weights"})
    ] = 128
    symmetric: Annotated[
        bool, Meta(description="scale only; false adds a zero point per scale and uses the range fully")
    ] = True


def _capable(machine: MachineFacts, minimum: int) -> Features:
    """A device that is too old is refused by asking for the first compute capability that will do."""
    old = machine.compute_capability is not None and machine.compute_capability < minimum
    return frozenset({f"sm:{minimum}"} if old else ())


def _on_cuda(options: Any, model: ModelFacts, machine: MachineFacts) -> Features:
    """Kernels use tensor cores in bf16, from compute capability 8.0 on."""
    needs = frozenset({"device:cuda", "dtype:float32|dtype:float16|dtype:bfloat16"})
    return needs | _capable(machine, _MIN_CAPABILITY)


def _attention_needs(options: AttentionOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return _on_cuda(options, model, machine) | {"view:paged|view:dense|view:quantized|view:kivi"}


def _attention_provides(options: AttentionOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    """Any head dimension up to 256, of keys and of values, and the compressed rows of MLA up to 512 + 128."""
    layers = [layer for layer in model.layers if layer.kind == "attention"]
    too_wide = {layer.key_dim for layer in layers if max(layer.key_dim, layer.value_dim) > _MAX_HEAD_DIM}
    dims = {*_HEAD_DIMS, *(layer.key_dim for layer in layers)} - too_wide
    latent = [layer for layer in layers if layer.latent_dim]
    if all(layer.latent_dim <= _MAX_LATENT and layer.rope_dim <= _MAX_REST for layer in latent):
        dims |= {layer.latent_dim + layer.rope_dim for layer in latent}
    features = {"attn:sliding_window", "attn:softcap", "attn:sinks", *(f"head_dim:{dim}" for dim in dims)}
    if all(layer.window is None for layer in layers):
        features.add("attn:tree_mask")
    features.add("graph:no" if options.check_block_tables else "graph:mixed")
    return frozenset(features)


def _build_attention(options: AttentionOptions, context: None) -> Any:
    from infermix.paths import cache_dir

    from infermix_triton.attention import TritonAttention

    return TritonAttention(cache_dir("kernels"), check_block_tables=options.check_block_tables)


def _build_fuse(options: Options, context: None) -> Any:
    from infermix_triton.fuse import FuseTransform

    return FuseTransform()


def _build_skinny_linear(options: SkinnyLinearOptions, context: None) -> Any:
    from infermix_triton.linear_skinny import SkinnyLinearTransform

    return SkinnyLinearTransform(options.max_rows, measure=options.measure)


def _build_sampling(options: Options, context: None) -> Any:
    from infermix_triton.selector import TritonSamplingTransform

    return TritonSamplingTransform()


def _sampling_needs(options: Options, model: ModelFacts, machine: MachineFacts) -> Features:
    too_large = {f"vocab_size:{_MAX_VOCABULARY}"} if model.vocab_size > _MAX_VOCABULARY else set()
    return _on_cuda(options, model, machine) | too_large


def _halves_on_cuda(options: Options, model: ModelFacts, machine: MachineFacts) -> Features:
    """Activations in 8 bits change by whole steps: no use where fp32 is wanted."""
    return frozenset({"device:cuda", "dtype:float16|dtype:bfloat16"}) | _capable(machine, _MIN_CAPABILITY)


def _fp8_needs(options: Options, model: ModelFacts, machine: MachineFacts) -> Features:
    """FP8 tensor cores come with compute capability 8.9."""
    return frozenset({"device:cuda", "dtype:float16|dtype:bfloat16"}) | _capable(machine, _FP8_CAPABILITY)


def _w4a16_needs(options: W4A16Options, model: ModelFacts, machine: MachineFacts) -> Features:
    """Groups must divide every row. With patterns of one's own the layers are known at load only."""
    if options.skip != W4A16Options().skip:
        return _on_cuda(options, model, machine)
    return _on_cuda(options, model, machine) | group_needs(model, options.group_size)


def _w4a16_bits(options: W4A16Options) -> float:
    """Rows are padded to 256 weights, which is not counted here."""
    return 4 + (16 if options.symmetric else 24) / options.group_size


def _build_w4a16(options: W4A16Options, context: None) -> Any:
    from infermix_triton.quantizer_triton import W4A16Quantizer

    return W4A16Quantizer(group_size=options.group_size, symmetric=options.symmetric, skip=options.skip)


def _build_int8(options: W8A8Options, context: None) -> Any:
    import torch

    from infermix_triton.quantizer_triton import W8A8Quantizer

    return W8A8Quantizer(torch.int8, skip=options.skip)


def _build_fp8(options: W8A8Options, context: None) -> Any:
    import torch

    from infermix_triton.quantizer_triton import W8A8Quantizer

    return W8A8Quantizer(torch.float8_e4m3fn, skip=options.skip)


@hookimpl
def infermix_quantizer() -> list[Component]:
    common: dict[str, Any] = {
        "role": Role.QUANTIZER, "requires": ("torch", "triton"), "extra": "triton", "lossless": lambda options: False,
    }  # fmt: skip
    return [
        Component(
            name="triton_w4a16",
            summary="weights rounded to 4 bits, multiplied without expanding them first",
            build=_build_w4a16,
            options=W4A16Options,
            needs=_w4a16_needs,
            weight_bits=_w4a16_bits,
            **common,
        ),
        Component(
            name="triton_int8",
            summary="weights and activations rounded to int8, per output and per token",
            build=_build_int8,
            options=W8A8Options,
            needs=_halves_on_cuda,
            weight_bits=lambda options: 8.0,
            **common,
        ),
        Component(
            name="triton_fp8",
            summary="weights and activations rounded to FP8 E4M3, per output and per token",
            build=_build_fp8,
            options=W8A8Options,
            needs=_fp8_needs,
            weight_bits=lambda options: 8.0,
            **common,
        ),
    ]


@hookimpl
def infermix_transform() -> list[Component]:
    return [
        Component(
            name="fuse",
            role=Role.TRANSFORM,
            summary="merged products, norms, rotary, KV write and activations in fused kernels",
            build=_build_fuse,
            requires=("torch", "triton"),
            extra="triton",
            needs=_on_cuda,
        ),
        Component(
            name="skinny_linear",
            role=Role.TRANSFORM,
            summary="linears of few rows in a kernel that reads weights at the speed of memory",
            build=_build_skinny_linear,
            options=SkinnyLinearOptions,
            requires=("torch", "triton"),
            extra="triton",
            needs=_on_cuda,
        ),
        Component(
            name="triton_sampling",
            role=Role.TRANSFORM,
            summary="tokens picked from the logits by kernels, without a sort",
            build=_build_sampling,
            requires=("torch", "triton"),
            extra="triton",
            needs=_sampling_needs,
        ),
    ]


@hookimpl
def infermix_attention() -> list[Component]:
    return [
        Component(
            name="triton",
            role=Role.ATTENTION,
            summary="Triton kernels that read blocks and dense rows in place",
            build=_build_attention,
            options=AttentionOptions,
            requires=("torch", "triton"),
            extra="triton",
            needs=_attention_needs,
            provides=_attention_provides,
        )
    ]
