"""DeepSeek-V4: configuration, checkpoint, state, programs and engine."""
