"""Replays: the stream of a topic once more, to whoever iterates or into a topic."""
