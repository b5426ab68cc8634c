"""Floor 3: the OpenAI-compatible server. Imports engine, metrics and ground; nothing below imports it."""
