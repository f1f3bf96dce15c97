"""Replays: read past stream rows of a topic again, by iteration or into a topic."""
