"""The Chunked Sampler node: widgets → recipe and options, one call into ``sampling``, results out."""

from __future__ import annotations

import time

import torch
from comfy_api.latest import io, ui
from comfy_execution.graph import ExecutionBlocker

from ..accel.config import Recipe
from ..accel.sampler import LoopOptions
from .choices import refuse_unknown, unknown_choice
from .node_text import show_text
from .sampling import SamplingResult, sample_video
from .sampling_job import PARK_MODES, SamplingRequest, recipe_of, with_overrides

STATE_TYPE = io.Custom("LONGLIVE_STATE")
AUTO_ON_OFF = ("auto", "on", "off")
KV_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NOISE_ORDERS = ("per chunk", "upstream")


def _switch(value: str) -> bool | None:
    return {"auto": None, "on": True, "off": False}[value]


def _choices(keep_state: str, shot_pinning: str, recache_on_switch: str, kv_dtype: str, noise_order: str) -> tuple:
    return (
        ("keep_state", keep_state, PARK_MODES),
        ("shot_pinning", shot_pinning, AUTO_ON_OFF),
        ("recache_on_switch", recache_on_switch, AUTO_ON_OFF),
        ("kv_dtype", kv_dtype, tuple(KV_DTYPES)),
        ("noise_order", noise_order, NOISE_ORDERS),
    )


def summary(result: SamplingResult, recipe: Recipe, seconds: float) -> str:
    """What ran and how long it took, for the node and the log."""
    report = result.report
    cache = report["kv_cache"]
    lines = [
        f"{report['recipe']}: {report['chunks']} chunks of {report['chunk_frames']} latent frames, {report['steps']} steps (shift {report['shift']:g}), "
        f"CFG {report['cfg']:g}, seed {report['seed']}",
        f"sampled in {seconds:.1f} s, {seconds / report['chunks']:.2f} s a chunk, loading of weights included",
        f"window {report['window_frames']} latent frames, sink {report['sink_frames']}, KV cache {cache['bytes'] / 1e9:.2f} GB {cache['dtype']}",
    ]
    if report["cuts"]:
        pinned = "pinned" if recipe.shot_pin else "not pinned"
        lines.append(f"cuts at chunk {', '.join(map(str, report['cuts']))} ({pinned}, RoPE offset {recipe.shot_rope_offset:g} latent frames each)")
    if report["switches"]:
        cached = "re-cached" if recipe.recache_on_switch else "not re-cached"
        lines.append(f"prompt switches at chunk {', '.join(map(str, report['switches']))} ({cached})")
    if result.state is not None:
        kind = "exact" if result.state.is_exact else "light"
        lines.append(f"state: {kind}, {result.state.num_frames} latent frames, {result.state.num_bytes / 1e6:.1f} MB on the host")
    lines += [f"note: {note}" for note in report["notes"]]
    if report["attention"] is None:
        lines.append("attention: ComfyUI's own (no Attention Accelerator on this MODEL)")
    return "\n".join(lines)


class LongLiveChunkedSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LongLiveChunkedSampler",
            display_name="Chunked Sampler",
            category="LongLive",
            description="Samples a LongLive video chunk by chunk with a KV cache: each chunk sees the first frames, the newest ones and itself.",
            search_aliases=["longlive sampler", "autoregressive video", "long video", "kv cache sampler"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="The LongLive model: Load LongLive DiT, or core's loader with converted files; LoRAs and Attention Accelerator go before."
                ),
                io.Conditioning.Input("positive", tooltip="What the video shows: CLIP Text Encode for one prompt, Prompt Timeline for several."),
                io.Latent.Input(
                    "latent", tooltip="Size and length of the new part: Empty LongLive Latent, or core's Wan22ImageToVideoLatent with a start image."
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="Seed of the noise. Chunk n gets the same noise whatever the video's length.",
                ),
                io.Int.Input(
                    "steps", default=0, min=0, max=100, tooltip="Denoising steps per chunk; 0 takes the model's own (4, or 2 for a 2-step checkpoint)."
                ),
                io.Float.Input(
                    "cfg",
                    default=1.0,
                    min=0.0,
                    max=20.0,
                    step=0.1,
                    round=0.01,
                    tooltip="Guidance scale. 1 = off, as LongLive was distilled; any other value needs a negative prompt and doubles time and KV cache.",
                ),
                io.Combo.Input(
                    "keep_state",
                    options=list(PARK_MODES),
                    default="light",
                    tooltip="What the state output holds, to continue later. light: the latents; keys and values are rebuilt (not bit-equal). "
                    "exact: also keys and values, in host memory (10.4 GB for the 5B), bit-equal. none: no state.",
                ),
                io.Float.Input(
                    "shift",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    advanced=True,
                    tooltip="Timestep shift of the flow; 0 takes the model's own (5).",
                ),
                io.Int.Input(
                    "chunk", default=0, min=0, max=256, advanced=True, tooltip="Latent frames denoised together; 0 takes the model's own (8 in 2.0, 3 in 1.0)."
                ),
                io.Int.Input(
                    "window",
                    default=0,
                    min=0,
                    max=4096,
                    advanced=True,
                    tooltip="Latent frames whose keys and values are held, sink and current chunk included; 0 takes the model's own (32 in 2.0, 12 in 1.0).",
                ),
                io.Int.Input(
                    "sink",
                    default=-1,
                    min=-1,
                    max=4095,
                    advanced=True,
                    tooltip="First latent frames that are never forgotten; -1 takes the model's own (8 in 2.0, 3 in 1.0).",
                ),
                io.Combo.Input(
                    "shot_pinning",
                    options=list(AUTO_ON_OFF),
                    default="auto",
                    advanced=True,
                    tooltip="Keep the first chunk of the newest shot in the window after a cut. auto: the model's own (on in 2.0, off in 1.0).",
                ),
                io.Float.Input(
                    "shot_rope_offset",
                    default=-1.0,
                    min=-1.0,
                    max=1024.0,
                    step=1.0,
                    round=0.01,
                    advanced=True,
                    tooltip="Latent frames added to the time position at each cut; -1 takes the model's own (8 in 2.0, 0 in 1.0).",
                ),
                io.Boolean.Input(
                    "clean_recache",
                    default=False,
                    advanced=True,
                    tooltip="At a cut, forget everything but the sink before the cut's chunk is cached (upstream shot_clean_recache). Needs shot pinning.",
                ),
                io.Combo.Input(
                    "recache_on_switch",
                    options=list(AUTO_ON_OFF),
                    default="auto",
                    advanced=True,
                    tooltip="Rebuild the window's keys and values under the new prompt at a switch inside a shot. "
                    "auto: the model's own (on in 1.0, off in 2.0).",
                ),
                io.Boolean.Input(
                    "recache_sink",
                    default=False,
                    advanced=True,
                    tooltip="A re-cache also rebuilds the sink (1.0's global_sink false). Off keeps the sink's first keys and values.",
                ),
                io.Boolean.Input(
                    "relative_rope",
                    default=False,
                    advanced=True,
                    tooltip="Time positions by place in the window instead of by frame number. The released 2.0 weights were trained without it.",
                ),
                io.Float.Input(
                    "time_scale",
                    default=1.0,
                    min=0.01,
                    max=10.0,
                    step=0.05,
                    round=0.001,
                    advanced=True,
                    tooltip="Factor on all time positions (upstream t_scale). 1 = off.",
                ),
                io.Combo.Input(
                    "kv_dtype",
                    options=list(KV_DTYPES),
                    default="auto",
                    advanced=True,
                    tooltip="Number format of the KV cache; auto is the model's compute format (bfloat16 on most GPUs, float32 on a CPU).",
                ),
                io.Combo.Input(
                    "noise_order",
                    options=list(NOISE_ORDERS),
                    default="per chunk",
                    advanced=True,
                    tooltip="per chunk: noise of a chunk does not depend on the video's length. "
                    "upstream: one draw for the whole video, sliced, as the reference does.",
                ),
                io.Conditioning.Input("negative", optional=True, tooltip="Negative prompt; only used when CFG is not 1."),
                io.Latent.Input(
                    "extend",
                    optional=True,
                    tooltip="A finished video's latents to continue: cached by clean passes, then the new part follows. Not together with a state.",
                ),
                STATE_TYPE.Input(
                    "state", optional=True, tooltip="State of an earlier Chunked Sampler run to continue; the output is the whole video, old and new."
                ),
            ],
            outputs=[
                io.Latent.Output(
                    tooltip="Latents of the whole video, old part included, in whole chunks; VAE Stream Decode drops what is past the asked length."
                ),
                STATE_TYPE.Output(display_name="state", tooltip="What a later run needs to continue this video."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model,
        positive,
        latent,
        seed: int = 0,
        steps: int = 0,
        cfg: float = 1.0,
        keep_state: str = "light",
        shift: float = 0.0,
        chunk: int = 0,
        window: int = 0,
        sink: int = -1,
        shot_pinning: str = "auto",
        shot_rope_offset: float = -1.0,
        clean_recache: bool = False,
        recache_on_switch: str = "auto",
        recache_sink: bool = False,
        relative_rope: bool = False,
        time_scale: float = 1.0,
        kv_dtype: str = "auto",
        noise_order: str = "per chunk",
        negative=None,
        extend=None,
        state=None,
    ) -> io.NodeOutput:
        refuse_unknown(*_choices(keep_state, shot_pinning, recache_on_switch, kv_dtype, noise_order))
        recipe = with_overrides(
            recipe_of(model),
            steps=steps or None,
            shift=shift or None,
            chunk_frames=chunk or None,
            window_frames=window or None,
            sink_frames=None if sink < 0 else sink,
            shot_pin=_switch(shot_pinning),
            shot_rope_offset=None if shot_rope_offset < 0 else shot_rope_offset,
            recache_on_switch=_switch(recache_on_switch),
        )
        request = SamplingRequest(
            recipe=recipe,
            options=LoopOptions(clean_recache, relative_rope, time_scale, keep_sink=not recache_sink),
            cfg=cfg,
            seed=seed,
            upstream_noise=noise_order == "upstream",
            kv_dtype=KV_DTYPES[kv_dtype],
            park=keep_state,
        )
        started = time.monotonic()
        result = sample_video(model, positive, negative, latent, request, extend=extend, state=state)
        text = summary(result, recipe, time.monotonic() - started)
        show_text(cls, text)
        state_out = result.state if result.state is not None else ExecutionBlocker(None)
        return io.NodeOutput(result.latent, state_out, ui=ui.PreviewText(text))

    @classmethod
    def validate_inputs(
        cls,
        keep_state: str = "light",
        shot_pinning: str = "auto",
        recache_on_switch: str = "auto",
        kv_dtype: str = "auto",
        noise_order: str = "per chunk",
    ) -> bool | str:
        # Named here so that core hands them over unchecked: an unknown key then gets our sentence instead of a bare list.
        return unknown_choice(*_choices(keep_state, shot_pinning, recache_on_switch, kv_dtype, noise_order)) or True


NODES = [LongLiveChunkedSampler]
