"""Decoders that draft, requests whose prompts repeat themselves, and how an engine runs them."""

from __future__ import annotations

import random
from typing import Any

from infermix.roles.request import Request, SamplingParams

DRAFTING = [
    ("prompt_lookup", {"num_draft_tokens": 5, "min_match_tokens": 1}),
    ("jacobi", {"num_draft_tokens": 5}),
    ("lookahead", {"window": 5, "ngram": 3, "guesses": 4}),
    ("self_speculative", {"skip_layers": (1,), "num_draft_tokens": 3, "acceptance": "coupled"}),
    ("speculative", {"draft": "target", "draft_quantizer": "rtn", "num_draft_tokens": 3, "acceptance": "coupled"}),
    (
        "speculative",
        {
            "draft": "target",
            "draft_quantizer": "rtn",
            "num_draft_tokens": 4,
            "acceptance": "coupled",
            "adaptive": True,
        },
    ),
    ("medusa", {"heads": "medusa", "num_draft_tokens": 12}),
    ("eagle", {"heads": "eagle", "num_draft_tokens": 14, "depth": 3, "beam": 4}),
]
#: Those of them whose drafts form trees.
TREES = ("lookahead", "medusa", "eagle")


def requests(sampling: dict[str, Any], count: int = 7) -> list[Request]:
    """Prompts that repeat themselves, of different lengths, so that lookups hit."""
    rng = random.Random(3)
    made = []
    for index in range(count):
        phrase = [rng.randrange(6, 96) for _ in range(rng.randint(1, 4))]
        prompt = (phrase * 9)[: rng.randint(3, 17)]
        params = SamplingParams(max_new_tokens=rng.randint(1, 24), seed=index, **sampling)
        made.append(Request(request_id=f"r{index}", prompt_ids=tuple(prompt), sampling=params))
    return made


def generate(engine: Any, wanted: list[Request]) -> dict[str, list[int]]:
    for request in wanted:
        engine.submit(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return tokens
