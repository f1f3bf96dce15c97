"""Choose the partition that serves next: an index of candidates, and strategies that serve partitions in turn."""
