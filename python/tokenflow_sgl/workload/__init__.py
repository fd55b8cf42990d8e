"""What arrives: scenarios from TOML and the seeded requests they stand for. Knows no engine."""
