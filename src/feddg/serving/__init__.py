"""Serves a trained model as a web page and an HTTP interface; needs the extra ``serve``."""
