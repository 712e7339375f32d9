"""Compiles attention over 4- and 2-bit groups for sm_90 without a GPU; a process of its own, not interpreted."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from compile_sm90 import compile_prepared
from infermix_kernels import group_write
from infermix_kernels.attention_call import Prepared, Rules, Workspace
from infermix_kernels.attention_grouped import GroupedPools, prepare
from infermix_kernels.launch import Launch


def prepared(
    lens: tuple[int, int, int],
    bits: int = 4,
    dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
    launch: Launch | None = None,
    **rules: Any,
) -> Prepared:
    """The launch of `lens` = (sequences, query length, context): 32 heads over 8, groups of 32, a tail of 128."""
    batch, query, context = lens
    groups = batch * -(-context // 32) + 1

    def tensor(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    packed = [tensor(groups, 8, 32, dim * bits // 8, of=torch.uint8) for dim in dims]
    factors = [
        tensor(groups, 8, dims[0], 2, of=torch.float16),
        tensor(groups, 8, 32, dims[1] // 32, 2, of=torch.float16),
    ]
    tails = [tensor(batch + 1, 128, 8, dim) for dim in dims]
    pools = GroupedPools(packed[0], packed[1], factors[0], factors[1], tails[0], tails[1], 32, 64)
    tensors = {
        "q": tensor(batch * query, 32, dims[0]),
        "keys": tensor(*packed[0].shape[:3], packed[0].shape[3] // 4, of=torch.int32),
        "values": tensor(*packed[1].shape[:3], packed[1].shape[3] // 4, of=torch.int32),
        "key_factors": tensor(*factors[0].shape[:3], of=torch.int32),
        "value_factors": tensor(*factors[1].shape[:4], of=torch.int32),
        "tail_keys": tails[0],
        "tail_values": tails[1],
        "out": tensor(batch * query, 32, dims[1]),
        "cu_seqlens": tensor(batch + 1, of=torch.int32),
        "context_lens": tensor(batch, of=torch.int32),
        "tables": tensor(batch, -(-context // 32), of=torch.int32),
        "tail_rows": tensor(batch, of=torch.int32),
        "sinks": tensor(32) if rules.pop("sinks", False) else None,
    }
    wanted = Rules(dims[0] ** -0.5, rules.get("window"), rules.get("softcap"), None)
    return prepare(tensors, pools, wanted, (query, context), Workspace.allocate("meta"), launch)


def writing(bits: int, fresh: bool) -> Prepared:
    """Groups that 64 sequences may complete in a step of one token, or a long chunk."""
    packed = [torch.empty(129, 8, 32, 16 * bits, dtype=torch.uint8, device="meta") for _ in range(2)]
    factors = [torch.empty(129, 8, *size, 2, dtype=torch.float16, device="meta") for size in ((128,), (32, 4))]
    tails = [torch.empty(65, 128, 8, 128, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    pools = GroupedPools(packed[0], packed[1], factors[0], factors[1], tails[0], tails[1], 32, 64)
    new = torch.empty(64, 8, 128, dtype=torch.bfloat16, device="meta")
    target = torch.empty(64, dtype=torch.int64, device="meta")
    old = torch.empty(64, 32, dtype=torch.int64, device="meta")
    return group_write.prepare(new, new, pools, (target, old, old if fresh else None), 128)


#: Name, bytes that may spill, launch. The first ones are compiled in every run of the tests.
CONFIGURATIONS: list[tuple[str, int, dict[str, Any]]] = [
    ("int4 decode", 16, {"lens": (64, 1, 8192)}),
    ("int2 decode", 16, {"lens": (64, 1, 8192), "bits": 2}),
    ("int4 prefill", 256, {"lens": (4, 4096, 4096)}),
    ("int4 write", 0, {"bits": 4, "fresh": False}),
    ("int4 one sequence, all rules", 16, {"lens": (1, 1, 8192), "window": 1024, "softcap": 30.0, "sinks": True}),
    ("int4 verification", 16, {"lens": (8, 8, 4096)}),
    ("int2 prefill", 256, {"lens": (4, 4096, 4096), "bits": 2}),
    ("int2 write of a long chunk", 0, {"bits": 2, "fresh": True}),
]

if __name__ == "__main__":
    for name, allowed, wanted in CONFIGURATIONS[: int(sys.argv[1])]:
        built = compile_prepared(writing(**wanted) if "write" in name else prepared(**wanted))
        row = {"name": name, "registers": built.registers, "spill_bytes": built.spill_bytes}
        row |= {"allowed_spill_bytes": allowed, "shared_bytes": built.shared_bytes}
        print(json.dumps(row), flush=True)
