"""Runs the command line: ``python -m feddg``."""

from feddg.cli import main

main()
