"""Extension of griffe, which reads the docstrings of the API page: our `Example:` is its `Examples:`."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Have doctests shown as code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each module, class, function and attribute that was read."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
