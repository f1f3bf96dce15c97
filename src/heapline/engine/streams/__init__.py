"""Topics read as streams: pages of rows, and the consumer groups that they are handed to."""
