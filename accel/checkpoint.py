"""A LongLive DiT on disk: which container it is, its tensors under the names ComfyUI's Wan model uses, whether they are all there.

Reads every published form (``.pt`` containers, safetensors, packed NVFP4) and hands out one tensor at a time. The file itself is weight_file.py's,
packed weights are nvfp4.py's, adapters lora.py's, the choice of a recipe recipe.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .nvfp4 import DIVISORS, SUFFIXES, PackedWeight, packed_weight
from .weight_file import Reader, WeightFileError, read_weight_file

MERGED_FORMATS = ("longlive_generator_merged_lora",)
TE_FORMAT = "longlive_generator_te_nvfp4"
WEIGHT_SETS = ("auto", "generator", "generator_ema")

# What training wrappers put into names, wherever they occur.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
_TEXT_DIM, _FREQ_DIM, _HEAD_DIM = 4096, 256, 128
# Tensors that mark a file quantised in ComfyUI's own formats; the host decodes those itself.
_HOST_QUANT_SUFFIXES = ("comfy_quant", "scaled_fp8", ".scale_weight", ".scale_input", ".weight_scale", ".weight_scale_2", ".input_scale")


@dataclass(frozen=True)
class DitShape:
    """The widths of a Wan DiT; everything else about it is fixed."""

    dim: int
    ffn_dim: int
    num_layers: int
    in_channels: int
    out_channels: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor of the state dict by name, with its shape: 27 a layer and 15 more."""
        d, ffn = self.dim, self.ffn_dim
        shapes = {"patch_embedding.weight": (d, self.in_channels, 1, 2, 2), "patch_embedding.bias": (d,), "head.modulation": (1, 2, d)}
        linears = {
            "text_embedding.0": (d, _TEXT_DIM),
            "text_embedding.2": (d, d),
            "time_embedding.0": (d, _FREQ_DIM),
            "time_embedding.2": (d, d),
            "time_projection.1": (6 * d, d),
            "head.head": (4 * self.out_channels, d),
        }
        for layer in range(self.num_layers):
            block = f"blocks.{layer}"
            shapes[f"{block}.modulation"] = (1, 6, d)
            for attention in ("self_attn", "cross_attn"):
                linears |= {f"{block}.{attention}.{name}": (d, d) for name in "qkvo"}
                shapes |= {f"{block}.{attention}.{name}.weight": (d,) for name in ("norm_q", "norm_k")}
            shapes |= {f"{block}.norm3.weight": (d,), f"{block}.norm3.bias": (d,)}
            linears |= {f"{block}.ffn.0": (ffn, d), f"{block}.ffn.2": (d, ffn)}
        for name, (rows, columns) in linears.items():
            shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
        return shapes


@dataclass(frozen=True)
class Checkpoint:
    """A whole DiT, still on disk. Names are those of ComfyUI's ``WanModel``, which are Wan's own."""

    path: Path
    container: str  # "generator", "state dict", ...: where in the file the DiT was
    notes: Mapping[str, object]  # what the container says about itself
    shape: DitShape
    plain: Mapping[str, Tensor]
    packed: Mapping[str, PackedWeight] = field(default_factory=dict)  # by the name of the weight they stand for
    unexpected: tuple[str, ...] = ()
    is_host_quantized: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [*self.plain, *self.packed]

    @property
    def is_merged(self) -> bool:
        """Whether the container says that an adapter has been merged into it."""
        return self.notes.get("checkpoint_format") in MERGED_FORMATS or str(self.notes.get("merged_lora", "")).lower() in ("true", "1")

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype most of the weights have on disk; bfloat16 for packed ones, which is what they decode to."""
        if self.packed:
            return torch.bfloat16
        return self.plain["blocks.0.self_attn.q.weight"].dtype

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of ``tensor(name)`` without reading it."""
        if name in self.packed:
            return self.packed[name].shape, torch.bfloat16
        return tuple(self.plain[name].shape), self.plain[name].dtype

    def tensor(self, name: str) -> Tensor:
        """Return one tensor: mapped from the file, or decoded to bfloat16 where it is packed."""
        if name in self.packed:
            return self.packed[name].decode(torch.bfloat16)
        return self.plain[name]


def read_checkpoint(path: str | Path, *, weights: str = "auto", safetensors_reader: Reader | None = None) -> Checkpoint:
    """Open the DiT in ``path``.

    ``weights`` picks between the two sets of a training container: ``generator``, ``generator_ema``, or ``auto`` (generator, else generator_ema). Raises
    WeightFileError when the file is not a whole text-to-video Wan DiT.
    """
    if weights not in WEIGHT_SETS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHT_SETS)}, got {weights!r}")
    file = read_weight_file(path, safetensors_reader=safetensors_reader)
    notes = {**file.metadata, **container_notes(file.content)}
    if notes.get("checkpoint_format") == TE_FORMAT:
        raise WeightFileError(
            f"{file.path.name} holds TransformerEngine's own module state ({TE_FORMAT}), which only TransformerEngine can read (upstream refuses it too); "
            "use model_te.pt (plain BF16 in spite of its name) or model_4o6.pt of the same repository"
        )
    state, container = _unwrap(file.path, file.content, weights)
    tensors, strangers = _core_names(file.path, state)
    remarks = []
    packed, tensors = _take_packed(file.path, tensors, notes, remarks)
    quant_marks = [name for name in tensors if name.endswith(_HOST_QUANT_SUFFIXES)]
    shape = _read_shape(file.path, tensors, packed)
    expected = shape.tensors()
    _check_complete(file.path, expected, tensors, packed, check_shapes=not quant_marks)
    unexpected = [name for name in tensors if name not in expected and name not in quant_marks] + strangers
    if not quant_marks:
        tensors = {name: tensors[name] for name in expected if name in tensors}
    if container in ("generator_ema",):
        remarks.append("the averaged weights (generator_ema) of the container are used")
    return Checkpoint(
        path=file.path,
        container=container,
        notes=notes,
        shape=shape,
        plain=tensors,
        packed=packed,
        unexpected=tuple(unexpected),
        is_host_quantized=bool(quant_marks),
        remarks=tuple(remarks),
    )


def container_notes(content: Mapping) -> dict[str, object]:
    """Return what a container says about itself: its plain values, those of nested dictionaries under ``outer.inner``."""
    notes: dict[str, object] = {}
    for key, value in content.items():
        if isinstance(value, (str, int, float, bool)):
            notes[str(key)] = value
        elif isinstance(value, Mapping):
            notes |= {f"{key}.{name}": item for name, item in value.items() if isinstance(item, (str, int, float, bool))}
    return notes


def strip_wrappers(name: str) -> str:
    """Remove what training wrappers put into a parameter's name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def is_lora_name(name: str) -> bool:
    return any(mark in name for mark in ("lora_A", "lora_B", "lora_down", "lora_up", "lora.down", "lora.up"))


def describe_contents(names: list[str]) -> str:
    """Say in words what a state dict that is no Wan DiT seems to be."""
    found = set(names)
    joined = "\n".join(names)
    if any(is_lora_name(name) for name in names):
        return "a LoRA adapter"
    if "token_embedding.weight" in found or "shared.weight" in found or "encoder.block.0" in joined or "text_model." in joined:
        return "a text encoder"
    if "decoder." in joined and ("encoder." in joined or "conv2.weight" in found):
        return "a VAE"
    if any(mark in joined for mark in ("transformer_blocks.", "double_blocks.", "joint_blocks.", "input_blocks.")):
        return "a diffusion model of another architecture"
    sample = ", ".join(names[:3]) or "nothing"
    return f"no model this node knows (its first tensors are {sample})"


def _unwrap(path: Path, content: Mapping, weights: str) -> tuple[Mapping, str]:
    """Find the state dict in a container (upstream utils/nvfp4_checkpoint.py, unwrap_generator_state_dict)."""
    sets = [key for key in ("generator", "generator_ema") if isinstance(content.get(key), Mapping)]
    if sets:
        chosen = weights if weights in sets else sets[0]
        if weights not in ("auto", chosen):
            raise WeightFileError(f"{path.name} was asked for {weights} and holds {', '.join(sets)}; choose that, or auto")
        return content[chosen], chosen
    if weights != "auto":
        raise WeightFileError(f"{path.name} was asked for {weights}, but it is no training container with that entry; choose auto")
    for key in ("model", "state_dict"):
        if isinstance(content.get(key), Mapping):
            return content[key], key
    if isinstance(content.get("generator_lora"), Mapping):
        raise WeightFileError(f"{path.name} holds a LoRA adapter (generator_lora), not a DiT; pick the base model here and this file as the adapter")
    return content, "state dict"


def _core_names(path: Path, state: Mapping) -> tuple[dict[str, Tensor], list[str]]:
    """Return (tensors under their bare names, names of tensors outside the DiT). The DiT is found by its patch embedding, whatever stands before it."""
    tensors = {strip_wrappers(str(name)): value for name, value in state.items() if isinstance(value, Tensor)}
    anchor = "patch_embedding.weight"
    roots = sorted((name[: -len(anchor)] for name in tensors if name == anchor or name.endswith("." + anchor)), key=len)
    if not roots or not any(_is_dit_root(tensors, root) for root in roots):
        found = describe_contents(list(tensors))
        hint = "; pick it as the adapter, with its base model here" if "LoRA" in found else "; pick a LongLive (Wan) DiT from the diffusion_models folder"
        raise WeightFileError(f"{path.name} was picked as the DiT and is {found}{hint}")
    root = next(root for root in roots if _is_dit_root(tensors, root))
    inside = {name[len(root) :]: value for name, value in tensors.items() if name.startswith(root)}
    return inside, [name for name in tensors if not name.startswith(root)]


def _is_dit_root(tensors: Mapping[str, Tensor], root: str) -> bool:
    return f"{root}head.modulation" in tensors and f"{root}head.head.weight" in tensors


def _take_packed(
    path: Path, tensors: dict[str, Tensor], notes: Mapping, remarks: list[str]
) -> tuple[dict[str, PackedWeight], dict[str, Tensor]]:
    """Split off packed NVFP4 weights; each stands for one ``.weight``."""
    groups: dict[str, dict[str, Tensor]] = {}
    plain = {}
    for name, value in tensors.items():
        layer, _, last = name.rpartition(".")
        if last in SUFFIXES:
            groups.setdefault(layer, {})[last] = value
        else:
            plain[name] = value
    if not groups:
        return {}, plain
    version = notes.get("checkpoint_version", 1)
    if version != 1:
        raise WeightFileError(f"{path.name} has packed weights of version {version}; version 1 is known, a newer release of this package may read it")
    rule = notes.get("quantization.weight_scale_rule") or notes.get("quantization.scale_rule")
    if rule is None:
        rule = "mse"
        remarks.append("the file does not name its scale rule; mse is assumed, which the released packed files use")
    if rule not in DIVISORS:
        raise WeightFileError(f"{path.name} uses the scale rule {rule!r} for its packed weights; known are {', '.join(DIVISORS)}")
    remarks.append(f"{len(groups)} packed NVFP4 weights (rule {rule}) are decoded to bfloat16")
    try:
        return {f"{layer}.weight": packed_weight(layer, group, str(rule)) for layer, group in groups.items()}, plain
    except ValueError as error:
        raise WeightFileError(f"{path.name}: {error}") from error


def _read_shape(path: Path, tensors: Mapping[str, Tensor], packed: Mapping[str, PackedWeight]) -> DitShape:
    """Read the widths from the tensors that show them, and refuse models that only look alike."""
    family = {"img_emb.": "an image-to-video", "vace_": "a VACE", "control_adapter.": "a camera control", "audio_proj.": "an audio-driven"}
    for mark, what in family.items():
        if any(name.startswith(mark) for name in tensors):
            raise WeightFileError(f"{path.name} is {what} Wan model ({mark}… is in it), not a LongLive one; use ComfyUI's Load Diffusion Model for it")
    patch, head = tuple(tensors["patch_embedding.weight"].shape), tuple(tensors["head.head.weight"].shape)
    layers = [int(name.split(".")[1]) for name in [*tensors, *packed] if name.startswith("blocks.") and name.split(".")[1].isdigit()]
    ffn = "blocks.0.ffn.0.weight"
    ffn_shape = packed[ffn].shape if ffn in packed else tuple(tensors[ffn].shape) if ffn in tensors else None
    if len(patch) != 5 or patch[2:] != (1, 2, 2) or len(head) != 2 or head[0] % 4 or patch[0] % _HEAD_DIM or not layers:
        raise WeightFileError(
            f"{path.name} is no Wan DiT: patch embedding {patch}, head {head}; expected (dim, channels, 1, 2, 2) and (4 x channels, dim), "
            f"with dim a multiple of {_HEAD_DIM}; pick a LongLive DiT"
        )
    if ffn_shape is None:
        hint = " (its names are those of the diffusers library; use the file in Wan's own names)" if "condition_embedder.time_proj.weight" in tensors else ""
        raise WeightFileError(f"{path.name} is incomplete: {ffn} is missing{hint}; download it again")
    return DitShape(dim=patch[0], ffn_dim=ffn_shape[0], num_layers=max(layers) + 1, in_channels=patch[1], out_channels=head[0] // 4)


def _check_complete(
    path: Path,
    expected: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
    packed: Mapping[str, PackedWeight],
    *,
    check_shapes: bool,
) -> None:
    missing = [name for name in expected if name not in tensors and name not in packed]
    if missing:
        layers = sorted({int(name.split(".")[1]) for name in missing if name.startswith("blocks.")})
        where = f", in the layers {', '.join(map(str, layers))}" if layers else ""
        raise WeightFileError(
            f"{path.name} is incomplete: {len(missing)} of {len(expected)} tensors are missing{where} (the first is {missing[0]}); download or export it again"
        )
    if not check_shapes:
        return
    for name, shape in expected.items():
        found = packed[name].shape if name in packed else tuple(tensors[name].shape)
        if found != shape:
            raise WeightFileError(f"{path.name}: {name} has the shape {found}, and the widths of the rest ask for {shape}; the file is damaged or mixed")
        if name in tensors and not tensors[name].is_floating_point():
            raise WeightFileError(f"{path.name}: {name} is stored as {tensors[name].dtype}, expected a floating-point type; the file is of another format")
