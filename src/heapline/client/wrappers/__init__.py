"""Wrappers around a transport, each a `do` over another `do`: Coalescing, Idempotent, Traced, Retrying."""
