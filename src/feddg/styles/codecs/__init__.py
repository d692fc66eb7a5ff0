"""Codecs, one a file: two with weights of their own, the papers' VGG-19, and bare colours."""
