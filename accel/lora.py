"""LoRA adapters for a Wan DiT: names of every common trainer, the merge, and whether an adapter has been merged already.

Reads adapters only as far as they are plain LoRA (W + alpha / rank * B A); other kinds are left to ComfyUI's own LoRA loader and said so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import Checkpoint, container_notes, describe_contents, strip_wrappers
from .weight_file import Reader, WeightFileError, read_weight_file

# What trainers put before a layer's name, taken off again and again from the left.
_PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.", "generator_lora.", "generator.", "unet.", "model.", "module.")
# Trainers of the kohya family write a layer's dots as underscores behind one of these.
_FLAT_PREFIXES = ("lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_")
# The end of a name: which factor it is. The PEFT forms may carry the adapter's own name ("default").
_FACTOR = re.compile(
    r"^(?P<layer>.+?)(?:\.lora_(?P<peft>[AB])(?:\.\w+)??(?:\.weight)?|[._]lora(?:_linear_layer)?[._](?P<kohya>down|up)\.weight|\.(?P<alpha>alpha))$"
)
_OTHER_KINDS = ("dora_scale", "lora_magnitude_vector", "hada_w", "lokr_w", "lora_mid", "oft_blocks")

MAX_PROBED_LAYERS = 12


@dataclass(frozen=True)
class LoraLayer:
    """The factors of one linear: ``down`` (rank, in), ``up`` (out, rank), and the factor before their product."""

    down: Tensor
    up: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    def delta(self) -> Tensor:
        """Return what is added to the weight, (out, in) float32."""
        # The factor goes onto the thin matrix: scaling the product would be one more pass over the whole weight.
        return torch.mm(self.up.float(), self.down.float() * self.scale)


@dataclass(frozen=True)
class Adapter:
    """An adapter matched to a checkpoint; layers by the name of the weight they change."""

    path: Path
    layers: Mapping[str, LoraLayer]
    total: int  # tensors in the adapter
    unknown: tuple[str, ...]  # the names among them that fit no weight
    notes: Mapping[str, object]
    remarks: tuple[str, ...] = ()

    @property
    def matched(self) -> int:
        return self.total - len(self.unknown)

    def ranks(self) -> str:
        """Return "rank 128, factor 1" or the range where layers differ."""
        ranks = sorted({layer.rank for layer in self.layers.values()})
        scales = sorted({layer.scale for layer in self.layers.values()})
        rank = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        scale = f"{scales[0]:g}" if len(scales) == 1 else f"{scales[0]:g} to {scales[-1]:g}"
        return f"rank {rank}, factor alpha/rank {scale}"


@dataclass(frozen=True)
class MergeProbe:
    """How much of the adapter's change is already inside the weights.

    ``share`` is <W, D> / <D, D> over all probed layers, D = alpha / rank * B A: near 1 when merged, near 0 when not. ``noise`` is what a
    weight unrelated to the adapter would reach by chance (one standard deviation).
    """

    share: float
    noise: float
    layers: int

    @property
    def is_merged(self) -> bool:
        return self.share > 0.5 and self.share > 4 * self.noise

    @property
    def is_decisive(self) -> bool:
        return self.noise < 0.125


@dataclass(frozen=True)
class AdaptedWeights:
    """The weights of a checkpoint with an adapter, if any, merged into them as they are asked for."""

    checkpoint: Checkpoint
    adapter: Adapter | None = None

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return one weight in ``dtype`` (None: as stored), mapped from the file where nothing has to be changed about it."""
        weight = self.checkpoint.tensor(name)
        dtype = dtype or weight.dtype
        if self.adapter is not None and name in self.adapter.layers:
            return merge(weight, self.adapter.layers[name], dtype)
        return weight.to(dtype)


def read_adapter(path: str | Path, checkpoint: Checkpoint, *, safetensors_reader: Reader | None = None) -> Adapter:
    """Open an adapter and match its names to the weights of ``checkpoint``.

    Raises WeightFileError when it is no adapter, was made for other widths or more layers, or is half there. Names that fit nothing are kept in ``unknown``.
    """
    file = read_weight_file(path, safetensors_reader=safetensors_reader)
    notes = {**file.metadata, **container_notes(file.content)}
    content, remarks = file.content, []
    nested = next((key for key in ("generator_lora", "state_dict", "lora") if isinstance(content.get(key), Mapping)), None)
    if nested:
        content = content[nested]
    if isinstance(file.content.get("critic_lora"), Mapping):
        remarks.append("the adapter of the training critic in the file (critic_lora) is not used")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    groups, unknown = _group(tensors, checkpoint)
    if not groups:
        _refuse_no_match(file.path, list(tensors), list(unknown), checkpoint, content)
    _refuse_other_kinds(file.path, list(tensors))
    _refuse_more_layers(file.path, unknown, checkpoint)
    layers = _layers(file.path, groups, notes, checkpoint)
    return Adapter(file.path, layers, len(tensors), tuple(unknown), notes, tuple(remarks))


def merge(weight: Tensor, layer: LoraLayer, dtype: torch.dtype) -> Tensor:
    """Return weight + delta, summed in float32 and rounded once to ``dtype``."""
    return layer.delta().add_(weight).to(dtype)


def probe_merge(checkpoint: Checkpoint, adapter: Adapter, *, max_layers: int = MAX_PROBED_LAYERS) -> MergeProbe:
    """Project the adapter's change on the weights, over up to ``max_layers`` layers spread over the model."""
    names = [name for name in adapter.layers if name in checkpoint.names]
    names = [names[index * len(names) // max_layers] for index in range(max_layers)] if len(names) > max_layers else names
    along = square = variance = 0.0
    for name in names:
        layer, weight = adapter.layers[name], checkpoint.tensor(name).float()
        up, down = layer.up.float(), layer.down.float()
        # <W, BA> = <B^T W, A> and |BA|^2 = <B^T B, A A^T>: the product itself is never formed.
        along += layer.scale * torch.sum(torch.mm(up.T, weight) * down).item()
        norm = layer.scale**2 * torch.sum(torch.mm(up.T, up) * torch.mm(down, down.T)).item()
        square += norm
        # One value in some hundred is enough to know how large the weight is.
        variance += weight.flatten()[:: max(1, weight.numel() // 65536)].square().mean().item() * norm
    if square <= 0:
        return MergeProbe(0.0, float("inf"), len(names))
    return MergeProbe(along / square, variance**0.5 / square, len(names))


def refuse_double_merge(checkpoint: Checkpoint, adapter: Adapter) -> str:
    """Raise when the adapter is inside the weights already; otherwise return the sentence that says how that was found out."""
    if checkpoint.is_merged:
        source = checkpoint.notes.get("source_lora_ckpt")
        raise WeightFileError(
            f"{checkpoint.path.name} says that a LoRA has been merged into it already{f' ({source})' if source else ''}, so {adapter.path.name} must not be "
            "merged again. Set the adapter to none; for a different LoRA on top, use ComfyUI's LoraLoaderModelOnly behind this node"
        )
    probe = probe_merge(checkpoint, adapter)
    if probe.is_merged:
        raise WeightFileError(
            f"{adapter.path.name} is already merged into {checkpoint.path.name}: its change, projected on the weights of {probe.layers} layers, is there "
            f"{probe.share:.2f} times (0 = not merged, 1 = merged). Set the adapter to none, or pick the base model without the adapter"
        )
    if not probe.is_decisive:
        return f"whether the adapter is merged already cannot be told (it is too weak: share {probe.share:.2f}, noise {probe.noise:.2f}); it was merged"
    return f"the adapter was not in the weights before (share {probe.share:.2f} of its change in {probe.layers} layers; 1 would mean merged)"


def core_lora_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """Return the adapter under the names that ComfyUI's LoraLoaderModelOnly maps, each layer with its alpha."""
    tensors = {}
    for name, layer in adapter.layers.items():
        base = f"diffusion_model.{name.removesuffix('.weight')}"
        tensors[f"{base}.lora_A.weight"] = layer.down
        tensors[f"{base}.lora_B.weight"] = layer.up
        tensors[f"{base}.alpha"] = torch.tensor(layer.scale * layer.rank, dtype=torch.float32)
    return tensors


def _group(tensors: Mapping[str, Tensor], checkpoint: Checkpoint) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Sort the tensors by the weight they belong to; the rest are unknown names."""
    targets = {name.removesuffix(".weight"): name for name in checkpoint.names if name.endswith(".weight") and len(checkpoint.spec(name)[0]) == 2}
    flat = {layer.replace(".", "_"): name for layer, name in targets.items()}
    groups: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for name, value in tensors.items():
        match = _FACTOR.match(strip_wrappers(name))
        target = match and _target(match["layer"], targets, flat)
        if target is None:
            unknown.append(name)
            continue
        part = "alpha" if match["alpha"] else "down" if match["peft"] == "A" or match["kohya"] == "down" else "up"
        groups.setdefault(target, {})[part] = value
    return groups, unknown


def _target(layer: str, targets: Mapping[str, str], flat: Mapping[str, str]) -> str | None:
    for prefix in _FLAT_PREFIXES:
        if layer.startswith(prefix):
            return flat.get(layer[len(prefix) :])
    while layer not in targets:
        prefix = next((prefix for prefix in _PREFIXES if layer.startswith(prefix)), None)
        if prefix is None:
            return None
        layer = layer[len(prefix) :]
    return targets[layer]


def _layers(path: Path, groups: Mapping[str, dict[str, Tensor]], notes: Mapping, checkpoint: Checkpoint) -> dict[str, LoraLayer]:
    default_alpha = next((float(notes[key]) for key in _ALPHA_NOTES if _is_number(notes.get(key))), None)
    layers = {}
    for name, parts in groups.items():
        if "down" not in parts or "up" not in parts:
            there = "lora_A / lora_down" if "down" in parts else "lora_B / lora_up" if "up" in parts else "alpha"
            raise WeightFileError(f"{path.name} is incomplete: for {name} only {there} is there; download it again")
        down, up = parts["down"], parts["up"]
        rows, columns = checkpoint.spec(name)[0]
        if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1]:
            raise WeightFileError(f"{path.name} is damaged: the factors of {name}, {tuple(up.shape)} and {tuple(down.shape)}, do not multiply")
        if (up.shape[0], down.shape[1]) != (rows, columns):
            raise WeightFileError(
                f"{path.name} does not fit {checkpoint.path.name}: for {name} it changes a weight of {up.shape[0]} x {down.shape[1]}, and the model's is "
                f"{rows} x {columns} (width {checkpoint.shape.dim}). LongLive 1.0's adapter has width 1536, 2.0's 3072; pick the model's own adapter"
            )
        rank = down.shape[0]
        alpha = float(parts["alpha"]) if "alpha" in parts else default_alpha if default_alpha is not None else float(rank)
        layers[name] = LoraLayer(down, up, alpha / rank)
    return layers


# Where a file without per-layer alphas may state one; without any, alpha = rank, as in both releases.
_ALPHA_NOTES = ("lora_alpha", "alpha", "adapter.alpha", "adapter.lora_alpha", "lora_config.lora_alpha", "lora_config.alpha", "ss_network_alpha")


def _is_number(value: object) -> bool:
    try:
        return value is not None and not isinstance(value, bool) and float(value) > 0
    except (TypeError, ValueError):
        return False


def _refuse_other_kinds(path: Path, names: list[str]) -> None:
    """Half of a DoRA or LoKr is worse than none of it."""
    found = next((kind for kind in _OTHER_KINDS if any(kind in name for name in names)), None)
    if found:
        raise WeightFileError(
            f"{path.name} is more than a plain LoRA (it has {found} tensors), which this node does not merge; set the adapter to none and put ComfyUI's "
            "LoraLoaderModelOnly behind this node"
        )


def _refuse_more_layers(path: Path, unknown: list[str], checkpoint: Checkpoint) -> None:
    layers = [int(number) for name in unknown for number in re.findall(r"(?<![A-Za-z])blocks[._](\d+)[._]", name)]
    if layers and max(layers) >= checkpoint.shape.num_layers:
        raise WeightFileError(
            f"{path.name} was made for a model of at least {max(layers) + 1} layers, and {checkpoint.path.name} has {checkpoint.shape.num_layers}; "
            "pick the model's own adapter"
        )


def _refuse_no_match(path: Path, names: list[str], unknown: list[str], checkpoint: Checkpoint, content: Mapping) -> None:
    if any(isinstance(content.get(key), Mapping) for key in ("generator", "generator_ema", "model")) or any("patch_embedding" in name for name in names):
        raise WeightFileError(f"{path.name} was picked as the adapter and is a whole DiT; pick it as the DiT and set the adapter to none")
    found = describe_contents(names)
    _refuse_other_kinds(path, names)
    if "LoRA" not in found:
        raise WeightFileError(f"{path.name} was picked as the adapter and is {found}; pick a LoRA for {checkpoint.path.name}")
    raise WeightFileError(
        f"{path.name}: none of its {len(names)} names fits a weight of {checkpoint.path.name} (the first is {unknown[0]}); expected names such as "
        f"base_model.model.blocks.0.self_attn.q.lora_A.weight, with or without the prefixes {', '.join(_PREFIXES[:4] + _FLAT_PREFIXES[1:2])}"
    )
