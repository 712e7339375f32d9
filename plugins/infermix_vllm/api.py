"""The names of vLLM that this plugin uses, as of 0.26."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Api:
    """`LLMEngine` and what it is built from and fed with."""

    version: str
    engine_args: Any
    engine: Any
    executor: Any
    sampling_params: Any
    output_kind: Any
    usage_context: Any


def load_api() -> Api:
    """Import vLLM. A benchmark reports nothing home: its usage statistics are off unless the user's setting says."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import vllm
    from vllm.sampling_params import RequestOutputKind
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor import Executor

    return Api(
        version=vllm.__version__,
        engine_args=vllm.EngineArgs,
        engine=vllm.LLMEngine,
        executor=Executor,
        sampling_params=vllm.SamplingParams,
        output_kind=RequestOutputKind,
        usage_context=UsageContext,
    )
