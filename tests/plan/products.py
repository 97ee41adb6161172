"""Finds the matrix products in programs, and those with dimensions that GPU kernels do not support at full speed."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ALIGNED = 8
"""Multiple of the dimensions of 16-bit products at which NVIDIA's kernels have full speed: 16 bytes, see "Matrix Multiplication Background User's Guide" at docs.nvidia.com."""

_HLO = re.compile(r"\s*(?:ROOT )?%([\w.-]+) = (\(?\w+\[([\d,]*)\].*)")
_HLO_PRODUCT = re.compile(r'(?: dot\(|custom-call\((?=.*"__cublas))%([\w.-]+), %([\w.-]+)')
_STABLEHLO_PRODUCT = re.compile(
    r"dot_general .*?(?:batching_dims = \[(?P<batch>[^]]*)\] x \[(?P<others_batch>[^]]*)\], )?"
    r"contracting_dims = \[(?P<inner>[^]]*)\] x \[(?P<others_inner>[^]]*)\].*"
    r" : \(tensor<(?P<left>[\dx]*)x\w+>, tensor<(?P<right>[\dx]*)x\w+>\) .* loc\((?P<where>#loc\d+)\)"
)


class Product(NamedTuple):
    """A matrix product. Entries of a batch are separate products."""

    rows: int
    inner: int
    columns: int
    op: str
    """The operation's name in the program, which contains the subscripts of `einsum`."""

    @property
    def is_aligned(self) -> bool:
        """Whether all dimensions are multiples of `ALIGNED`."""
        return not any(size % ALIGNED for size in self[:3])


def lowered_products(text: str) -> Iterator[Product]:
    """Yields the matrix products of a lowered program, from `lowered.as_text(debug_info=True)`."""
    names = dict(re.findall(r'^(#loc\d+) = loc\("([^"]*)"', text, re.MULTILINE))
    for found in _STABLEHLO_PRODUCT.finditer(text):
        left, right = ([int(size) for size in found[side].split("x")] for side in ("left", "right"))
        dims = [found[part] or "" for part in ("inner", "batch", "others_inner", "others_batch")]
        yield _product(left, right, [_numbers(each) for each in dims], names.get(found["where"], ""))


def compiled_products(text: str) -> Iterator[Product]:
    """Yields the matrix products of a compiled program. XLA may have padded the inner dimension to compute the sum in parts."""
    shapes: dict[str, list[int]] = {}
    for line in filter(None, map(_HLO.match, text.splitlines())):
        shapes[line[1]] = _numbers(line[3])
        if found := _HLO_PRODUCT.search(line[2]):
            sides = [f"{side}_{kind}_dim" for side in ("lhs", "rhs") for kind in ("contracting", "batch")]
            dims = [re.search(rf'{side}(?:s=\{{|ensions":\[)([\d,"]*)', line[2]) for side in sides]
            op = re.search(r'op_name="([^"]*)"', line[2])
            numbers = [_numbers(each[1]) if each else [] for each in dims]
            yield _product(shapes[found[1]], shapes[found[2]], numbers, op[1] if op else line[1])


def _product(left: Sequence[int], right: Sequence[int], dims: Sequence[Sequence[int]], op: str) -> Product:
    inner, batch, others_inner, others_batch = dims

    def others(shape: Sequence[int], without: Sequence[int]) -> int:
        return math.prod(size for dim, size in enumerate(shape) if dim not in without)

    rows, columns = others(left, [*inner, *batch]), others(right, [*others_inner, *others_batch])
    return Product(rows, math.prod(left[dim] for dim in inner), columns, op)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
