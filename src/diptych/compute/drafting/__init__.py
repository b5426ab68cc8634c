"""Drafters that run tensors: a second model, heads that read the states of the model they draft for."""
