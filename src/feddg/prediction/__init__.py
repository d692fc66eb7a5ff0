"""Studies: what one does with finished runs, and with images before any run."""
