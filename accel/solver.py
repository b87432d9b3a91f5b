"""The two few-step flow samplers: what is done with the network's output between two forwards.

Flow matching throughout: ``x = (1 - sigma) * x0 + sigma * noise`` and the network returns ``flow = noise - x0``. Coefficients are Python floats (double
precision); tensors stay float32.

Sources: UniPC, Zhao et al. 2023 (arXiv 2302.04867), ``bh2`` variant with data prediction, as in Wan's flow scheduler; LongLive 1.0's few-step sampler is the
x0-then-renoise rule of DMD2 (arXiv 2405.14867, section 4.4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from .config import Recipe

# Wan's scheduler is built with 1,000 train steps, so the largest sigma before the shift is 999/1000.
_LARGEST_SIGMA = 0.999


def shifted(u: float, shift: float) -> float:
    """Flow-matching timestep shift: ``shift * u / (1 + (shift - 1) * u)``."""
    return shift * u / (1 + (shift - 1) * u)


def unipc_sigmas(steps: int, shift: float) -> tuple[float, ...]:
    """Sigmas of LongLive 2.0, ``steps`` values and a final 0 (4 steps, shift 5: 0.9998, 0.9373, 0.8331, 0.6247, 0)."""
    return tuple(shifted(_LARGEST_SIGMA * (1 - i / steps), shift) for i in range(steps)) + (0.0,)


def renoise_sigmas(steps: int, shift: float) -> tuple[float, ...]:
    """Sigmas of LongLive 1.0, ``steps`` values and a final 0 (4 steps, shift 5: 1, 0.9375, 0.8333, 0.625, 0)."""
    return tuple(shifted(1 - i / steps, shift) for i in range(steps)) + (0.0,)


def sigmas_of(recipe: Recipe) -> tuple[float, ...]:
    """The sigmas that ``recipe``'s solver, steps and shift give, with the final 0."""
    return (unipc_sigmas if recipe.solver == "unipc" else renoise_sigmas)(recipe.steps, recipe.shift)


def network_timestep(sigma: float, solver: str) -> float:
    """The timestep shown to the network: truncated to an integer by 2.0's scheduler, fractional in 1.0."""
    t = sigma * 1000
    return float(math.floor(t + 1e-6)) if solver == "unipc" else t


@dataclass
class FlowUniPC:
    """Second-order UniPC over flow sigmas for one chunk; make a new one per chunk.

    ``sigmas`` ends in 0. Call ``step`` once per network output, in order.
    """

    sigmas: tuple[float, ...]
    _estimates: list[Tensor] = field(default_factory=list)  # x0 of the last two steps, newest last
    _sample: Tensor | None = None  # the (corrected) sample the last predictor started from
    _order: int = 0  # of the last predictor
    _index: int = 0

    def step(self, x: Tensor, flow: Tensor) -> Tensor:
        """Advance ``x`` (any shape, float32) from ``sigmas[i]`` to ``sigmas[i + 1]`` given the network's ``flow`` at ``sigmas[i]``."""
        i, sigmas = self._index, self.sigmas
        steps = len(sigmas) - 1
        if i >= steps:
            raise RuntimeError(f"this solver has {steps} steps and all are done")
        x0 = x - sigmas[i] * flow
        if i == steps - 1:  # sigma 0 is next: the result is x0 of the uncorrected sample
            self._index += 1
            return x0
        if i > 0:
            x = self._correct(x0)
        order = min(2, steps - i, i + 1)
        result = self._predict(x, x0, order)
        self._estimates = [*self._estimates[-1:], x0]
        self._sample, self._order, self._index = x, order, i + 1
        return result

    def _lambda(self, i: int) -> float:
        sigma = self.sigmas[i]
        return math.log((1 - sigma) / sigma)

    def _correct(self, x0: Tensor) -> Tensor:
        i = self._index
        sigma, before, alpha = self.sigmas[i], self.sigmas[i - 1], 1 - self.sigmas[i]
        h = self._lambda(i) - self._lambda(i - 1)
        growth = math.expm1(-h)
        newest = self._estimates[-1]
        if self._order == 1:
            change = 0.5 * (x0 - newest)
        else:
            ratio = (self._lambda(i - 2) - self._lambda(i - 1)) / h
            phi1 = growth / -h - 1
            phi2 = phi1 / -h - 0.5
            # rho1 + rho2 = phi1 / growth and ratio * rho1 + rho2 = 2 * phi2 / growth
            rho1 = (2 * phi2 - phi1) / growth / (ratio - 1)
            rho2 = phi1 / growth - rho1
            change = (rho1 / ratio) * (self._estimates[-2] - newest) + rho2 * (x0 - newest)
        return (sigma / before) * self._sample - alpha * growth * (newest + change)

    def _predict(self, x: Tensor, x0: Tensor, order: int) -> Tensor:
        i = self._index
        sigma, after, alpha = self.sigmas[i], self.sigmas[i + 1], 1 - self.sigmas[i + 1]
        h = self._lambda(i + 1) - self._lambda(i)
        growth = math.expm1(-h)
        result = (after / sigma) * x - alpha * growth * x0
        if order == 2:
            ratio = (self._lambda(i - 1) - self._lambda(i)) / h
            result = result - alpha * growth * 0.5 / ratio * (self._estimates[-1] - x0)
        return result


def renoise(x0: Tensor, sigma: float, noise: Tensor) -> Tensor:
    """Put fresh noise back to level ``sigma``: ``(1 - sigma) * x0 + sigma * noise`` (LongLive 1.0 between steps)."""
    return (1 - sigma) * x0 + sigma * noise
