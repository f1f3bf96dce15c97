"""The lake: what the log said, kept as Delta tables for as long as anybody wants it.

Each module decides one thing: claims.py what part of a range the lake lacks, layout.py how tables look, writing.py how
files are written, tables.py how they are committed, rounds.py how both go together, holding.py who keeps the journal
meanwhile, sameness.py whether it is the right one, upkeep.py what is done to a lake later. The jobs on top are in
heapline.spark.jobs.
"""
