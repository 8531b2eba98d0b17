"""What engines call a target."""


def served_name(uri: str) -> str:
    """What engines call a target: the hub's name or the folder in its URI; one in a package must be put into a folder."""
    scheme, _, rest = uri.partition(":")
    return rest.partition("@")[0] if scheme == "hf" else rest if scheme == "file" else "path/to/target"
