"""Creates reports of runs: a single HTML page that needs no network, and PNGs of its figures.

`runs` loads runs, `tables` arranges their metrics, and `panels` selects the panels. `rollouts` and `evaluations` split texts
into chunks that the browser opens on demand. `build` and `page` combine all this with the files in `assets`, `build` also
renders PNGs, and `server` serves the page.
"""

from dapo_jax.report.build import Report, report

__all__ = ["Report", "report"]
