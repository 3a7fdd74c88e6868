"""A defense in a training loop of one's own."""
