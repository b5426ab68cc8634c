"""Weights as other programs wrote them, as `Source`s: GGUF, MLX, quantised safetensors; each layout in a file of its own."""
