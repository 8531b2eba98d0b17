"""Remote files opened at an offset: by HTTP with ranges, or by whatever fsspec knows.

HTTP does not go through fsspec, whose HTTP gives up after five minutes in all, whether bytes come or not.
"""

import queue
import re
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from foredraft.sources.transfer import Broken, Mark, Refused, Remote, root_cause

if TYPE_CHECKING:
    from requests import PreparedRequest, Response

PIECE_BYTES = 1 << 16
CONNECT_SECONDS = 20.0
LASTING = {401: "it needs a login", 403: "access is refused", 404: "no such file", 410: "the file is gone"}
PASSING = {408, 425, 429}
# By which of these a file system tells that a file is another: the first that it has.
VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "updated", "created")

T = TypeVar("T")


@contextmanager
def open_http(
    url: str, stall: float, offset: int, known: Mark, headers: Mapping[str, str] | None = None, pinned: str = ""
) -> Iterator[Remote]:
    """Open ``url`` at ``offset``, or at 0 if the server cannot go on there or has another file by now.

    Args:
        stall: seconds without a byte after which it counts as broken.
        pinned: names the content where the address alone already does; the server's own validators then do not matter.

    Raises:
        Broken: no connection, no byte for ``stall`` seconds, a body cut off, a server in trouble.
        Refused: the server says that it will never give the file.
    """
    with _ask(url, stall, offset, known, dict(headers or {}), pinned) as response:
        begin = offset if response.status_code == 206 else 0
        version = pinned or _version(response.headers) or (known.version if begin else None)
        yield Remote(begin, Mark(version, _size(response, begin)), _pieces(response, stall))


def _ask(url: str, stall: float, offset: int, known: Mark, headers: dict[str, str], pinned: str) -> "Response":
    if offset:
        ranged = {"Range": f"bytes={offset}-"}
        if not pinned and known.version:
            ranged["If-Range"] = known.version
        response = _get(url, stall, headers | ranged)
        if response.status_code == 200 or _goes_on(response, offset, known, pinned):
            return response
        response.close()
    return _get(url, stall, headers)


def _get(url: str, stall: float, headers: dict[str, str]) -> "Response":
    import requests

    own_login = _unchanged if "authorization" in map(str.lower, headers) else None
    asked = {"Accept-Encoding": "identity", **headers}
    timeout = (min(CONNECT_SECONDS, stall), stall)
    try:
        response = requests.get(url, headers=asked, stream=True, timeout=timeout, auth=own_login)
    except requests.ReadTimeout as error:
        raise Broken(f"no byte came for {stall:g} s") from error
    except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema) as error:
        raise Refused(str(error)) from error
    except requests.RequestException as error:
        raise Broken(root_cause(error)) from error
    status = response.status_code
    if status == 200 or (status in (206, 416) and "Range" in headers):
        return response
    response.close()
    if status in PASSING or status >= 500:
        raise Broken(f"HTTP {status} {response.reason}")
    reason = f"HTTP {status}: {LASTING.get(status, response.reason)}"
    raise Refused(reason, status, response.headers.get("X-Error-Code", ""))


def _unchanged(request: "PreparedRequest") -> "PreparedRequest":
    """Keep a login that is in the headers: requests would put one from ``.netrc`` in its place."""
    return request


def _goes_on(response: "Response", offset: int, known: Mark, pinned: str) -> bool:
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
    if response.status_code != 206 or not found or int(found[1]) != offset:
        return False
    same_size = found[2] == "*" or known.size is None or int(found[2]) == known.size
    return same_size and (bool(pinned) or _version(response.headers) in (None, known.version))


def _version(headers: Mapping[str, str]) -> str | None:
    """A validator that vouches for every byte, which a weak ETag does not."""
    etag = headers.get("ETag", "")
    return etag if etag.startswith('"') else headers.get("Last-Modified")


def _size(response: "Response", begin: int) -> int | None:
    total = response.headers.get("Content-Range", "").rpartition("/")[2]
    if begin and total.isdigit():
        return int(total)
    length = response.headers.get("Content-Length", "")
    return begin + int(length) if length.isdigit() else None


def _pieces(response: "Response", stall: float) -> Iterator[bytes]:
    from urllib3.exceptions import HTTPError, ReadTimeoutError

    try:
        # Not decoded: what is wanted are the bytes of the file, and its size was told in them.
        yield from response.raw.stream(PIECE_BYTES, decode_content=False)
    except ReadTimeoutError as error:
        raise Broken(f"no byte came for {stall:g} s") from error
    except (HTTPError, OSError) as error:
        raise Broken(root_cause(error)) from error


@contextmanager
def open_fsspec(url: str, stall: float, offset: int, known: Mark) -> Iterator[Remote]:
    """Open ``url`` at ``offset``, or at 0 if the file is another by now.

    Raises:
        Broken: no byte for ``stall`` seconds, or an error of the file system that may pass.
        Refused: no such file, no right to it, or nothing installed that opens such a URL.
    """
    with closing(watched(lambda: _read(url, offset, known), stall)) as items:
        head = next(items)
        assert isinstance(head, _Head)
        yield Remote(head.offset, head.mark, (item for item in items if isinstance(item, bytes)))


@dataclass(frozen=True)
class _Head:
    offset: int
    mark: Mark


def _read(url: str, offset: int, known: Mark) -> Iterator[_Head | bytes]:
    try:
        from fsspec.core import url_to_fs

        system, path = url_to_fs(url)
        info: dict[str, Any] = system.info(path)
        if info.get("type") == "directory":
            raise Refused("it is a folder; name one file")
        version = next((str(info[key]) for key in VERSIONS if info.get(key)), None)
        mark = Mark(version, info.get("size"))
        begin = offset if mark == known else 0
        yield _Head(begin, mark)
        with system.open(path, "rb") as stream:
            stream.seek(begin)
            while piece := stream.read(PIECE_BYTES):
                yield piece
    except (FileNotFoundError, PermissionError, IsADirectoryError, ImportError, ValueError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise Refused(reason) from error
    except Refused:
        raise
    except Exception as error:  # each file system has errors of its own
        raise Broken(root_cause(error)) from error


@dataclass(frozen=True)
class _End:
    error: Exception | None = None


def watched(items: Callable[[], Iterator[T]], stall: float) -> Generator[T, None, None]:
    """Yield what ``items`` yields, read in a thread of its own: a call that hangs then cannot hang the caller.

    Raises:
        Broken: nothing came for ``stall`` seconds. Errors of ``items`` come as they are.
    """
    ready: queue.Queue[T | _End] = queue.Queue(maxsize=4)
    stopped = threading.Event()
    threading.Thread(target=_feed, args=(items, ready, stopped), daemon=True).start()
    try:
        while True:
            try:
                item = ready.get(timeout=stall)
            except queue.Empty:
                raise Broken(f"no byte came for {stall:g} s") from None
            if not isinstance(item, _End):
                yield item
            elif item.error is None:
                return
            else:
                raise item.error
    finally:
        stopped.set()


def _feed(items: Callable[[], Iterator[T]], ready: "queue.Queue[T | _End]", stopped: threading.Event) -> None:
    end = _End()
    try:
        for item in items():
            _offer(item, ready, stopped)
            if stopped.is_set():
                return
    except Exception as error:  # raised again where the items are wanted
        end = _End(error)
    _offer(end, ready, stopped)


def _offer(item: T | _End, ready: "queue.Queue[T | _End]", stopped: threading.Event) -> None:
    while not stopped.is_set():
        try:
            return ready.put(item, timeout=0.5)
        except queue.Full:
            continue
