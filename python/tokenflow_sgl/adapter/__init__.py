"""All of TokenFlow that imports SGLang. Importing this package alone imports nothing of it."""
