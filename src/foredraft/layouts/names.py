"""What engines call a target."""

UNNAMED = "path/to/target"
"""A target that lies in a package: who serves it puts it into a folder first."""


def served_name(uri: str) -> str:
    """What engines call a target: the hub's name or the folder in its URI, else :data:`UNNAMED`."""
    scheme, _, rest = uri.partition(":")
    named = {"hf": rest.partition("@")[0], "file": rest.removeprefix("//")}
    return named.get(scheme, UNNAMED)
