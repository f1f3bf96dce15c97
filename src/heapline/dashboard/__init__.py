"""The dashboard: pages under /ui/ that the server renders. See docs/design/dashboard.md."""
