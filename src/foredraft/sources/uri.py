"""The one URI scheme of sources, benchmarks and targets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Uri:
    """A parsed URI.

    ``name`` is the repository, package, file path or whole URL; ``revision`` the commit or version; ``member`` the path
    (or glob) inside the repository or wheel, empty for all of it.
    """

    scheme: str
    name: str
    revision: str = ""
    member: str = ""


def parse_uri(text: str) -> Uri:
    """Parse ``hf:org/name@revision[/path]``, ``pypi:package==version[/member]``, ``file:path`` or an fsspec URL.

    Raises:
        ValueError: none of these, or a moving revision: what is fetched must be pinned.
    """
    scheme, separator, rest = text.partition(":")
    if not separator or not rest:
        raise ValueError(f"{text!r} is not a URI: expected hf:, pypi:, file: or an fsspec URL")
    if scheme == "file":
        return Uri("file", rest.removeprefix("//"))
    if scheme == "pypi":
        package, _, member = rest.partition("/")
        name, pinned, version = package.partition("==")
        if not pinned or not version:
            raise ValueError(f"{text!r}: pin the version, as in pypi:package==1.0/member")
        return Uri("pypi", name, version, member)
    if scheme == "hf":
        name, pinned, tail = rest.partition("@")
        revision, _, member = tail.partition("/")
        if not pinned or not revision or name.count("/") != 1:
            raise ValueError(f"{text!r}: expected hf:org/name@revision, with a commit for the revision")
        return Uri("hf", name, revision, member)
    if rest.startswith("//"):
        return Uri("fsspec", text)
    raise ValueError(f"{text!r}: unknown scheme {scheme!r}: expected hf:, pypi:, file: or an fsspec URL")
