"""The ordered set of ready messages, as sorted runs of columns."""
