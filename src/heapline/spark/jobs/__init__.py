"""The pipeline's jobs, as functions that take a SparkSession. Their commands are in heapline.cli.pipeline."""
