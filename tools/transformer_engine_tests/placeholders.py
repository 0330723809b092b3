# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Names of Transformer Engine that are not here, importable so that a file of tests is collected all the same.

A `Placeholder` stands for such a name. In a test, `MissingName` is raised where it is used: called, subscripted, asked
for an attribute, or an object of a class derived from it made. While a file is imported, most uses give a placeholder
again, because tests write tables of parameters with them, such as ``[tex.DType.kFloat8E4M3]``; the test that is given
one then raises. What has no such answer, as the truth of a placeholder, raises at once, and the file with it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from te_dispatch.compat.alias import as_transformer_engine
from te_dispatch.compat.face import ABSENT, FACE, ROOT

#: The packages below which every module can be imported: the alias, and Transformer Engine's native module.
ROOTS = (ROOT, "transformer_engine_torch")

#: Where a placeholder keeps its name; no attribute that a test asks for.
_NAME = "(name)"


class MissingName(BaseException):
    """A test used a name that is not here. Not an Exception: ``pytest.raises(Exception)`` must not take it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Placeholder:
    """Stands for a name that is not here. No object is an instance of it."""

    #: Whether a test is running, in which every use raises, or a file is being imported.
    in_test = False

    def __new__(cls, name: str) -> Placeholder:
        """Of a type of its own, which messages such as "str expected, not ..." name."""
        return super().__new__(type(f"Placeholder of {name}", (Placeholder,), {}))

    def __init__(self, name: str) -> None:
        self.__dict__[_NAME] = name

    def _raise(self, *_: Any) -> NoReturn:
        raise MissingName(self.__dict__[_NAME])

    def _use(self, *_: Any) -> Placeholder:
        return self._raise() if Placeholder.in_test else self

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # protocols are looked for in every object
            raise AttributeError(attribute)
        return self._use()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not Placeholder.in_test and len(args) == 1 and not kwargs and inspect.isfunction(args[0]):
            return self._decorated(args[0])
        return self._use()

    def _decorated(self, function: Any) -> Any:
        """A decorator that is not here leaves a function that pytest collects."""

        @functools.wraps(function)
        def raising(*_: Any, **__: Any) -> NoReturn:
            self._raise()

        return raising

    def __mro_entries__(self, _: Any) -> tuple[type]:
        return (type(self.__dict__[_NAME].rpartition(".")[2], (), {"__init__": lambda *_, **__: self._raise()}),)

    def __instancecheck__(self, _: Any) -> bool:
        return False

    def __subclasscheck__(self, _: Any) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<{self.__dict__[_NAME]} is not here>"

    __getitem__ = __or__ = __ror__ = _use
    __setattr__ = __setitem__ = __delattr__ = __delitem__ = __iter__ = __len__ = __bool__ = __contains__ = _raise
    __lt__ = __le__ = __gt__ = __ge__ = __int__ = __float__ = __index__ = __enter__ = __exit__ = _raise


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below `ROOTS` that no finder before it has found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in ROOTS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        _fill(module)


def _fill(module: ModuleType) -> None:
    """Have a module answer with a placeholder where it has no such name."""
    known = module.__dict__.get("__getattr__")

    def attribute(name: str) -> Any:
        if name.startswith("__") or name in sys.modules:  # pickle looks in all modules for what it finds in none
            raise AttributeError(name)
        try:
            if known is not None:
                return known(name)
        except AttributeError:
            pass
        return Placeholder(f"{module.__name__}.{name}")

    module.__dict__.setdefault("__path__", [])
    module.__dict__["__getattr__"] = attribute


class _Logging:
    """``AttentionLogging``: here `te_dispatch` logs choices when ``NVTE_DEBUG`` says so."""

    _is_logging_setup = True


#: Names that only tests use: they are not in the alias, because what is written to the first has no effect there.
#: Tests write to it that the variables are to be read again, as every call does here. The last is the name of a
#: variable that tests put back as it was; nothing here reads it.
_OF_TESTS: dict[str, dict[str, Any]] = {
    f"{ROOT}.pytorch.attention.dot_product_attention": {"_attention_backends": {}},
    f"{ROOT}.pytorch.attention.dot_product_attention.utils": {"AttentionLogging": _Logging},
    f"{ROOT}.pytorch._extra_state": {"UNSAFE_PICKLE_EXTRA_STATE_ENV": "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"},
}


def _give_numbers() -> None:
    """``FusedAttnBackend`` where tests import it. The alias lacks the module, because programs that find it take its
    functions to be there."""
    name = f"{ROOT}.pytorch.cpp_extensions.fused_attn"
    numbers = importlib.import_module("te_dispatch.pytorch.attention.backends").FusedAttnBackend
    importlib.import_module(name).__dict__["FusedAttnBackend"] = numbers


def install() -> None:
    """Load the alias and put placeholders wherever it has no name."""
    as_transformer_engine()
    for name in FACE:
        module = importlib.import_module(name)
        _fill(module)
        for absent in ABSENT.get(name, ()):
            setattr(module, absent, Placeholder(f"{name}.{absent}"))
    sys.meta_path.append(_Finder())
    for name, names in _OF_TESTS.items():
        importlib.import_module(name).__dict__.update(names)
    _give_numbers()
