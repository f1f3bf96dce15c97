"""The spine over a network: publish heads, request leases, and keep the bound while messages are late or lost."""
