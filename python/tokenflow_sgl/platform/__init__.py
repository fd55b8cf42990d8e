"""What SGLang lacks to run on plain torch on a CPU; knows nothing of scheduling and imports nothing."""
