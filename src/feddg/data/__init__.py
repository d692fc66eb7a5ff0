"""Images with labels and domains, how they are split, and which client holds which."""
