"""Reports of runs: one HTML page that needs no network, and PNGs of its figures.

`runs` reads runs, `tables` their metrics, and `panels` chooses the panels. `rollouts` and `evaluations` prepare texts
so that a browser opens a few at a time. `page` and `build` join all with the files of `assets`, `build` also renders PNGs,
and `server` serves the page.
"""

from dapo_jax.report.build import Report, report

__all__ = ["Report", "report"]
