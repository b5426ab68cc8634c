"""Owns the recipe of the bundled models, from books to model folders. Imports nothing from diptych."""
