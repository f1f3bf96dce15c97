"""The pipeline's jobs, as functions that take a SparkSession. The commands are in heapline.cli.pipeline."""
