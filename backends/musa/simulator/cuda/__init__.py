"""The engine of ``HALMA_MUSA_SIM=cuda``."""
