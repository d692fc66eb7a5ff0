"""Styles: measured by an encoder, clustered, interpolated, and drawn back into images."""
