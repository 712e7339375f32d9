"""Calibration: which text is drawn, and what a layer is fed with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from infermix.errors import Unsupported, UserError
from infermix.toolkit.calibration import CalibrationOptions, draw_calibration
from infermix.toolkit.conformance.quantizer import calibration_model
from infermix.toolkit.layerwise import decoder_layers, walk_layers

SAMPLES = torch.randint(0, 90, (3, 24), generator=torch.Generator().manual_seed(0)).tolist()


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def _draw(base: Path, **changes: object) -> object:
    given = {"corpus": "text.txt", "num_samples": 3, "sample_tokens": 8, "first_token": 10, **changes}
    options = CalibrationOptions(**given)  # type: ignore[arg-type]
    return draw_calibration(options, Letters(), vocab_size=300, max_tokens=64, base=base)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("".join(chr(33 + index % 90) for index in range(100)))
    return tmp_path


def test_windows_are_distinct_and_behind_the_first_token(base: Path) -> None:
    text = (base / "text.txt").read_text()
    data = _draw(base, num_samples=11)
    assert (
        data.samples
        == tuple(  # type: ignore[attr-defined]
            tuple(map(ord, text[start : start + 8])) for start in range(10, 98, 8)
        )
    )


def test_the_seed_draws_the_windows_and_the_digest_tells(base: Path) -> None:
    first, again, other = _draw(base), _draw(base), _draw(base, seed=1)
    assert first == again
    assert first.digest != other.digest  # type: ignore[attr-defined]
    assert first.facts["token_ids_sha256"] == first.digest  # type: ignore[attr-defined]


def test_a_short_corpus_says_how_much_there_is(base: Path) -> None:
    with pytest.raises(UserError, match=r"text.txt has 100 tokens: from token 10 on, 11 windows of 8 and not 12"):
        _draw(base, num_samples=12)


def test_samples_longer_than_the_model_are_refused(base: Path) -> None:
    with pytest.raises(UserError, match=r"samples of 65 tokens are longer than the 64 positions"):
        _draw(base, sample_tokens=65)


def test_without_a_tokenizer_ids_are_random_and_the_record_says_so(base: Path) -> None:
    data = draw_calibration(CalibrationOptions(num_samples=2), None, vocab_size=7, max_tokens=1024, base=base)
    assert max(map(max, data.samples)) < 7
    assert "random token ids" in data.facts["corpus"]


def test_a_missing_corpus_is_refused_when_planned(base: Path) -> None:
    from infermix.toolkit.calibration import CalibratedOptions

    with pytest.raises(UserError, match="no such corpus file"):
        CalibratedOptions(calibration=CalibrationOptions(corpus="none.txt")).check(base)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_layers_see_what_the_model_gives_them(family: str) -> None:
    """Replayed one by one, unchanged layers compute exactly the model's own hidden states."""
    model = calibration_model(family)
    seen: dict[int, list[torch.Tensor]] = {}
    for layer in walk_layers(model, SAMPLES):
        layer.run(seen.setdefault(layer.index, []).append)
    with torch.no_grad():
        expected = [_last_outputs(model, ids) for ids in SAMPLES]
    for index, outputs in seen.items():
        for sample, output in enumerate(outputs):
            torch.testing.assert_close(output, expected[sample][index], rtol=1e-5, atol=1e-5)


def test_a_changed_layer_feeds_the_next_one() -> None:
    model = calibration_model("llama")
    inputs = []
    for layer in walk_layers(model, SAMPLES[:1]):
        inputs.append(layer._hidden[0].clone())
        layer.module.mlp.down_proj.weight.data.zero_()
        layer.module.self_attn.o_proj.weight.data.zero_()
    torch.testing.assert_close(inputs[1], inputs[0])


def test_layers_are_left_as_they_were() -> None:
    model = calibration_model("llama")
    for _ in walk_layers(model, SAMPLES[:1]):
        pass
    assert all("forward" not in module.__dict__ for _, module in decoder_layers(model))
    assert not any(module._forward_hooks for module in model.modules())


def test_layers_that_need_more_than_the_one_before_are_refused() -> None:
    model = calibration_model("llama")
    stash: list[torch.Tensor] = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: stash.append(out.clone()))
    model.model.layers[1].register_forward_pre_hook(
        lambda module, args: (args[0] + 5 * stash.pop(), *args[1:]) if stash else None
    )
    with pytest.raises(Unsupported, match="replayed one by one"):
        next(iter(walk_layers(model, SAMPLES)))


def _last_outputs(model: torch.nn.Module, ids: list[int]) -> list[torch.Tensor]:
    outputs: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out))
        for _, module in decoder_layers(model)
    ]
    model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return outputs
