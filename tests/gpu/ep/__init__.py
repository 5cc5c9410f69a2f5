"""Expert parallelism on several GPUs."""
