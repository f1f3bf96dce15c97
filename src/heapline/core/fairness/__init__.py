"""Fairness between keys: turns within a priority, and limits on leases per key."""
