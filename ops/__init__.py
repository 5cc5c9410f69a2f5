"""Operators of DeepSeek-V4: one file a family, each with its contract, its reference and its routes."""

if __name__ != "halma.ops":
    raise ImportError("import halma.ops, not ops: this folder is part of the package halma")
