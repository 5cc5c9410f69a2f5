"""One folder a device family; each registers itself through a hook."""

if __name__ != "halma.backends":
    raise ImportError("import halma.backends, not backends: this folder is part of the package halma")
