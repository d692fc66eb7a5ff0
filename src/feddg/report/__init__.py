"""Reports: one self-contained HTML page about one or several runs, and its tables as files."""
