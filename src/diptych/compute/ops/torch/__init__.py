"""The torch backend: the op vocabulary executed eagerly on any device torch has."""
