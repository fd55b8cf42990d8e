"""What decides. No engine, no clock, no thread, no randomness; the journal alone does I/O."""
