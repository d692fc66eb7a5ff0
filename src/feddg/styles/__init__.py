"""Styles: how they are measured, clustered, interpolated and transferred to images."""
