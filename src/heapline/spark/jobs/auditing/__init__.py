"""What the audit is made of: plain numpy over columns of events, which Spark's tasks call (jobs/audit.py)."""
