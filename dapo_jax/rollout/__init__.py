"""Rollouts: which responses start when, which groups a step trains on, and how processes share the sampling."""
