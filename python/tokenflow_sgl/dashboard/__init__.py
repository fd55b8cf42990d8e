"""The live page of one server: `tokenflow dash`, and a Grafana board over its metrics."""
