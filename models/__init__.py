"""Programs written once against the layer."""

if __name__ != "halma.models":
    raise ImportError("import halma.models, not models: this folder is part of the package halma")
