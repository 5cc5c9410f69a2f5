"""The hardware abstraction layer: contracts, state machines, bookkeeping. No vendor, no model."""

if __name__ != "halma.hal":
    raise ImportError("import halma.hal, not hal: this folder is part of the package halma")
