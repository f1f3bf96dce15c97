"""The contract: what every broker can do, and nothing about how."""
