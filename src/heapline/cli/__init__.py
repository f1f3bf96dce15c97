"""The command line: the only room that reads flags and prints for people. `main.app` is the `heapline` command."""
