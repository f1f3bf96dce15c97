"""The lake: what the log said, kept as Delta tables for as long as anybody wants it.

Each module decides one thing: claims.py what part of a range the lake lacks, layout.py how tables look, writing.py how
files are written, tables.py how they are committed, holding.py who keeps the journal meanwhile. The jobs on top are in
heapline.spark.jobs.
"""
