"""The ComfyUI side: everything that knows the host lives in this folder. Importing it imports nothing; extension.py collects the nodes."""
