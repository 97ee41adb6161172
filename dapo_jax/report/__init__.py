"""Creates reports of runs: a single HTML page that works offline, and PNGs of its figures.

`runs` loads the files of runs, `tables` arranges their metrics in columns, and `panels` selects the panels. `rollouts` and
`evaluations` split texts into chunks that the browser opens on demand. `build` and `page` combine the results with the files in
`assets`. `build` also renders PNGs, and `server` serves the page while runs are active.
"""

from dapo_jax.report.build import Report, report

__all__ = ["Report", "report"]
