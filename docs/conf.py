"""How Sphinx builds these pages: `make docs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "gpipe"
copyright = "the authors of gpipe, Apache-2.0"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "commands",
    "explained",
    "families",
    "notebook",
    "table",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "gpipe"
html_static_path = ["_static"]
html_css_files = ["gpipe.css"]
html_copy_source = False
html_show_sphinx = False

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3

default_role = "code"  # in docstrings `this` is code
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["accelerate", "transformers"]  # of integrations: pages are made where these are not
napoleon_use_rtype = False

nitpicky = True
nitpick_ignore_regex = [  # what these pages name and do not document: torch, the standard library, types of our own
    ("py:.*", r"(torch|collections|pathlib|types|random|os|rich|typing|nn|Tensor|np|numpy)\b.*"),
    ("py:.*", r"(Tree|Reduction|LossModule|StepOptions|T|DeviceMesh|gpipe\.checkpoint\.manifest\.Manifest)"),
    ("py:.*", r"gpipe\.schedule\.schedules\.writing\.Rows"),
    ("py:.*", r"(Any|optional|default.*|Iterable|Iterator|Sequence|Mapping|Callable|Path|Table|.*Error)"),
]
