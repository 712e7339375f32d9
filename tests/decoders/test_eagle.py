"""The EAGLE drafter guesses what its layer says of the whole text, and its tree holds the likeliest guesses."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import generate, requests
from infermix.roles.request import Sequence
from infermix.toolkit.tree_verification import DraftTree, depth_of, depth_of_last
from infermix_decoders.eagle_layer import causal
from infermix_decoders.eagle_tree import grow_tree
from torch import Tensor

Build = Callable[..., Any]


class Afresh:
    """The trees of a drafter, computed from the whole text each time: nothing is cached, one branch at a time."""

    def __init__(self, drafter: Any, model: Any) -> None:
        self._drafter, self._model = drafter, model

    def tree(self, sequence: Sequence) -> DraftTree:
        ids = torch.tensor([sequence.tokens])
        hidden = self._model.model(ids, use_cache=False)[0]
        features, tokens = hidden[0, :-1], sequence.tokens[1:]
        guessed = self._guess(features, tokens)
        beam: list[tuple[Tensor, list[int]]] = []

        def expand(chosen: Tensor, parents: Tensor, level: int) -> Tensor:
            nonlocal beam
            branches = beam or [(features, tokens)] * chosen.shape[1]
            grown = []
            for token, parent in zip(chosen[0].tolist(), parents[0].tolist(), strict=True):
                past, known = branches[parent]
                grown.append((torch.cat((past, self._guess(past, known)[None])), [*known, token]))
            beam = grown
            return self._said(torch.stack([self._guess(*branch) for branch in grown]))[None]

        drafter = self._drafter
        made = grow_tree(
            self._said(guessed)[None], expand, drafter._rounds.guess._beam, drafter._depth, drafter.num_nodes
        )
        return DraftTree(*(tuple(part[0].tolist()) for part in made))

    def _guess(self, features: Tensor, tokens: list[int]) -> Tensor:
        embedded = self._model.get_input_embeddings()(torch.tensor([tokens]))
        positions = torch.arange(len(tokens))[None]
        return self._drafter._alone.extension._draft(features[None], embedded, positions, causal)[0, -1]

    def _said(self, features: Tensor) -> Tensor:
        return torch.log_softmax(self._model.lm_head(features).float(), dim=-1)


@pytest.mark.parametrize("kv", ["paged", "dense"])
def test_trees_are_those_of_the_whole_text(build_engine: Build, tiny_llama: Path, kv: str) -> None:
    """Prompts in chunks, several sequences, accepted branches and bonus tokens: the cache never tells."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_llama, attn_implementation="eager").eval()
    options = {"heads": "eagle", "num_draft_tokens": 14, "depth": 3, "beam": 4}
    scheduler = ("continuous", {"max_num_seqs": 3, "max_num_batched_tokens": 9, "chunked": True})
    engine = build_engine(parts={"decoder": ("eagle", options), "kv": kv, "scheduler": scheduler})
    drafter = engine._decoder._drafter
    afresh, propose, compared = Afresh(drafter, model), drafter.propose, []

    def checked(sequences: Seq[Sequence], depths: Seq[int]) -> Any:
        trees = propose(sequences, depths)
        for sequence, depth, tree in zip(sequences, depths, trees, strict=True):
            assert tree == afresh.tree(sequence).within(depth)
            assert depth_of_last(tree.parents) == depth_of(tree.parents)
            compared.append(len(tree.tokens))
        return trees

    drafter.propose = checked
    generate(engine, requests({"temperature": 0.7}, count=5))
    assert engine.report().counters["accepted_draft_tokens"] > 0
    assert len(compared) > 20
    assert max(compared) == 14


def table(vocabulary: int, batch: int, seed: int = 0) -> Tensor:
    """Log-probabilities `[B, V, V]` of the next token after each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(2 * torch.randn(batch, vocabulary, vocabulary, generator=generator), -1)


def test_the_tree_holds_the_likeliest_branches() -> None:
    """With a beam as wide as the vocabulary nothing is cut before the end."""
    vocabulary, depth, count = 4, 3, 17
    chances = table(vocabulary, 2)
    tokens, parents = grow_tree(
        chances[:, 0], lambda chosen, _, level: chances.gather(1, chosen[..., None].expand(-1, -1, vocabulary)),
        vocabulary, depth, count,
    )  # fmt: skip
    for row in range(2):
        tree = DraftTree(tuple(tokens[row].tolist()), tuple(parents[row].tolist()))
        assert len(set(map(tree.branch, range(count)))) == count, "every guess is another one"
        assert max(tree.depths()) <= depth

        def chance(branch: tuple[int, ...], row: int = row) -> float:
            last, total = 0, 0.0
            for token in branch:
                total, last = total + float(chances[row, last, token]), token
            return total

        everything: list[tuple[int, ...]] = [(a,) for a in range(vocabulary)]
        everything += [(*branch, b) for branch in everything for b in range(vocabulary)]
        everything.sort(key=chance, reverse=True)
        best_two = [branch for branch in everything if len(branch) <= 2]
        held = {tree.branch(node) for node in range(count)}
        least = min(map(chance, held))
        assert all(branch in held for branch in best_two if chance(branch) > least + 1e-6)


def test_a_parent_comes_before_its_children_even_if_both_are_certain() -> None:
    certain = torch.full((1, 6, 6), float("-inf"))
    for token in range(6):
        certain[0, token, (token + 1) % 6] = 0.0
    tokens, parents = grow_tree(
        certain[:, 0], lambda chosen, _, level: certain.gather(1, chosen[..., None].expand(-1, -1, 6)), 3, 4, 4
    )
    tree = DraftTree(tuple(tokens[0].tolist()), tuple(parents[0].tolist()))
    assert tree.branch(3) == (1, 2, 3, 4)
    assert all(parent < node for node, parent in enumerate(tree.parents))
