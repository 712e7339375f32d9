"""The joint: transformers' modeling code with our attention and KV store inside.

One attention function is registered under one name and left out of `AttentionMaskInterface`, so that
transformers builds no mask. The batch travels to it through a keyword of `model(...)`, so nothing is global.
A probe forward at construction learns what every layer hands over and refuses what would silently go wrong.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from infermix.engine.probe import AttentionCall, LayerProbe, layer_specs
from infermix.errors import Unsupported
from infermix.roles.families import check_family, is_causal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from infermix.engine.adapters.mla import LatentAttention
    from infermix.roles.attention import AttentionBackend, LayerSpec
    from infermix.roles.batch import Batch, GroupBatch
    from infermix.roles.kv_space import Eviction, KVGroup, LayerState
    from infermix.roles.kv_store import KVStore, Rotation

#: The name under which transformers knows our attention function.
ATTENTION_NAME = "infermix"


@dataclass(slots=True)
class ForwardContext:
    """What one forward carries to every attention call. `probe` is set in checked forwards only, `latent` where the
    model's attention stays compressed.

    `observe` is the store's, where it has one.
    """

    observe: Callable[[LayerSpec, Tensor, Batch, GroupBatch], None] | None = None
    batch: Batch | None = None
    attention: AttentionBackend | None = None
    store: KVStore | None = None
    layers: Mapping[int, LayerSpec] = field(default_factory=dict)
    probe: LayerProbe | None = None
    latent: LatentAttention | None = None


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """The registered function: `query [B, H, n, Dk]`, `key`, `value [B, Hkv, n, D]` -> `[B, n, H, Dv]`.

    B is 1 and n all tokens, but for models that need rectangles (`engine.adapters.recurrent`). A layer that leaves
    its position embedding to us hands it over as keyword `rotation`.
    """
    context: ForwardContext | None = given.pop("infermix", None)
    rotation: Rotation | None = given.pop("rotation", None)
    if context is None:
        raise Unsupported(f"{type(module).__name__} does not hand keyword arguments of the model to its attention")
    if context.latent is not None:
        query = context.latent.absorb(module, query)
    if context.probe is not None:
        context.probe.see(AttentionCall(module, query, key, value, attention_mask, given))
    if context.store is None:
        out = query.new_zeros(query.shape[0] * query.shape[2], query.shape[1], value.shape[3])
    else:
        out = _compute(context, module, (query, key, value), rotation)
    if context.latent is not None:
        out = context.latent.expand(module, out)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def _compute(
    context: ForwardContext, module: nn.Module, new: tuple[Tensor, Tensor, Tensor], rotation: Rotation | None
) -> Tensor:
    """Store what is new, then attend; `[T, H, Dv]`."""
    batch, store, attention = context.batch, context.store, context.attention
    assert batch is not None
    assert store is not None
    assert attention is not None
    layer = context.layers[module.layer_idx]  # type: ignore[index]
    group = batch.groups[layer.group]
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in new)
    owner = layer.layer_idx if layer.kv_from is None else layer.kv_from
    if rotation is not None:
        if layer.kv_from is not None:
            raise Unsupported(
                f"layer {layer.layer_idx} shares the keys of layer {owner} and leaves their rotation to us"
            )
        q = _rotate_and_write(store, rotation, owner, (q, k, v), batch, group)
    elif layer.kv_from is None or getattr(store, "forgets", False):
        store.write(owner, k, v, batch, group)
    if context.observe is not None:
        context.observe(layer, q, batch, group)
    view = store.view(owner, batch, group)
    return attention.forward(q, view, batch, layer)


def _rotate_and_write(
    store: KVStore,
    rotation: Rotation,
    layer_idx: int,
    new: tuple[Tensor, Tensor, Tensor],
    batch: Batch,
    group: GroupBatch,
) -> Tensor:
    """Rotated queries; in one go with the write where the store lays its pools open."""
    q, k, v = new
    pools = getattr(store, "pools", None)
    if pools is not None:
        return rotation.write(q, k, v, pools(layer_idx), group.slot_mapping)
    q, k = rotation.rotate(q, k)
    store.write(layer_idx, k, v, batch, group)
    return q


class Joint:
    """A loaded causal LM whose attention is ours.

    Construction runs one two-token forward without a store. Raises `Unsupported` when the model does not hand
    its attention over completely (see `engine.probe`), or when `groups` (what the cost model derived from the
    config) differs from what the modules really hand over. With `latent`, attention runs over compressed rows.
    `states` is what recurrent layers keep per sequence: nothing, in every model that this class drives. Where not
    `causal`, tokens see what is behind them too: a forward takes whole sequences.
    """

    states: tuple[LayerState, ...] = ()

    def __init__(
        self, model: Any, groups: tuple[KVGroup, ...] | None = None, *, latent: LatentAttention | None = None
    ) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.causal = is_causal(model.config.get_text_config(decoder=True).to_dict())
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._previous: str = model.config._attn_implementation
        self._context = ForwardContext(latent=latent)
        self._hidden: Tensor | None = None
        self._hook: Any = None
        self._refuse(model.config)
        _trust_no_padding(model)
        _register()
        self._use(ATTENTION_NAME)
        try:
            probe = self._probe()
            self._context.layers, self.groups = layer_specs(probe, groups, shared_values=latent is not None)
        except BaseException:
            self._use(self._previous)
            raise

    @property
    def model_type(self) -> str:
        return self.model.config.get_text_config(decoder=True).model_type

    @property
    def layers(self) -> Mapping[int, LayerSpec]:
        """What each attention layer asks for, by layer index."""
        return self._context.layers

    def attach(self, attention: AttentionBackend, store: KVStore, *, keep_hidden: bool = False) -> None:
        """Send every following `forward` through these parts; with `keep_hidden` as `keep_hidden()` says."""
        if keep_hidden:
            self.keep_hidden()
        self._context.attention, self._context.store = attention, store
        self._context.observe = getattr(store, "observe", None)
        self._use(ATTENTION_NAME)

    def detach(self) -> None:
        """Give the model its previous attention back; the store is let go."""
        self._context.attention = self._context.store = self._context.batch = self._context.observe = None
        self._use(self._previous)
        if self._hook is not None:
            self._hook.remove()
            self._hook = self._hidden = None

    def keep_hidden(self) -> None:
        """From now on, `take_hidden` gives what the head reads (until `detach`). Raises `Unsupported` without one."""
        body = getattr(self.model, self.model.base_model_prefix, None)
        if body is None or body is self.model:
            raise Unsupported(f"{type(self.model).__name__} has no body of its own whose hidden states could be read")
        if self._hook is None:
            self._hook = body.register_forward_hook(self._see_hidden)

    def take_hidden(self) -> Tensor | None:
        """`[T, D]` of the last forward: the body's output, after its last norm; `None` unless they are kept."""
        hidden, self._hidden = self._hidden, None
        return hidden

    def _see_hidden(self, module: Any, arguments: Any, output: Any) -> None:
        self._hidden = output[0].flatten(0, 1)

    def evict(self, evictions: list[Eviction]) -> None:
        """Let the attached store carry out what its space decided."""
        if evictions:
            store: Any = self._context.store
            store.evict(evictions)

    def forward(self, batch: Batch, *, checked: bool = False) -> Tensor:
        """Logits `[R, V]` of `batch.logits_rows`.

        Capturable: no host read, no branch on values. `checked` repeats the guards of the probe on this very
        batch and raises `Unsupported` when a layer hands over something else than it did at construction.
        """
        if self._context.store is None:
            raise Unsupported("the joint has no store: call attach first")
        self._context.batch = batch
        if not checked:
            return self._logits(batch.input_ids, batch.positions, batch.logits_rows)
        self._context.probe = LayerProbe(self.causal)
        try:
            logits = self._logits(batch.input_ids, batch.positions, batch.logits_rows)
            self._context.probe.require_same(self._context.layers)
        finally:
            self._context.probe = None
        return logits

    @property
    def has_sdpa(self) -> bool:
        """Whether transformers' own SDPA computes the same model; older releases let it drop softcap silently."""
        plain = all(layer.softcap is None and layer.sinks is None for layer in self.layers.values())
        return plain and bool(getattr(self.model, "_supports_sdpa", False))

    def reference(self, input_ids: Tensor, num_rows: int, implementation: str = "eager") -> Tensor:
        """Last `num_rows` logits of transformers' own full forward over one sequence `[T]`; detached only."""
        assert self._context.store is None
        extra = {"logits_to_keep": num_rows} if self._takes_rows else {}
        self._use(implementation)
        try:
            with torch.no_grad():
                return self.model(input_ids=input_ids[None], use_cache=False, **extra).logits[0, -num_rows:]
        finally:
            self._use(self._previous)

    def _logits(self, input_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        extra = {"logits_to_keep": rows} if self._takes_rows else {}
        with torch.no_grad():
            out = self.model(
                input_ids=input_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                infermix=self._context,
                **extra,
            )
            logits = out.logits[0]
            return logits if self._takes_rows else logits.index_select(0, rows)

    def _probe(self) -> LayerProbe:
        probe = self._context.probe = LayerProbe(self.causal)
        ids = torch.zeros(2, dtype=torch.int64, device=self.device)
        try:
            self._logits(ids, torch.arange(2, device=self.device), ids[:1])
        except TypeError as error:
            raise Unsupported(f"{type(self.model).__name__} cannot be driven by the joint: {error}") from error
        finally:
            self._context.probe = None
        config = self.model.config.get_text_config(decoder=True)
        probe.require_layers(int(config.num_hidden_layers), type(self.model).__name__)
        probe.require_windows(config.to_dict(), type(self.model).__name__)
        return probe

    def _refuse(self, config: Any) -> None:
        text = config.get_text_config(decoder=True)
        reason = check_family(text.model_type, text.to_dict())
        if reason:
            raise Unsupported(reason)

    def _use(self, name: str) -> None:
        if self._context.latent is not None:
            (self._context.latent.attach if name == ATTENTION_NAME else self._context.latent.detach)()
        if self.model.config._attn_implementation != name:
            self.model.set_attn_implementation(name)


def _trust_no_padding(model: Any) -> None:
    """Packed steps hold no padding; looking for it reads token ids on the host, in every forward of some families."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _no_warning


def _no_warning(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Instead of transformers' check for padding."""


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _opaque_attend())


@functools.cache
def _opaque_attend() -> Any:
    """`_attend` as a break in every compiled graph: what store and attention do is not traced.

    They write to memory behind the model's back and read the batch as a Python object; compiled layers run up to
    here, call it as it is, and go on. One object for the process, since compiled code guards on it.
    """
    return torch.compiler.disable(_attend, reason="store and attention run as they are")
