"""The chunk loop's ``Network`` without a host: one model, prompts as plain tensors, guidance off."""

from __future__ import annotations

import torch
from longlive.accel.forward import ChunkCall, chunk_forward
from longlive.tests.reference.tiny_dit import attention
from torch import Tensor, nn


class BareNetwork:
    def __init__(self, dit: nn.Module, prompts: dict[object, Tensor]) -> None:
        self.dit, self.prompts = dit, prompts
        self.calls: list[ChunkCall] = []

    def _run(self, x: Tensor, call: ChunkCall, prompt: object) -> Tensor | None:
        self.calls.append(call)
        return chunk_forward(self.dit, x, self.prompts[prompt], call, branches=(0,), prompts=(prompt,), attention=attention, transformer_options={})

    def flow(self, x: Tensor, sigma: float, call: ChunkCall, prompt: object) -> Tensor:
        return self._run(x, call, prompt)

    def commit(self, x: Tensor, call: ChunkCall, prompt: object) -> None:
        assert self._run(x, call, prompt) is None


def prompt_rows(*names: object, dim: int = 16) -> dict[object, Tensor]:
    """Five rows of text per prompt, drawn from its place in the list."""
    return {name: torch.randn(1, 5, dim, generator=torch.Generator().manual_seed(100 + i)) for i, name in enumerate(names)}
