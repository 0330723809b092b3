# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A vendor's libraries, opened at run time: one file of each, the first that opens of

1. the copy that the process already holds (PyTorch brings one),
2. the places that the backend names, such as packages of Python or a folder of the user's,
3. the system's, by the name that the dynamic linker knows.

Two copies of one library in a process do harm (two cuDNNs switch its fused attention off, two HIP runtimes know nothing
of each other's memory), so this module never opens a second one, and warns with `DuplicateLibraryWarning` where
somebody else did. Imports no torch.
"""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAPS = "/proc/self/maps"

Version = tuple[int, int, int]
#: (folder, where it comes from): a place to look for files in.
Place = tuple[str, str]


class DuplicateLibraryWarning(UserWarning):
    """Two different files of one vendor library are loaded into this process."""


@dataclass(frozen=True)
class Wanted:
    """A library that a backend can use.

    Attributes:
        name: as in facts: ``version.<name>``.
        sonames: names of files, of the majors that the backend knows the interface of, the newest first. A file in a
            process has one of these, with further numbers behind one that ends in a number.
    """

    name: str
    sonames: tuple[str, ...]


@dataclass(frozen=True)
class Library:
    """An open library.

    Attributes:
        path: the file.
        source: which of this module's steps found it.
        version: three numbers, ``(0, 0, 0)`` where the library does not tell.
    """

    path: str
    source: str
    version: Version

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))


def loaded(wanted: Wanted, maps: str = MAPS) -> tuple[str, ...]:
    """The files of a library that a process has mapped, each once, in the order of their addresses."""
    names = (re.escape(name) + (r"(\.\d+)*" if name[-1].isdigit() else "") for name in wanted.sonames)
    pattern = re.compile(rf"/({'|'.join(names)})( \(deleted\))?$")
    found: dict[str, None] = {}
    try:
        with open(maps, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                start = line.find("/")
                if start >= 0 and pattern.search(path := line[start:].rstrip("\n")):
                    found[os.path.realpath(path.removesuffix(" (deleted)"))] = None
    except OSError:  # not Linux
        return ()
    return tuple(found)


def candidates(
    wanted: Wanted, places: Sequence[Place], held: Sequence[str], system: bool = True
) -> list[tuple[str, str]]:
    """(file or name to open, where it comes from), in the order of this module's steps."""
    if held:
        return [(held[0], "held by the process")]
    files = [(os.path.join(folder, name), source) for name in wanted.sonames for folder, source in places]
    found = [(path, source) for path, source in files if os.path.isfile(path)]
    return found + ([(name, "system") for name in wanted.sonames] if system else [])


def open_library(
    wanted: Wanted,
    places: Sequence[Place],
    version: Callable[[ctypes.CDLL], Version],
    maps: str = MAPS,
    system: bool = True,
) -> Library | str:
    """Open a library, or say in one phrase why there is none.

    Args:
        places: folders to look in, in this order for each name of `wanted`.
        version: asks the open library for its version.
        maps: a file to read instead of the process's own map of memory.
        system: whether the dynamic linker is asked, too.
    """
    held = loaded(wanted, maps)
    if len(held) > 1:
        warnings.warn(duplicate_text(wanted, held), DuplicateLibraryWarning, stacklevel=2)
    errors = []
    for target, source in candidates(wanted, places, held, system):
        try:
            handle = ctypes.CDLL(target)
        except OSError as error:
            errors.append(str(error))
            continue
        now = loaded(wanted, maps)
        path = target if os.path.isabs(target) or not now else now[0]
        return Library(path, source, version(handle))
    names = " or ".join(wanted.sonames)
    if not errors:
        return f"{names} is not in {', '.join(folder for folder, _ in places) or 'any known place'}"
    return f"{names} cannot be opened: {'; '.join(dict.fromkeys(errors))}"


def duplicate_text(wanted: Wanted, paths: Sequence[str]) -> str:
    """What is wrong with a process that holds several copies of a library."""
    return (
        f"this process holds {len(paths)} copies of {wanted.name}: {', '.join(paths)}; the first is used. "
        "Two copies work against each other: leave one on the library path"
    )


def rows(wanted: Wanted, library: Library | str) -> list[tuple[str, str, str]]:
    """(subject, state, reason) of a library, for ``te-dispatch doctor``.

    Args:
        library: what `open_library` answered.
    """
    if isinstance(library, str):
        found = [(wanted.name, "missing", library)]
    else:
        found = [(wanted.name, "ok", f"{library.version_text}, {library.source}: {library.path}")]
    if len(paths := loaded(wanted)) > 1:
        found.append((wanted.name, "warning", duplicate_text(wanted, paths)))
    return found
