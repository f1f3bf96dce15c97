"""Brokers that are elsewhere. `wire.WireBroker` is the thin one: a call of the contract is a call of the service."""
