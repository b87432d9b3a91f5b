"""Sigmas, timesteps and the linear form of the solvers against the tables of the reference."""

import pytest
import torch
from longlive.accel.solver import FlowUniPC, network_timestep, renoise, renoise_sigmas, unipc_sigmas


@pytest.mark.parametrize(
    ("steps", "sigmas", "timesteps"),
    [
        (4, (0.99979985, 0.93726546, 0.83305538, 0.62468737, 0), (999, 937, 833, 624)),
        (2, (0.99979985, 0.83305538, 0), (999, 833)),
        (3, (0.99979985, 0.90884280, 0.71397942, 0), (999, 908, 713)),
        (8, (0.9998, 0.97201, 0.93727, 0.89260, 0.83306, 0.74970, 0.62469, 0.41639, 0), (999, 972, 937, 892, 833, 749, 624, 416)),
    ],
)
def test_unipc_schedule(steps, sigmas, timesteps):
    found = unipc_sigmas(steps, 5.0)
    assert found == pytest.approx(sigmas, abs=1e-5 if steps == 8 else 1e-7)
    assert tuple(network_timestep(sigma, "unipc") for sigma in found[:-1]) == timesteps


def test_first_generation_schedule_is_not_truncated():
    sigmas = renoise_sigmas(4, 5.0)
    assert sigmas == pytest.approx((1, 0.9375, 5 / 6, 0.625, 0), abs=1e-12)
    assert [network_timestep(sigma, "renoise") for sigma in sigmas[:-1]] == pytest.approx([1000, 937.5, 2500 / 3, 625])


# Coefficients of (x, flow 0, flow 1, ...) after each step, found by feeding unit vectors.
LINEAR = {
    4: [
        (1, -0.0625344, 0, 0, 0),
        (1, -0.0266509, -0.1400935, 0, 0),
        (1, -0.0274610, 0.0041768, -0.3518283, 0),
        (1, -0.0274610, 0.0041768, -0.3518283, -0.6246874),
    ],
    2: [(1, -0.1667445, 0), (1, -0.1667445, -0.8330554)],
    3: [(1, -0.0909570, 0, 0), (1, -0.0367762, -0.2490443, 0), (1, -0.0367762, -0.2490443, -0.7139794)],
}


@pytest.mark.parametrize("steps", LINEAR)
def test_unipc_is_the_reference_linear_map(steps):
    unit = torch.eye(steps + 1, dtype=torch.float64)
    solver, x = FlowUniPC(unipc_sigmas(steps, 5.0)), unit[0]
    for step, expected in enumerate(LINEAR[steps]):
        x = solver.step(x, unit[step + 1])
        assert x.tolist() == pytest.approx(expected, abs=2e-7)


def test_unipc_stops_after_its_last_step():
    solver = FlowUniPC(unipc_sigmas(1, 5.0))
    solver.step(torch.zeros(2), torch.zeros(2))
    with pytest.raises(RuntimeError, match="has 1 steps"):
        solver.step(torch.zeros(2), torch.zeros(2))


def test_unipc_many_steps_solve_a_straight_flow_exactly():
    # A flow that does not change along the path has the exact solution noise - sigma * flow, whatever the number of steps.
    x0, noise = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sigmas = unipc_sigmas(12, 5.0)
    solver, x = FlowUniPC(sigmas), (1 - sigmas[0]) * x0 + sigmas[0] * noise
    for _ in range(12):
        x = solver.step(x, noise - x0)
    assert torch.allclose(x, x0, atol=1e-12)


def test_renoise_mixes_by_sigma():
    assert renoise(torch.tensor(2.0), 0.25, torch.tensor(-4.0)).item() == pytest.approx(0.5)
