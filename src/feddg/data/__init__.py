"""Data: images with labels and domains, how they are split, and who holds them."""
