"""MTP on several GPUs."""
