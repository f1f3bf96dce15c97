"""Consumer groups: members, offsets, and the stream of rows that they read."""
