"""Benchmarks of this library against its peers, on one workload and one machine. README.md says how to run them."""
