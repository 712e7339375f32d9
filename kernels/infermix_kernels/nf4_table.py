"""From the nibbles of a word to values: a look-up in a table of 16 that stays in the L1 cache.

All threads of a warp are served at once: the table is one line. The loads are written in assembly because the
compiler gives every load a layout of its own choice, and would send codes or values through shared memory on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def look_up_asm(plane, halves):
    """Word $1 and the table's address $2 -> 32 bits ($0); of `halves`, words $1, $2 and addresses $3, $4 -> two."""
    if not halves:
        return (
            "{ .reg .b32 c; .reg .b64 a; "
            f"bfe.u32 c, $1, {4 * plane}, 4; mad.wide.u32 a, c, 4, $2; ld.global.nc.b32 $0, [a]; }}"
        )
    return (
        "{ .reg .b32 c, d; .reg .b64 a, b; .reg .b16 v, w; "
        f"bfe.u32 c, $1, {4 * plane}, 4; bfe.u32 d, $2, {4 * plane}, 4; "
        "mad.wide.u32 a, c, 2, $3; mad.wide.u32 b, d, 2, $4; "
        "ld.global.nc.b16 v, [a]; ld.global.nc.b16 w, [b]; mov.b32 $0, {v, w}; }"
    )


@triton.jit
def look_up(words, table, PLANE: tl.constexpr, ASM: tl.constexpr):
    """`table[nibble PLANE of each word]`, in the table's dtype; words int32."""
    if not ASM:
        return tl.load(table + ((words >> (4 * PLANE)) & 15))
    elif table.dtype.element_ty == tl.float32:
        return tl.inline_asm_elementwise(
            look_up_asm(PLANE, False), "=r,r,l", [words, table.to(tl.int64)],
            dtype=table.dtype.element_ty, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            look_up_asm(PLANE, True), "=r,r,r,l,l", [words, table.to(tl.int64)],
            dtype=table.dtype.element_ty, is_pure=True, pack=2,
        )  # fmt: skip


_LOAD_32 = tl.constexpr(
    "{ .reg .pred p; .reg .b64 a; setp.ne.b32 p, $2, 0; mad.wide.s32 a, $1, 4, $3; "
    "mov.b32 $0, 0; @p ld.global.nc.b32 $0, [a]; }"
)
_LOAD_8 = tl.constexpr(
    "{ .reg .pred p; .reg .b64 a; setp.ne.b32 p, $2, 0; mad.wide.s32 a, $1, 1, $3; "
    "mov.b32 $0, 0; @p ld.global.nc.s8 $0, [a]; }"
)


@triton.jit
def load_in_place(base, index, mask, ASM: tl.constexpr):
    """`base[index]` (fp32 or int8, widened to int32), zero where not `mask`, in the layout of those who ask."""
    if not ASM:
        found = tl.load(base + index, mask=mask, other=0)
        return found.to(tl.int32) if base.dtype.element_ty == tl.int8 else found
    elif base.dtype.element_ty == tl.int8:
        return tl.inline_asm_elementwise(
            _LOAD_8, "=&r,r,r,l", [index, mask.to(tl.int32), base.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _LOAD_32, "=&r,r,r,l", [index, mask.to(tl.int32), base.to(tl.int64)], dtype=tl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip


@triton.jit
def block_scales(absmax, absmax_scale, absmax_mean, index, mask, SCALE_BLOCK: tl.constexpr, ASM: tl.constexpr):
    """fp32 scales of some blocks, zero where not `mask`; with SCALE_BLOCK they are stored in 8 bits."""
    if SCALE_BLOCK == 0:
        return load_in_place(absmax, index, mask, ASM)
    else:
        integers = load_in_place(absmax, index, mask, ASM).to(tl.float32)
        factors = load_in_place(absmax_scale, index // SCALE_BLOCK, mask, ASM)
        return tl.where(mask, integers * factors + tl.load(absmax_mean), 0.0)
