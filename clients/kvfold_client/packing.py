"""Bounded msgpack: bytes ↔ trees of maps, arrays and scalars, with one place where a tensor's bytes go in and out.

msgpack allocates an array when it reads the array's length, before any element. Short arrays cost little at any depth;
a message with a longer one is first skipped over, which allocates nothing and proves that every element is there.
"""

from collections.abc import Callable
from typing import Any, cast

import msgpack

MAX_DEPTH = 8  # maps and arrays inside each other, the message itself counted
MAX_ITEMS = 1 << 21  # array elements and map pairs of a message together; more belongs into a tensor
_CONTAINER = 16  # a map or an array counts as this many elements: even an empty one costs as much to read
MAX_MAP = 4096

Buffer = bytes | bytearray | memoryview  # C-contiguous

_SHORT_ARRAY = 1024
_CONTAINERS = {dict, list}
_STRINGS = {str}
_TREES = {dict, list, tuple}
_msgpack = cast("Any", msgpack)  # ships no type stubs


class WireError(ValueError):
    """Bytes that are not a message of this protocol; `code` is the contract's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def unpack(view: memoryview) -> Any:
    """msgpack → tree of dict, list, str, bytes, int, float, bool, None. Raises WireError, also for a repeated key."""
    try:
        try:
            return _unpack(view, _SHORT_ARRAY)
        except WireError:
            raise
        except ValueError:  # not msgpack, or a long array
            unpacker = _msgpack.Unpacker(max_buffer_size=len(view))
            unpacker.feed(view)
            unpacker.skip()
            return _unpack(view, MAX_ITEMS)
    except WireError:
        raise
    except UnicodeDecodeError:
        raise WireError("malformed", "a string of the message is not UTF-8") from None
    except _msgpack.OutOfData:
        raise WireError("malformed", "the message ends early") from None
    except _msgpack.StackError:
        raise WireError("malformed", "the message is nested too deep") from None
    except _msgpack.FormatError:
        raise WireError("malformed", "the message is not msgpack") from None
    except (ValueError, TypeError, OverflowError, MemoryError, RecursionError, _msgpack.UnpackException) as error:
        raise WireError("malformed", f"the message is not acceptable msgpack: {error}") from None


def _unpack(view: memoryview, max_array: int) -> Any:
    num_items = 0

    def count(items: list[Any]) -> list[Any]:
        nonlocal num_items
        num_items += len(items) + _CONTAINER
        if num_items > MAX_ITEMS:
            raise WireError("malformed", f"the message has more than {MAX_ITEMS} elements outside of tensors")
        return items

    def unique(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        result = dict(count(pairs))
        if len(result) != len(pairs):
            raise WireError("malformed", "a map of the message names a key twice")
        if not _STRINGS.issuperset(map(type, result)):
            raise WireError("malformed", "the keys of a map must be strings")
        return result

    return _msgpack.unpackb(
        view, raw=False, strict_map_key=True, list_hook=count, object_pairs_hook=unique, ext_hook=_refuse_ext,
        max_array_len=max_array, max_map_len=MAX_MAP, max_ext_len=0,
    )  # fmt: skip


def _refuse_ext(code: int, data: bytes) -> Any:
    raise WireError("malformed", "the message has an extension type")


def settle(tree: Any, take: Callable[[object, object], memoryview]) -> dict[str, Any]:
    """Gives every tensor in the tree its `data` as a memoryview, in place; `take(offset, nbytes)` finds a frame's."""
    if type(tree) is not dict:
        raise WireError("malformed", "the message must be a map")
    message = cast("dict[str, Any]", tree)
    _settle(message, take, 1)
    return message


def _settle(node: dict[str, Any] | list[Any], take: Callable[[object, object], memoryview], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise WireError("malformed", f"the message is nested more than {MAX_DEPTH} deep")
    if isinstance(node, list):
        if _CONTAINERS.isdisjoint(set(map(type, node))):
            return
        children = node
    else:
        if "dtype" in node and "shape" in node:
            _settle_tensor(node, take)
        children = node.values()
    for child in children:
        if type(child) in _CONTAINERS and not _is_flat(child, depth):
            _settle(child, take, depth + 1)


def _is_flat(child: Any, depth: int) -> bool:
    """Whether a container is a map that needs no look inside: no tensor, and nothing that could hold one."""
    return (
        type(child) is dict
        and depth < MAX_DEPTH
        and "dtype" not in child
        and _CONTAINERS.isdisjoint(map(type, cast("dict[str, Any]", child).values()))
    )


def _settle_tensor(tensor: dict[str, Any], take: Callable[[object, object], memoryview]) -> None:
    if "offset" in tensor or "nbytes" in tensor:
        if "data" in tensor:
            raise WireError("malformed", "a tensor carries either data or offset and nbytes")
        tensor["data"] = take(tensor.pop("offset", None), tensor.pop("nbytes", None))
    elif "data" in tensor:
        if type(tensor["data"]) is not bytes:
            raise WireError("malformed", "the data of a tensor must be binary")
        tensor["data"] = memoryview(tensor["data"])


def lifted(node: Any, place: Callable[[memoryview], dict[str, Any]]) -> Any:
    """The tree, every tensor's `data` replaced by what `place` makes of it; what holds no tensor is the same object."""
    if isinstance(node, dict):
        tree = cast("dict[str, Any]", node)
        children = {key: lifted(child, place) for key, child in tree.items() if type(child) in _TREES}
        if "data" in tree and "dtype" in tree and "shape" in tree:
            rest = {key: value for key, value in tree.items() if key != "data"}
            return rest | children | place(byte_view(tree["data"]))
        if any(child is not tree[key] for key, child in children.items()):
            return tree | children
    elif isinstance(node, (list, tuple)):
        items = cast("list[Any]", node)
        if not _TREES.isdisjoint(set(map(type, items))):
            return [lifted(item, place) for item in items]
    return cast("Any", node)


def byte_view(data: Any) -> memoryview:
    """The bytes of a C-contiguous buffer, not copied. Raises WireError where they are not contiguous."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise WireError("malformed", "the buffer of a tensor must be C-contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


def pack(tree: Any) -> bytes:
    """Tree → msgpack; a buffer is packed as it lies. Raises WireError for one that is not contiguous."""
    try:
        return _msgpack.packb(tree, use_bin_type=True, default=byte_view)
    except BufferError:
        raise WireError("malformed", "the buffer of a tensor must be C-contiguous") from None
