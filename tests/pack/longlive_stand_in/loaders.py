"""The three stand-in loaders. Their outputs are core's own MODEL, CLIP and VAE, so every node behind them is the real one."""

from __future__ import annotations

import importlib
import math
import re
import zlib
from pathlib import Path
from types import ModuleType

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.ops
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import ComfyExtension, io
from torch import Tensor, nn

import nodes

from . import weights

MODELS = ["LongLive 2.0", "LongLive 1.0"]
CHANNELS = {"LongLive 2.0": 48, "LongLive 1.0": 16}
PROMPT_TOKENS = 512
# Channels of the VAE's outermost level, where the released ones have 96 to 256: decoding costs its square.
WIDTH = 8


class StandInDiT(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LongLiveStandInDiT",
            display_name="Stand-in DiT",
            category="LongLive/tests",
            description="Writes a DiT of two layers with random weights in the published container form and loads it with Load LongLive DiT.",
            inputs=[
                io.Combo.Input("model", options=MODELS, tooltip="Which release's structure and file form to imitate."),
                io.Int.Input("seed", default=0, min=0, max=2**31, tooltip="Seed of the random weights (a plain number)."),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: str, seed: int) -> io.NodeOutput:
        folder = Path(folder_paths.get_folder_paths("diffusion_models")[0])
        folder.mkdir(parents=True, exist_ok=True)
        # The name says the release, as a published file's name does.
        path = folder / f"stand-in-{'longlive2' if model == 'LongLive 2.0' else 'longlive'}-{seed}.pt"
        if not path.is_file():
            state = weights.dit_state_dict(CHANNELS[model], seed)
            part = path.with_suffix(".part")
            torch.save({"generator": {f"model.{name}": value for name, value in state.items()}}, part)
            part.replace(path)
        patcher, _report = _longlive("loader").load_longlive(path, name=path.name)
        return io.NodeOutput(patcher)


def _longlive(module: str) -> ModuleType:
    """A module of nodes/. ComfyUI imports packages under names made from their paths, so the package is found through one of its nodes."""
    package = nodes.NODE_CLASS_MAPPINGS["LongLiveLoadDiT"].__module__.rpartition(".")[0]
    return importlib.import_module(f"{package}.{module}")


class StandInCLIP(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LongLiveStandInCLIP",
            display_name="Stand-in CLIP",
            category="LongLive/tests",
            description="A text encoder that looks each word up in a table made from a seed; the same words always give the same embedding.",
            inputs=[io.Int.Input("seed", default=0, min=0, max=2**31, tooltip="Seed of the table (a plain number).")],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(cls, seed: int) -> io.NodeOutput:
        return io.NodeOutput(build_clip(seed))


class StandInVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LongLiveStandInVAE",
            display_name="Stand-in VAE",
            category="LongLive/tests",
            description="Wan 2.2's or Wan 2.1's video VAE, a few channels wide, with random weights.",
            inputs=[
                io.Combo.Input("model", options=MODELS, tooltip="LongLive 2.0 uses the 48-channel Wan 2.2 VAE, LongLive 1.0 the 16-channel Wan 2.1 VAE."),
                io.Int.Input("seed", default=0, min=0, max=2**31, tooltip="Seed of the random weights (a plain number)."),
            ],
            outputs=[io.Vae.Output()],
        )

    @classmethod
    def execute(cls, model: str, seed: int) -> io.NodeOutput:
        return io.NodeOutput(build_vae(CHANNELS[model], seed))


class StandInExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [StandInDiT, StandInCLIP, StandInVAE]


class WordTokenizer:
    """Words and punctuation marks to numbers, without a vocabulary file."""

    def __init__(self, embedding_directory=None, tokenizer_data=None) -> None:
        pass

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **_: object) -> dict[str, list]:
        words = re.findall(r"\w+|[^\w\s]", text.lower())[: PROMPT_TOKENS - 1]
        numbers = [zlib.crc32(word.encode()) % WordEncoder.VOCABULARY for word in words] + [WordEncoder.END]
        return {"words": [[(number, 1.0) for number in numbers]]}

    def state_dict(self) -> dict:
        return {}


class WordEncoder(nn.Module):
    """Token numbers to (1, 512, 4096), zero behind the last token, as core's umT5 gives it."""

    VOCABULARY = 1021
    END = VOCABULARY

    def __init__(self, dtype=None, device=None, model_options=None) -> None:
        super().__init__()
        self.dtypes = {torch.float32}
        self.table = nn.Embedding(self.VOCABULARY + 1, 64)
        self.projection = nn.Linear(64, weights.TEXT_DIM, bias=False)

    def set_clip_options(self, options: dict) -> None:
        pass

    def reset_clip_options(self) -> None:
        pass

    def load_sd(self, state: dict[str, Tensor]):
        return self.load_state_dict(state, strict=False)

    def encode_token_weights(self, tokens: dict[str, list]) -> tuple[Tensor, None]:
        numbers = torch.tensor([number for number, _ in tokens["words"][0]], device=self.table.weight.device)
        position = torch.arange(len(numbers), device=numbers.device).unsqueeze(1) * 0.1 + torch.arange(64, device=numbers.device) * 0.7
        embedding = self.projection(self.table(numbers) + 0.3 * position.sin()) / math.sqrt(8)
        padded = embedding.new_zeros(1, PROMPT_TOKENS, weights.TEXT_DIM)
        padded[0, : len(numbers)] = embedding
        return padded.cpu(), None


class _Target:
    """What comfy.sd.CLIP wants to be told: the encoder class, the tokenizer class, the encoder's arguments."""

    clip = WordEncoder
    tokenizer = WordTokenizer
    params: dict = {}


def build_clip(seed: int) -> comfy.sd.CLIP:
    """A core CLIP whose embedding depends on nothing but the words and the seed."""
    generator = torch.Generator().manual_seed(seed)
    state = {
        "table.weight": torch.randn(WordEncoder.VOCABULARY + 1, 64, generator=generator),
        "projection.weight": torch.randn(weights.TEXT_DIM, 64, generator=generator) / 8,
    }
    return comfy.sd.CLIP(_Target, state_dict=[state], parameters=sum(value.numel() for value in state.values()), disable_dynamic=True)


def vae_state_dict(channels: int, seed: int) -> dict[str, Tensor]:
    """A file of Wan 2.2's (48 channels) or Wan 2.1's (16) structure, a few channels wide."""
    shape = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [], "temperal_downsample": [False, True, True], "dropout": 0.0}
    with torch.device("meta"):
        if channels == 48:
            module = comfy.ldm.wan.vae2_2.WanVAE(dim=WIDTH, dec_dim=WIDTH, z_dim=48, **shape)
        else:
            module = comfy.ldm.wan.vae.WanVAE(dim=WIDTH, z_dim=16, **shape)
    return weights.fill(module, seed)


def build_vae(channels: int, seed: int) -> comfy.sd.VAE:
    """A core VAE from such a file."""
    state = vae_state_dict(channels, seed)
    if channels == 16:
        # Core reads the widths of a Wan 2.1 file from its shapes.
        return comfy.sd.VAE(sd=state)
    return _longlive("vae_build").build_vae(state)
