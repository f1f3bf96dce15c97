"""Choose the best message across partitions, with a bound on its rank."""
