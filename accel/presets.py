"""The recipes of the released models (LongLive 2.0: upstream configs/inference.yaml; 1.0: configs/longlive_inference.yaml)."""

from .config import Recipe

LONGLIVE_2 = Recipe(
    name="longlive-2.0",
    chunk_frames=8,
    window_frames=32,
    sink_frames=8,
    steps=4,
    shift=5.0,
    solver="unipc",
    shot_pin=True,
    shot_rope_offset=8.0,
    recache_on_switch=False,
    fps=24,
)
LONGLIVE_1 = Recipe(
    name="longlive-1.0",
    chunk_frames=3,
    window_frames=12,
    sink_frames=3,
    steps=4,
    shift=5.0,
    solver="renoise",
    shot_pin=False,
    shot_rope_offset=0.0,
    recache_on_switch=True,
    fps=16,
)
# By the name that people see.
RELEASES = {"LongLive 2.0": LONGLIVE_2, "LongLive 1.0": LONGLIVE_1}
