"""Child process of the full family matrix: one family, capped memory, one JSON line on stdout."""

from __future__ import annotations

import json
import resource
import sys

_MEMORY_BYTES = 6 << 30


def main(model_type: str) -> dict[str, object]:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    from infermix.engine.bridge import Joint
    from infermix.errors import Unsupported
    from infermix_reference.attention_eager import EagerAttention
    from packed_walk import packed_error
    from tiny_models import tiny_model
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return {"state": "unknown", "reason": "this transformers does not have the family"}
    model = tiny_model(model_type)
    try:
        joint = Joint(model)
        errors = {name: packed_error(joint, EagerAttention(), name) for name in ("paged", "dense")}
    except Unsupported as error:
        return {"state": "refused", "reason": str(error)}
    windows = sorted({group.window or 0 for group in joint.groups})
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"state": "ran", "errors": errors, "windows": windows, "parameters": parameters}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
