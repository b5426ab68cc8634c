"""A model's forward in the op vocabulary: one walk for every family, and the handles that it takes."""
