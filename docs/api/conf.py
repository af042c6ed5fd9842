"""Sphinx configuration of the API reference; ``make docs`` builds it into out/api."""

import logging
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore", module="megatron.")  # of Megatron's own imports
logging.getLogger("megatron").setLevel(logging.ERROR)

from megatron_paci import __version__  # noqa: E402

project = "megatron_paci"
author = "the authors of megatron_paci"
version = release = __version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "sidebar_width": "240px"}
html_show_copyright = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autoclass_content = "both"  # arguments are described at __init__
napoleon_use_ivar = True
smartquotes = False  # or --flag becomes a dash

ATTRIBUTES = ("attribute", "data", "property")


def setup(app):
    """Let docstrings of attributes pass as they are.

    Napoleon takes what stands before a colon in them for a type.
    """
    docstrings = {}

    def keep(app, what, name, obj, options, lines):
        if what in ATTRIBUTES:
            docstrings[name] = list(lines)

    def restore(app, what, name, obj, options, lines):
        if what in ATTRIBUTES:
            lines[:] = docstrings.pop(name)

    app.connect("autodoc-process-docstring", keep, priority=400)
    app.connect("autodoc-process-docstring", restore, priority=600)
