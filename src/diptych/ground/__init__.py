"""Floor 0: the nouns every room shares. Standard library only."""
