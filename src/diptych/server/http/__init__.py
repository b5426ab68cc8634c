"""What all routes share: the door with its bounds, errors, streams, whose pages may ask, which fields are known."""
