"""What a model is: every family as data, a config.json read into one `ModelSpec` for engine and planner alike. No tensors."""
