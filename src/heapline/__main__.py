"""`python -m heapline` is `heapline`."""

from heapline.cli.main import app

if __name__ == "__main__":
    app(prog_name="heapline")
