"""A run to look into: one HTML page that needs no network, and PNGs of its figures.

The files here read runs (`runs`, `states`), make tables of their metrics (`tables`) and say which panels these fill (`panels`, `filling`),
lay rollouts and evaluations out so that a browser opens a few at a time (`rollouts`, `index`, `tokens`, `evaluations`, `questions`), and join it
all with the files of `assets` (`page`, `making`), serve it (`watching`), or draw it (`figures`).
"""

from dapo_jax.report.build import Report, report

__all__ = ["Report", "report"]
