"""A run to look into: one HTML page that needs no network, and PNGs of its figures.

The files here read runs (`runs`), make tables and curves of their metrics (`tables`, `panels`), lay their rollouts out so
that a browser opens a few at a time (`rollouts`, `tokens`), and join all that with the files of `assets` (`page`).
"""

from dapo_jax.report.making import Report, report

__all__ = ["Report", "report"]
