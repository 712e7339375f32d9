"""Runs in the environment `autoawq`, imports only what is installed there; see `infermix.toolkit.isolated_worker`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

LIBRARIES = ("autoawq",)


def quantize(job: Any, model: Any) -> dict[str, Any]:
    from awq.models._config import AwqConfig
    from awq.models.auto import AWQ_CAUSAL_LM_MODEL_MAP
    from awq.quantize import quantizer as library

    library.tqdm = _with_progress(job)
    options = job.options
    config = {"zero_point": True, "q_group_size": options["group_size"], "w_bit": 4, "version": "gemm"}
    model.config.use_cache = False  # or the inputs that the library catches hold a cache, which grows with every use
    kind = AWQ_CAUSAL_LM_MODEL_MAP[model.config.model_type]
    wrapped = kind(model, model.config.model_type, False, model.config, AwqConfig.from_dict(config), None)
    wrapped.quantize(
        None,
        config,
        calib_data=job.samples,
        duo_scaling=options["duo_scaling"],
        apply_clip=options["clip"],
        n_parallel_calib_samples=options["parallel_samples"],
        max_calib_samples=len(job.samples),
        max_calib_seq_len=len(job.samples[0]),
        quantizer_cls=_quantizer_class(library.AwqQuantizer, options),
    )
    job.progress("save", 0.0)
    job.save(dict(wrapped.model.state_dict()))
    skipped = wrapped.quant_config.modules_to_not_convert
    return {
        "quant_method": "awq", "bits": 4, "group_size": options["group_size"], "zero_point": True, "version": "gemm",
        "modules_to_not_convert": skipped,
    }  # fmt: skip


def _quantizer_class(base: Any, options: dict[str, Any]) -> Any:
    class Quantizer(base):
        """The library's, with two things said differently."""

        def _compute_best_scale(
            self, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, *rest: Any, **more: Any
        ) -> Any:
            """On a CPU what the search puts aside are the live weights, which it then overwrites: hand it clones."""
            plain = module2inspect.state_dict
            if options["clone"]:
                module2inspect.state_dict = lambda: {name: value.clone() for name, value in plain().items()}
            try:
                return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *rest, **more)
            finally:
                module2inspect.__dict__.pop("state_dict", None)

        def _compute_best_clip(self, w: Any, input_feat: Any, *rest: Any, **more: Any) -> Any:
            return super()._compute_best_clip(
                w, input_feat, *rest, **{**more, "n_sample_token": options["clip_tokens"]}
            )

    return Quantizer


def _with_progress(job: Any) -> Any:
    """In the place of the library's progress bar."""

    def bar(items: Iterable[Any], desc: str = "") -> Iterator[Any]:
        known = list(items)
        for index, item in enumerate(known):
            job.progress("quantize", index / len(known))
            yield item

    return bar
