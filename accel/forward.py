"""The KV-cached forward of a Wan DiT, as functions over the host's own module.

Nothing here subclasses or patches the model: ``chunk_forward`` walks the submodules of a ``WanModel`` (so LoRA, offload and quantised weights keep working)
and puts the window where plain self-attention had only the chunk. Mathematics: design notes of LongLive 2.0, sections 3 and 4; upstream
``wan_5b/modules/causal_model.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .kv_cache import KVCache
from .rope import rope_tables, rotate
from .window import Placement

TEXT_ROWS = 512  # part of the model's contract: zero rows are attended to as well
NEEDED = ("patch_embedding", "text_embedding", "time_embedding", "time_projection", "blocks", "head", "unpatchify", "patch_size", "freq_dim", "dim")
WALKED = (*NEEDED, "rope_embedder")
NEEDED_IN_BLOCK = ("norm1", "norm2", "norm3", "modulation", "ffn")
NEEDED_IN_ATTENTION = ("q", "k", "v", "o", "norm_q", "norm_k", "num_heads")

Attention = Callable[..., Tensor]


def why_not_wan(dit: nn.Module) -> str | None:
    """None when ``dit`` has the submodules that ``chunk_forward`` walks, else what is missing."""
    missing = [name for name in NEEDED if not hasattr(dit, name)]
    if not missing:
        block = dit.blocks[0]
        missing = [f"blocks.0.{name}" for name in NEEDED_IN_BLOCK if not hasattr(block, name)]
        for part in ("self_attn", "cross_attn"):
            missing += [f"blocks.0.{part}.{name}" for name in NEEDED_IN_ATTENTION if not hasattr(getattr(block, part, None), name)]
    if missing:
        return f"{type(dit).__name__} lacks {', '.join(missing)}"
    if hasattr(dit.blocks[0].cross_attn, "k_img"):
        return f"{type(dit).__name__} is an image-to-video model with image cross-attention"
    takes, gives = dit.patch_embedding.weight.shape[1], dit.head.head.out_features // math.prod(dit.patch_size)
    if takes != gives:
        return f"it takes {takes} latent channels and gives {gives}, as image-to-video and control models do"
    unknown = [name for name, part in dit.named_children() if name not in WALKED and any(True for _ in part.parameters())]
    if unknown:
        return f"{type(dit).__name__} has parts that a KV-cached forward has no place for: {', '.join(unknown)}"
    return None


@dataclass
class Memo:
    """Values that several forwards of one sampling run share: text keys/values per prompt, modulation per timestep, RoPE per position. Freed with the run."""

    cross: dict[tuple[int, object], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    time: dict[tuple, tuple[Tensor, Tensor]] = field(default_factory=dict)
    rope: dict[tuple, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def keep_newest(self, store: dict, limit: int) -> None:
        while len(store) > limit:
            store.pop(next(iter(store)))


@dataclass(frozen=True)
class ChunkCall:
    """What the chunk loop wants of one forward.

    timesteps: one per latent frame, already truncated or not as the solver asks. query_times and key_times: RoPE time positions of the chunk's frames and,
    for relative RoPE only, of every slot (by slot number), else None. commit: the clean pass; only the keys and values matter.
    """

    timesteps: tuple[float, ...]
    placement: Placement
    query_times: tuple[float, ...]
    key_times: tuple[float, ...] | None
    commit: bool
    caches: dict[int, KVCache]
    memo: Memo
    chunk_frames: int
    sink_frames: int


def chunk_forward(
    dit: nn.Module,
    x: Tensor,
    context: Tensor,
    call: ChunkCall,
    *,
    branches: tuple[int, ...],
    prompts: tuple[object, ...],
    attention: Attention,
    transformer_options: dict,
) -> Tensor | None:
    """Run one chunk through the DiT against its window.

    x: (branches * B, C, f, H, W) noisy latents in the compute dtype. context: (branches * B, rows, text_dim); padded with zeros or cut to 512 rows.
    branches: which cache each part of the batch belongs to, in batch order. prompts: a hashable name of each part's prompt, for the text cache.
    attention: the host's ``attention(q, k, v, heads, transformer_options=...)`` over ``(B, N, heads * head_dim)``.
    Returns the flow like x, or None for a commit (which stops at the last layer's keys and values).
    """
    x_input = x
    frames, rows, columns = x.shape[2], x.shape[3] // dit.patch_size[1], x.shape[4] // dit.patch_size[2]
    frame_tokens = rows * columns
    x = dit.patch_embedding(x.float()).to(x.dtype)
    grid = x.shape[2:]
    x = x.flatten(2).transpose(1, 2).contiguous()  # (B, f * frame_tokens, D)

    head_dim = dit.dim // dit.blocks[0].self_attn.num_heads
    query_rope = _rope(call.memo, call.query_times, rows, columns, head_dim, x.device)
    key_rope = None
    if call.key_times is not None:
        key_rope = _rope(call.memo, call.key_times[: call.placement.filled], rows, columns, head_dim, x.device)
    e, e0 = _time(dit, call, x)

    options = transformer_options
    options["grid_sizes"] = grid
    options["total_blocks"] = len(dit.blocks)
    options["block_type"] = "double"
    tag = {
        "commit": call.commit,
        "frame_tokens": frame_tokens,
        "window": tuple(frame for _, frame in sorted(zip(call.placement.order, call.placement.frames, strict=True))),
        "chunk_frames": call.chunk_frames,
        "sink_frames": call.sink_frames,
    }
    text = _TextKeys(dit, context, branches, prompts, call)
    shared = _Shared(call, branches, frames, e0, text, query_rope, key_rope, attention, tag)
    patches = options.get("patches", {})
    replaced = options.get("patches_replace", {}).get("dit", {})
    shown = dit.text_embedding(_text_rows(context)) if replaced else None  # the blocks themselves keep to the text cache
    last = len(dit.blocks) - 1
    for layer, block in enumerate(dit.blocks):
        options["block_index"] = layer

        def run(x: Tensor, options: dict = options, layer: int = layer, block: nn.Module = block) -> Tensor:
            return _block(block, layer, x, shared, options, stop=call.commit and layer == last)

        if ("double_block", layer) in replaced and not (call.commit and layer == last):
            arguments = {"img": x, "txt": shown, "vec": e0, "pe": query_rope, "transformer_options": options}
            original = {"original_block": lambda args, run=run: {"img": run(args["img"], args["transformer_options"])}}
            x = replaced[("double_block", layer)](arguments, original)["img"]
        else:
            x = run(x)
        for patch in patches.get("double_block", ()) if x is not None else ():
            x = patch({"img": x, "x": x_input, "vec": e, "block_index": layer, "img_offset": 0, "transformer_options": options})["img"]
    if call.commit:
        return None
    return dit.unpatchify(dit.head(x, e), grid)


def _rope(memo: Memo, times: tuple[float, ...], rows: int, columns: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    key = (times, rows, columns, head_dim, device)
    if key not in memo.rope:
        memo.rope[key] = rope_tables(times, rows, columns, head_dim, device)
        memo.keep_newest(memo.rope, 4)
    return memo.rope[key]


def _time(dit: nn.Module, call: ChunkCall, x: Tensor) -> tuple[Tensor, Tensor]:
    """Time embedding ``(1, f or 1, D)`` and block modulation ``(1, f or 1, 6, D)``; one frame stands for all when the timesteps are equal."""
    timesteps = call.timesteps if len(set(call.timesteps)) > 1 else call.timesteps[:1]
    keep = not torch.is_grad_enabled()
    key = (timesteps, x.dtype, x.device)
    if keep and key in call.memo.time:
        return call.memo.time[key]
    half = dit.freq_dim // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.tensor(timesteps, dtype=torch.float64), frequency)
    sinusoid = torch.cat((angle.cos(), angle.sin()), dim=1).to(torch.float32).to(device=x.device, dtype=x.dtype)
    e = dit.time_embedding(sinusoid)
    e0 = dit.time_projection(e).unflatten(1, (6, dit.dim))
    result = e.unsqueeze(0), e0.unsqueeze(0)
    if keep:
        call.memo.time[key] = result
        call.memo.keep_newest(call.memo.time, 64)
    return result


def _text_rows(rows: Tensor) -> Tensor:
    rows = rows[:, :TEXT_ROWS]
    return nn.functional.pad(rows, (0, 0, 0, TEXT_ROWS - rows.shape[1])) if rows.shape[1] < TEXT_ROWS else rows


class _TextKeys:
    """Cross-attention keys and values of the chunk's prompts: computed once per prompt and branch, then reused by every forward."""

    def __init__(self, dit: nn.Module, context: Tensor, branches: tuple[int, ...], prompts: tuple[object, ...], call: ChunkCall) -> None:
        self.dit = dit
        self.parts: list[list[tuple[Tensor, Tensor]]] = []
        keep = not torch.is_grad_enabled()
        for branch, prompt, rows in zip(branches, prompts, context.chunk(len(branches)), strict=True):
            key = (branch, prompt)
            layers = call.memo.cross.get(key) if keep else None
            if layers is None:
                layers = self._project(rows)
                if keep:
                    # One prompt per branch: 189 MB each on the 5B.
                    for other in [k for k in call.memo.cross if k[0] == branch]:
                        del call.memo.cross[other]
                    call.memo.cross[key] = layers
            self.parts.append(layers)

    def _project(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        embedded = self.dit.text_embedding(_text_rows(rows))
        layers = []
        for block in self.dit.blocks:
            cross = block.cross_attn
            layers.append((cross.norm_k(cross.k(embedded)), cross.v(embedded)))
        return layers


@dataclass(frozen=True)
class _Shared:
    """What every layer of one forward works with."""

    call: ChunkCall
    branches: tuple[int, ...]
    frames: int
    e0: Tensor
    text: _TextKeys
    query_rope: tuple[Tensor, Tensor]
    key_rope: tuple[Tensor, Tensor] | None
    attention: Attention
    tag: dict


def _block(block: nn.Module, layer: int, x: Tensor, shared: _Shared, options: dict, stop: bool) -> Tensor | None:
    """One layer; None when ``stop`` ends the forward at its keys and values."""
    frames = shared.frames
    modulation = block.modulation.to(device=x.device, dtype=x.dtype).unsqueeze(0) + shared.e0
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = modulation.unsqueeze(3).unbind(2)  # each (1, f or 1, 1, D)

    options["longlive"] = {"kind": "self", "layer": layer, **shared.tag}
    attended = _self_attention(block.self_attn, layer, _modulated_norm(block.norm1, x, shift, scale, frames), shared, options, stop)
    if attended is None:
        return None
    x = _gated(x, attended, gate, frames)

    options["longlive"] = {"kind": "cross", "layer": layer, **shared.tag}
    x = x + _cross_attention(block.cross_attn, layer, block.norm3(x), shared, options)
    for patch in options.get("patches", {}).get("attn2_patch", ()):
        x = patch({"x": x, "transformer_options": options})
    return _gated(x, block.ffn(_modulated_norm(block.norm2, x, ffn_shift, ffn_scale, frames)), ffn_gate, frames)


def _modulated_norm(norm: nn.Module, x: Tensor, shift: Tensor, scale: Tensor, frames: int) -> Tensor:
    """``norm(x) * (1 + scale) + shift``, shift and scale (1, f or 1, 1, D). ``norm`` has no weights of its own."""
    if shift.shape[1] == 1:
        # All frames share one timestep, so the modulation is the norm's affine part: one kernel instead of two.
        return nn.functional.layer_norm(x, x.shape[-1:], 1 + scale.flatten(), shift.flatten(), norm.eps)
    return torch.addcmul(shift, norm(x).unflatten(1, (frames, -1)), 1 + scale).flatten(1, 2)


def _gated(x: Tensor, update: Tensor, gate: Tensor, frames: int) -> Tensor:
    return torch.addcmul(x.unflatten(1, (frames, -1)), update.unflatten(1, (frames, -1)), gate).flatten(1, 2)


def _self_attention(attn: nn.Module, layer: int, x: Tensor, shared: _Shared, options: dict, stop: bool) -> Tensor | None:
    call, branches, query_rope, key_rope = shared.call, shared.branches, shared.query_rope, shared.key_rope
    heads = attn.num_heads
    keys = attn.norm_k(attn.k(x))
    if key_rope is None:
        # Float32 until the copy into its slot rounds it: one pass less.
        keys = rotate(keys.unflatten(2, (heads, -1)), *query_rope, keep_float=True).flatten(2)
    values = attn.v(x)
    parts = len(branches)
    windows = []
    for branch, k, v in zip(branches, keys.chunk(parts), values.chunk(parts), strict=True):
        windows.append(_window(call.caches[branch], layer, k, v, call))
    if stop:
        return None
    queries = rotate(attn.norm_q(attn.q(x)).unflatten(2, (heads, -1)), *query_rope).flatten(2)
    patches = options.get("patches", {}).get("attn1_patch", ())
    out, attended = [], []
    for q, (k, v) in zip(queries.chunk(parts), windows, strict=True):
        if key_rope is not None:
            k = rotate(k.unflatten(2, (heads, -1)), *key_rope).flatten(2)
        # Only a cache in another number format than the model's makes a copy here.
        out.append(shared.attention(q, k.to(q.dtype), v.to(q.dtype), heads=heads, transformer_options=options))
        if patches:
            attended.append(k.to(q.dtype))
    x = out[0] if parts == 1 else torch.cat(out)
    for patch in patches:
        q, k = (t.unflatten(2, (heads, -1)) for t in (queries, torch.cat(attended)))
        x = patch({"x": x, "q": q, "k": k, "transformer_options": options})
    return attn.o(x)


def _window(cache: KVCache, layer: int, keys: Tensor, values: Tensor, call: ChunkCall) -> tuple[Tensor, Tensor]:
    """Put the chunk's keys and values into their slots and return the window's, ``(B, window tokens, D)``, without a copy.

    With gradients the cache is not the place to keep a graph: the past is taken from it, the chunk is joined to it, and only a detached copy is stored.
    """
    placement = call.placement
    if not (torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)):
        cache.write(layer, keys, values, placement)
        return cache.view(layer, placement.filled)
    tokens = cache.shape.frame_tokens
    with torch.no_grad():
        cache.write(layer, keys, values, placement)
        past_keys, past_values = (t.clone() for t in cache.view(layer, placement.filled))
    index = torch.cat([torch.arange(slot * tokens, (slot + n) * tokens) for _, slot, n in placement.runs()]).to(keys.device)
    source = slice(placement.first_written * tokens, None)
    return past_keys.index_copy(1, index, keys[:, source].to(past_keys.dtype)), past_values.index_copy(1, index, values[:, source].to(past_values.dtype))


def _cross_attention(attn: nn.Module, layer: int, x: Tensor, shared: _Shared, options: dict) -> Tensor:
    queries = attn.norm_q(attn.q(x))
    out = []
    for q, part in zip(queries.chunk(len(shared.branches)), shared.text.parts, strict=True):
        k, v = part[layer]
        out.append(shared.attention(q, k, v, heads=attn.num_heads, transformer_options=options))
    return attn.o(out[0] if len(out) == 1 else torch.cat(out))
