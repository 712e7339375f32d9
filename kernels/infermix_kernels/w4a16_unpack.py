"""From the nibbles of a word to numbers: two bits of integer arithmetic, no conversion.

A nibble below the mantissa of a constant is that constant plus the nibble: in bfloat16 128 + q, in float16 1024 + q.
Two words at a time give a register of two 16-bit numbers, from which one multiply-add takes constant and zero point
away exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def unpack_asm(plane, bfloat16, then):
    """Words $1 and $2, minus (constant + zero point) twice ($3) -> two numbers ($0).

    `then` says what becomes of them with what is twice in $4: "times" a scale, "plus" the rest of a zero point.
    """
    halves = "0x5410" if plane < 4 else "0x7632"
    shift = 4 * (plane % 4)
    kind, magic, one = ("bf16x2", "0x43004300", "0x3f803f80") if bfloat16 else ("f16x2", "0x64006400", "0x3c003c00")
    last = "mov.b32 $0, t; }"
    if then == "times":
        last = f"fma.rn.{kind} $0, t, $4, z; }}"
    elif then == "plus":
        last = f"fma.rn.{kind} $0, t, one, $4; }}"
    lines = [
        "{ .reg .b32 t, m, c, one, z;",
        f"mov.b32 m, 0x000f000f; mov.b32 c, {magic}; mov.b32 one, {one}; mov.b32 z, 0x80008000;",
        f"prmt.b32 t, $1, $2, {halves};",
        f"shr.u32 t, t, {shift};" if shift else "",
        "lop3.b32 t, t, m, c, 0xea;",
        f"fma.rn.{kind} t, t, one, $3;",
        last,
    ]
    return "\n".join(line for line in lines if line)


@triton.jit
def unpack_plane(words, offset, scale, PLANE: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr):
    """`(q - zero) [* scale]` of nibble PLANE of each word, in the dtype of `offset`.

    `offset` holds minus (constant + zero point), see `offset_of`; `scale` is ignored unless SCALED. Both broadcast.
    """
    if ASM:
        brain: tl.constexpr = offset.dtype == tl.bfloat16
        if SCALED:
            return tl.inline_asm_elementwise(
                unpack_asm(PLANE, brain, "times"), "=r,r,r,r,r", [words, offset, scale],
                dtype=offset.dtype, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                unpack_asm(PLANE, brain, ""), "=r,r,r,r", [words, offset],
                dtype=offset.dtype, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        values = ((words >> (4 * PLANE)) & 15).to(offset.dtype) + offset
        return values * scale if SCALED else values


@triton.jit
def fractional_plane(words, offset, rest, PLANE: tl.constexpr, ASM: tl.constexpr):
    """`q - zero` of nibble PLANE of each word, rounded once to the dtype of `offset`: q minus the whole part of the
    zero point is exact, `rest` is what is left of it (see `split_zeros`)."""
    if ASM:
        brain: tl.constexpr = offset.dtype == tl.bfloat16
        return tl.inline_asm_elementwise(
            unpack_asm(PLANE, brain, "plus"), "=r,r,r,r,r", [words, offset, rest.to(offset.dtype)],
            dtype=offset.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return unpack_plane(words, offset, offset, PLANE, False, ASM) + rest.to(offset.dtype)


@triton.jit
def scaled_plane(words, offset, rest, scale, PLANE: tl.constexpr, FRACTIONAL: tl.constexpr, ASM: tl.constexpr):
    """`(q - zero) * scale` of nibble PLANE of each word, rounded once to the dtype of `offset`.

    A scale of another dtype must not be rounded to it first: it would be the second rounding of every weight.
    """
    if scale.dtype == offset.dtype and not FRACTIONAL:
        return unpack_plane(words, offset, scale, PLANE, True, ASM)
    else:
        exact = unpack_plane(words, offset, offset, PLANE, False, ASM).to(tl.float32)
        if FRACTIONAL:
            exact += rest
        return (exact * scale.to(tl.float32)).to(offset.dtype)


@triton.jit
def split_zeros(zeros, FRACTIONAL: tl.constexpr):
    """Zero points in fp32 as whole ones, which 16-bit numbers take away exactly, and what has to be added then."""
    if FRACTIONAL:
        whole = tl.minimum(tl.maximum(tl.floor(zeros + 0.5), 0.0), 16.0)
        return whole, whole - zeros
    else:
        return zeros, zeros


@triton.jit
def offset_of(zeros, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Minus the whole zero point, and minus the constant that the assembly leaves on the nibbles."""
    if not ASM:
        return (-zeros).to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        return (-128.0 - zeros).to(DTYPE)
    else:
        return (-1024.0 - zeros).to(DTYPE)
