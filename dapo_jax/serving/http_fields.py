"""Bodies of requests, read field by field: whatever is wrong is an error that names the field, what was found and what is needed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dapo_jax.nearest import nearest
from dapo_jax.plain_json import read_numbers

_Value = TypeVar("_Value")

_SHOWN = 80
"""Characters of a value that a message quotes."""


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        message: the value found, the value needed, and what to change.
        status: the HTTP status.
        code: a name that programs compare.
        kind: the `type` of OpenAI's error object.
        retry_after_s: seconds after which the same request may be answered.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str = "invalid_value", kind: str = "invalid_request_error",
        retry_after_s: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.code, self.kind, self.retry_after_s = status, code, kind, retry_after_s


def shown(value: object) -> str:
    """A value as messages quote it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read_body(content: bytes) -> "Fields":
    """The JSON object that a request's body holds.

    Raises:
        RequestError: it is no UTF-8, no JSON, no object, or has numbers that are not finite or do not fit 64 bits.
    """
    try:
        read = read_numbers(content.decode("utf-8"))
    except RecursionError as error:
        raise RequestError(
            "the body is not JSON: too many brackets inside one another", code="invalid_json"
        ) from error
    except ValueError as error:
        raise RequestError(
            f"the body is not JSON with finite numbers: {error!s:.200}", code="invalid_json"
        ) from error
    return Fields(read, "the body")


class Fields:
    """A JSON object on its way into arguments. A field that is null counts as one that is not there."""

    def __init__(self, value: object, where: str) -> None:
        """`where` is what messages call it.

        Raises:
            RequestError: it is no object.
        """
        if not isinstance(value, Mapping):
            raise RequestError(f"{where} must be a JSON object; found {shown(value)}", code="invalid_type")
        self._left = {name: item for name, item in value.items() if item is not None}
        self._where, self._known = where, set[str]()

    def take(self, name: str) -> Any:
        """The value of a field, whatever it is; None: it is not there."""
        self._known.add(name)
        return self._left.pop(name, None)

    def number(
        self, name: str, default: _Value, *, least: float, most: float = float("inf")
    ) -> float | _Value:
        """A number from `least` to `most`."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise self._wrong(name, value, "a number")
        if not least <= value <= most:
            raise RequestError(f"{name} is {value}; the server takes {_range(least, most)}")
        return float(value)

    def integer(self, name: str, default: _Value, *, least: int, most: int, why: str = "") -> int | _Value:
        """An integer from `least` to `most`; `why` follows these in the message."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) is not int:
            raise self._wrong(name, value, "an integer")
        if not least <= value <= most:
            raise RequestError(f"{name} is {value}; the server takes {_range(least, most)}{why}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """A text."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, value, "a text")
        return value

    def texts(self, name: str, *, most: int) -> tuple[str, ...]:
        """A text or a list of up to `most` texts."""
        value = self.take(name)
        if value is None:
            return ()
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self._wrong(name, value, "a text or a list of texts")
        if len(found) > most:
            raise RequestError(f"{name} has {len(found)} texts; the server takes up to {most}")
        return tuple(found)

    def ids(self, name: str, *, vocabulary: int, most: int | None = None) -> list[int]:
        """A list of token ids below `vocabulary`, of any length unless `most` is given."""
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise self._wrong(name, value, "a list of token ids, which are integers")
        if most is not None and len(value) > most:
            raise RequestError(f"{name} has {len(value)} ids; the server takes up to {most}")
        if outside := [token for token in value if not 0 <= token < vocabulary]:
            raise RequestError(
                f"{name} has the token id {outside[0]}, which is not in the vocabulary of {vocabulary} ids, 0 to {vocabulary - 1}"
            )
        return value

    def items(self, name: str, *, where: Callable[[int], str]) -> list["Fields"]:
        """A list of objects; `where` names each."""
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(name, value, "a list of objects")
        return [Fields(each, where(index)) for index, each in enumerate(value)]

    def part(self, name: str) -> "Fields":
        """An object; an empty one if it is not there."""
        value = self.take(name)
        return Fields({} if value is None else value, name)

    def neutral(self, name: str, *values: object) -> None:
        """A field of which only values that change nothing are taken; it is not supported otherwise."""
        value = self.take(name)
        if value is None or any(value == each and type(value) in _like(each) for each in values):
            return
        allowed = " or ".join(map(shown, values)) if values else "null"
        raise RequestError(
            f"{name} is {shown(value)}, and this server does not support it: leave it out, or set it to {allowed}",
            code="unsupported_parameter",
        )

    def ignored(self, *names: str) -> None:
        """Fields that say nothing to this server."""
        for name in names:
            self.take(name)

    @property
    def rest(self) -> dict[str, Any]:
        """The fields that nothing was asked of yet."""
        return dict(self._left)

    def finish(self) -> None:
        """Refuses fields that nobody has asked for.

        Raises:
            RequestError: names the first of them, and the known one most like it.
        """
        for name in self._left:
            like = nearest(name[:_SHOWN], sorted(self._known))
            meant = f"; did you mean {like[0]!r}?" if like else ""
            raise RequestError(
                f"{self._where} has the field {shown(name)}, which this server does not know: leave it out{meant}",
                code="unknown_parameter",
            )

    def _wrong(self, name: str, value: object, needed: str) -> RequestError:
        return RequestError(f"{name} must be {needed}; found {shown(value)}", code="invalid_type")


def _range(least: float | int, most: float | int) -> str:
    return f"{least:,} to {most:,}" if isinstance(most, int) else f"{least:g} to {most:g}"


def _like(value: object) -> Sequence[type]:
    """The types in which a value of JSON may mean the same: 1 and 1.0 do, 1 and true do not."""
    return (int, float) if type(value) in (int, float) else (type(value),)
