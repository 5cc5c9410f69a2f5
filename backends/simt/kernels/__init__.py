"""Kernel sources of the portable dialect, as package data; :mod:`halma.backends.simt.sources` puts them together."""
