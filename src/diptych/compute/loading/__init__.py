"""From a checkpoint's tensors to weight handles: sources, what is kept packed, and a loader for each part of a model."""
