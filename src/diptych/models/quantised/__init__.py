"""`quantization_config`: which program quantised a checkpoint's weights, and how its numbers are read."""
