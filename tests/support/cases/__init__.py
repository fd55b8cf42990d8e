"""Cases that need a real engine, grouped by the engine configuration they share. See __main__."""
