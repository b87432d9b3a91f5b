"""How a ComfyUI is found, installed and started. Standard library only: it runs before any environment exists."""
