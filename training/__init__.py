"""Owns the recipe of the bundled models: text, tokenizer, training, export and evaluation. Imports nothing from diptych."""
