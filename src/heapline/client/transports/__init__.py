"""Brokers on other machines, over one connection each: one call here is one request there."""
