"""The lake: the log, kept as Delta tables for as long as you want.

claims.py decides which rows the lake lacks, files.py lays out and writes its files, tables.py commits them, rounds.py
combines these, and maintenance.py compacts and cleans a lake later. The jobs that use it are in heapline.spark.jobs.
"""
