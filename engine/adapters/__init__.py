"""LoRA adapters of a worker: what is in their folders, and which of them are loaded."""
