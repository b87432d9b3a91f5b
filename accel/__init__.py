"""Torch-only engine: geometry, window, KV cache, solver, chunk loop, streaming decode. Knows nothing of ComfyUI."""
