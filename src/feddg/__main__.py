"""``python -m feddg`` is the command line."""

from feddg.cli import main

main()
