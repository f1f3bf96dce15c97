"""The views of the format `heapline` as Arrow batches."""
