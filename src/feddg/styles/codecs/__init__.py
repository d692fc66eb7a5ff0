"""Codecs, one a file: ``compact``, ``vgg19``, and ``colors`` as the reference without a network."""
