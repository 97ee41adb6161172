"""How Sphinx makes the site; parts of some pages are made from the library itself by the modules of `_made`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from dapo_jax import __version__

project = "dapo_jax"
copyright = "The dapo_jax authors, Apache License 2.0"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "_made.pages",
    "_made.docstrings",
    "_made.formulas",
]
exclude_patterns = ["_made"]

# MyST: pages are Markdown, which repositories show too.
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

# The API: signatures as they stand in the source, one parameter a line where they are long.
autodoc_default_options = {"members": True, "undoc-members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
toc_object_entries_show_parents = "hide"

# Furo: nothing but text, light and dark, readable on a phone; it brings no framework and loads nothing from elsewhere.
html_theme = "furo"
html_title = f"dapo_jax {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
pygments_style = "tango"
pygments_dark_style = "monokai"
