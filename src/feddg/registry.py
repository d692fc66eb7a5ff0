"""Registries of definitions by name: ours, the caller's, and those of other packages.

Methods, data sets, codecs, adaptations, defences, metrics and selection rules are definitions in
registries. A registry finds our definitions in a module or a package's modules, and those of other
packages through an entry-point group; programs can add theirs.
"""

import importlib
import logging
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from feddg.errors import FeddgError, nearest

log = logging.getLogger("feddg")
T = TypeVar("T")
D = TypeVar("D")


class Registry(Mapping[str, T], Generic[T]):
    """Definitions by name; all are loaded at the first look-up.

    A definition is found by its ``name``, or an entry point's if it has none, and by its
    ``aliases``.

    Args:
        kind: what is registered, in one or two words for messages: ``data set``.
        package: dotted name of the module or package that registers our own; None for none.
        group: entry-point group of other packages' definitions; None for none.
        error: the exception for a name that is unknown or taken.
        where: the command that lists all names, for messages.
        adopt: converts the object of another package's entry point to a definition, or raises what
            is wrong with it; by default the object itself is used.
        made_of: the class of definitions, if an entry point must give an object or subclass of it
            that is called as the entry point.
    """

    def __init__(
        self,
        kind: str,
        package: str | None = None,
        *,
        group: str | None = None,
        error: type[FeddgError] = FeddgError,
        where: str | None = None,
        adopt: Callable[[str, object], T] | None = None,
        made_of: type | None = None,
    ) -> None:
        self.kind, self._package, self._group = kind, package, group
        self._error, self._where = error, where
        self._adopt, self._made_of = adopt, made_of
        self._found: dict[str, T] = {}
        self._broken: dict[str, str] = {}
        self._aliases: dict[str, str] = {}
        self._complete = self._loading = False
        self._lock = threading.RLock()

    def add(self, name: str, definition: T, aliases: tuple[str, ...] = ()) -> T:
        """Registers a definition; registering the same one again (a module read twice) is allowed.

        Raises:
            FeddgError: another definition has the name or an alias.
        """
        for taken in (name, *aliases):
            other = self._found.get(self._aliases.get(taken, taken))
            if other is not None and not _alike(other, definition):
                raise self._error(
                    f"two {self.kind}s are called {taken!r}: {_origin(other)} and "
                    f"{_origin(definition)}; rename one"
                )
        self._found[name] = definition
        self._aliases |= dict.fromkeys(aliases, name)
        return definition

    def register(self, definition: D) -> D:
        """Adds a definition under its own name and aliases, and returns it; decorates classes.

        Raises:
            FeddgError: it has no name, or another definition has the name or an alias.
        """
        entry: Any = definition
        if not entry.name:
            raise self._error(f'{_origin(entry)} has no name; give the class a name = "..."')
        self.add(entry.name, entry, getattr(entry, "aliases", ()))
        return definition

    def find(self, name: str) -> T:
        """Returns the definition with this name or alias.

        Raises:
            FeddgError: there is none (the message names the nearest and lists all), or it cannot be
                loaded.
        """
        self._load()
        listed = self._aliases.get(name, name)
        if listed not in self._found and listed in self._broken:
            raise self._error(f"{self.kind} {name!r} {self._broken[listed]}")
        if listed not in self._found:
            near = nearest(name, [*self._found, *self._aliases])
            remedy = f"`{self._where}` lists them" if self._where else f"there are: {self.names()}"
            raise self._error(f"unknown {self.kind} {name!r}{near}; {remedy}")
        return self._found[listed]

    def names(self) -> str:
        """Returns all names, sorted, as text for messages."""
        return ", ".join(sorted(self))

    def __getitem__(self, name: str) -> T:
        self._load()
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(self._found)

    def __len__(self) -> int:
        self._load()
        return len(self._found)

    def _load(self) -> None:
        if self._complete:
            return
        with self._lock:  # other threads, such as those that decode images, wait until all is read
            if self._complete or self._loading:  # a module may look in here while it is read
                return
            self._loading = True
            try:
                self._load_all()
                self._complete = True
            finally:
                self._loading = False

    def _load_all(self) -> None:
        if self._package is not None:
            ours = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(getattr(ours, "__path__", ())):
                importlib.import_module(f"{self._package}.{module.name}")
        for entry in entry_points(group=self._group) if self._group else ():
            self._load_entry(entry.name, entry.value, entry.load)

    def _load_entry(self, name: str, value: str, load: object) -> None:
        try:
            loaded: Any = load()  # type: ignore[operator]
            kind = loaded if isinstance(loaded, type) else type(loaded)
            if self._made_of and not (
                issubclass(kind, self._made_of) and getattr(loaded, "name", name) == name
            ):
                expected = f"a {self._made_of.__name__} called {name!r}"
                raise self._error(f"expected {expected}, found {loaded!r}")
            adopted: Any = self._adopt(name, loaded) if self._adopt else loaded
            if hasattr(adopted, "name"):
                self.register(adopted)
            else:
                self.add(name, adopted)
        except Exception as error:  # a broken plug-in must not take the others down
            self._broken[name] = f"of {value} cannot be loaded: {error}"
            log.warning("%s %r %s", self.kind, name, self._broken[name])


def _alike(one: object, other: object) -> bool:
    """Whether two definitions are the same, perhaps from a module that was read twice."""
    if one is other or one == other:
        return True
    # Functions in functions (<locals>) and lambdas share names without being one.
    return _maker(one) is not None and _origin(one) == _origin(other) and "<" not in _origin(one)


def _maker(definition: object) -> Any:
    """Returns what identifies a definition: a class or function, or its first one; or None."""
    values = (definition, *getattr(definition, "__dict__", {}).values())
    return next((value for value in values if hasattr(value, "__qualname__")), None)


def _origin(definition: object) -> str:
    owner = _maker(definition) or type(definition)
    return f"{owner.__module__}.{owner.__qualname__}"
