"""Benchmarks that compare this library with others on the same workload and the same machine. README.md explains how to run them."""
