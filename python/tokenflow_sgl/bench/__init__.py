"""Measuring live servers: models to serve, answers of known length, paced readers, reports; imports nothing."""
