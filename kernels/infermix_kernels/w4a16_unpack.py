"""From the nibbles of a word to numbers: two bits of integer arithmetic, no conversion.

A nibble below the mantissa of a constant is that constant plus the nibble: in bfloat16 128 + q, in float16 1024 + q.
Two words at a time give a register of two 16-bit numbers, from which one multiply-add takes constant and zero point
away exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def unpack_asm(plane, bfloat16, scaled):
    """Words $1 and $2, minus (constant + zero point) twice ($3), the scale twice ($4) -> two numbers ($0)."""
    halves = "0x5410" if plane < 4 else "0x7632"
    shift = 4 * (plane % 4)
    kind, magic, one = ("bf16x2", "0x43004300", "0x3f803f80") if bfloat16 else ("f16x2", "0x64006400", "0x3c003c00")
    lines = [
        "{ .reg .b32 t, m, c, one, z;",
        f"mov.b32 m, 0x000f000f; mov.b32 c, {magic}; mov.b32 one, {one}; mov.b32 z, 0x80008000;",
        f"prmt.b32 t, $1, $2, {halves};",
        f"shr.u32 t, t, {shift};" if shift else "",
        "lop3.b32 t, t, m, c, 0xea;",
        f"fma.rn.{kind} t, t, one, $3;",
        f"fma.rn.{kind} $0, t, $4, z; }}" if scaled else "mov.b32 $0, t; }",
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
                unpack_asm(PLANE, brain, True), "=r,r,r,r,r", [words, offset, scale],
                dtype=offset.dtype, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                unpack_asm(PLANE, brain, False), "=r,r,r,r", [words, offset], dtype=offset.dtype, is_pure=True, pack=2
            )
    else:
        values = ((words >> (4 * PLANE)) & 15).to(offset.dtype) + offset
        return values * scale if SCALED else values


@triton.jit
def scaled_plane(words, offset, scale, PLANE: tl.constexpr, ASM: tl.constexpr):
    """`(q - zero) * scale` of nibble PLANE of each word, rounded once to the dtype of `offset`.

    A scale of another dtype must not be rounded to it first: it would be the second rounding of every weight.
    """
    if scale.dtype == offset.dtype:
        return unpack_plane(words, offset, scale, PLANE, True, ASM)
    else:
        exact = unpack_plane(words, offset, offset, PLANE, False, ASM)
        return (exact.to(tl.float32) * scale.to(tl.float32)).to(offset.dtype)


@triton.jit
def offset_of(zeros, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Minus zero point, and minus the constant that the assembly leaves on the nibbles."""
    if not ASM:
        return (-zeros).to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        return (-128.0 - zeros).to(DTYPE)
    else:
        return (-1024.0 - zeros).to(DTYPE)
