"""A world made of numbers: the same policies, on timing models of GPUs. Knows core and workload only."""
