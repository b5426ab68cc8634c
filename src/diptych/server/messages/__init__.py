"""Anthropic's Messages: another shape around a turn."""
