"""Make Triton's interpreter faster: most of its time goes to types of values, not to their arithmetic.

It looks through all of `triton.language` at each call of a function of a kernel, makes tables of types for each type
that it looks up, and describes the shape of each value anew. It looks for overflows of whole numbers with seven
operations of its own, and ignores what they find. Here each shape is checked once, and an overflow is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.language import core, semantic
from triton.language.core import _unwrap_shape, constexpr, validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as it

EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


class Shape(NamedTuple):
    """A shape and its number of elements, as they are in a type and in a value."""

    shape: Any
    numel: int
    sizes: Any
    count: Any


class Kept:
    """Stands for changes of `triton.language` that stay, because nothing is compiled in this process."""

    def restore(self) -> None:
        """Do nothing."""


def hasten() -> None:
    """Change the interpreter and `triton.language` in this process."""
    _change_language_once()
    _look_up_types_once()
    _describe_shapes_once()
    _pass_values_on()
    TritonSemantic.binary_op_sanitize_overflow_impl = _find_overflows


def _change_language_once() -> None:
    change, changed, functions = it._patch_lang, set[frozenset[int]](), set[Any]()

    def change_once(fn: Any) -> Kept:
        if fn not in functions:
            functions.add(fn)
            languages = frozenset(id(x) for x in fn.__globals__.values() if x is tl or x is tl.core)
            if languages not in changed:
                change(fn)
                changed.add(languages)
        return Kept()

    it._patch_lang = change_once


def _look_up_types_once() -> None:
    look_up, types = it._get_np_dtype, dict[str, Any]()

    def look_up_once(kind: Any) -> Any:
        own = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(own, tl.pointer_type):
            return look_up(own)
        if own.name not in types:
            types[own.name] = look_up(own)
        return types[own.name]

    it._get_np_dtype = look_up_once


def _describe_shapes_once() -> None:
    block, shapes, scalar = tl.block_type, dict[tuple[int, ...], Shape](), _described(())

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(_unwrap_shape(shape))
        if sizes not in shapes:
            if not sizes:
                raise TypeError("0d block_type is forbidden")
            shapes[sizes] = _described(sizes)
        self.element_ty, self.described = element_ty, shapes[sizes]
        self.shape, self.numel = self.described[:2]

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        found = block.__new__(block)
        found.__dict__.update(self.__dict__, element_ty=scalar_ty)
        return found

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        found = kind.described if kind.is_block() else scalar
        self.shape, self.numel = found.sizes, found.count

    def equal(self: Any, other: object) -> bool:
        return isinstance(other, block) and self.described is other.described and self.element_ty == other.element_ty

    block.__init__, tl.tensor.__init__, block.__eq__ = make_block, make_tensor, equal
    block.with_element_ty = with_element_ty
    block.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")


def _described(sizes: tuple[int, ...]) -> Shape:
    shape = tl.tuple(list(sizes))
    return Shape(shape, validate_block_shape(shape), tl.tuple([constexpr(n) for n in sizes]), constexpr(prod(sizes)))


def _pass_values_on() -> None:
    """Return values that are no constants, and those of equal shapes, without a look at their parts."""
    unwrap, broadcast = core._unwrap_if_constexpr, TritonSemantic.broadcast_impl_value

    def unwrap_if_constexpr(value: Any) -> Any:
        if isinstance(value, constexpr):
            return value.value
        return unwrap(value) if isinstance(value, (list, tuple, tl.tuple)) else value

    def broadcast_if_unequal(self: Any, lhs: Any, rhs: Any) -> Any:
        kinds = [x.type.described if x.type.is_block() else None for x in (lhs, rhs)]
        return (lhs, rhs) if kinds[0] is kinds[1] else broadcast(self, lhs, rhs)

    core._unwrap_if_constexpr = semantic._unwrap_if_constexpr = unwrap_if_constexpr
    TritonSemantic.broadcast_impl_value = broadcast_if_unequal


def _find_overflows(self: Any, lhs: Any, rhs: Any, binary_op: Callable[..., Any]) -> None:
    """Raise AssertionError if signed numbers of less than 64 bits overflow; unsigned ones do so on purpose."""
    kind = lhs.type.scalar
    if kind.int_bitwidth >= 64 or not kind.is_int_signed():
        return
    a, b = (x.handle.data.astype(np.int64) for x in (lhs, rhs))
    found = EXACT[binary_op.__name__](a, b)
    least, most = kind.get_int_min_value(), kind.get_int_max_value()
    if found.size and not (least <= found.min() and found.max() <= most):
        raise AssertionError(f"int{kind.int_bitwidth} overflow detected for operation {binary_op.__name__}")
