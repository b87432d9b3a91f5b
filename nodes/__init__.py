"""The ComfyUI side: everything that knows the host lives in this folder."""
