"""The settings of the site, for Sphinx; ``build.py`` collects its pages."""

from __future__ import annotations

import namedmesh

project = "namedmesh"
release = version = namedmesh.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4  # as on the host of the repository, so that links to headings work in both places
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
strip_signature_backslash = True  # so that an argument such as async_ keeps its underscore

autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    "imported-members": True,
    # What a class inherits from these is not shown.
    "inherited-members": "BaseException, ImportError, Future, Module, dict, tuple",
}
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
# Types are of many libraries, and of private modules; the other names in docstrings have to exist.
nitpicky = True
nitpick_ignore_regex = [("py:class|py:exc", ".*")]
toc_object_entries_show_parents = "hide"

# The theme loads nothing from other hosts: no fonts, no scripts.
html_theme = "furo"
html_title = f"namedmesh {version}"
pygments_dark_style = "github-dark"
html_copy_source = False
html_show_sphinx = False
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "versions.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
