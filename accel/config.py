"""Frozen options shared by the engine and the nodes.

This file owns what a run is asked to do; how it is done is decided in ``plan.py`` (attention) and ``sampler.py`` (the chunk loop). Values are checked here,
so that a script and a graph get the same sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SOLVERS = ("unipc", "renoise")


@dataclass(frozen=True)
class Recipe:
    """How a checkpoint wants to be sampled.

    All ``*_frames`` are latent frames. ``shift`` is the flow-matching timestep shift. ``solver`` is ``"unipc"`` (LongLive 2.0: second-order flow UniPC,
    truncated timesteps) or ``"renoise"`` (LongLive 1.0: x0 prediction plus fresh noise). ``notes`` says, a sentence per value, where the value came from.
    """

    name: str
    chunk_frames: int
    window_frames: int
    sink_frames: int
    steps: int
    shift: float
    solver: str
    shot_pin: bool
    shot_rope_offset: float
    recache_on_switch: bool
    fps: int
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.chunk_frames < 1:
            raise ValueError(f"chunk must be at least 1 latent frame, got {self.chunk_frames}; 8 is LongLive 2.0's, 3 is 1.0's")
        if self.window_frames < self.chunk_frames:
            raise ValueError(
                f"the window ({self.window_frames} latent frames) is smaller than one chunk ({self.chunk_frames}); "
                f"a window of {4 * self.chunk_frames} is the usual choice"
            )
        if not 0 <= self.sink_frames < self.window_frames:
            raise ValueError(
                f"the sink ({self.sink_frames} latent frames) must be smaller than the window ({self.window_frames}); "
                f"a window of {4 * self.chunk_frames} with a sink of {self.chunk_frames} is the usual choice"
            )
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}; released models use 4 or 2")
        if self.shift <= 0:
            raise ValueError(f"shift must be above 0, got {self.shift}; released models use 5")
        if self.solver not in SOLVERS:
            raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, got {self.solver!r}")

    def with_notes(self, *notes: str) -> Recipe:
        """Return the same recipe with further sentences of provenance."""
        return replace(self, notes=self.notes + notes)
