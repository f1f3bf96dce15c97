"""Telemetry of a server: metrics, traces, logs. Nothing here changes what the server does."""
