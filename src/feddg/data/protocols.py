"""What benchmarks fix: published split files, and which domains are held out in turn."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import numpy as np

from feddg.data.columns import read_columns, read_lists
from feddg.data.data_set import DATA_SETS, DataSet
from feddg.data.images import ImageTable, plain_name, roles_of_domains
from feddg.data.sets.table_of_images import roles_of_texts, tidy_path
from feddg.data.splits import Splits, from_roles
from feddg.diagnostics import emit, note, warn
from feddg.errors import DataError, ExperimentError, first_names, nearest
from feddg.text import counted

Scenario = dict[str, tuple[str, ...]]
PROTOCOLS = {
    "lodo": "leave one domain out: each is the test domain once",
    "ltdo": "leave two domains out: each is the test domain once and the validation domain once",
    "ltdo-all": "leave two domains out: every ordered pair",
}


def from_csv(table: ImageTable, csv_path: Path, skipped: Iterable[str] = ()) -> Splits:
    """Reads a benchmark's split file and matches its rows to the table's by path.

    Args:
        table: all usable images.
        csv_path: a file with at least the columns ``split`` and ``path``, which may be written as
            in a table of images.
        skipped: paths of unusable images, which may be missing in the table.

    Raises:
        DataError: the file cannot be read, lacks a column, has an unknown split, or its rows and
            the table's do not match one to one.
    """
    columns = read_columns(
        csv_path, ("split", "path"), remedy="A split file says both of each image."
    )
    texts, known, root = columns["path"], {*table.paths, *skipped}, table.root or Path()
    listed = [text if text in known else tidy_path(text, root) for text in texts]
    # Copies spell folders differently (Real World, real_world): then plain names are compared.
    spelt = str if {*listed}.issuperset(table.paths) else _plain_path
    paths, listed = [*map(spelt, table.paths)], [*map(spelt, listed)]
    role_of: dict[str, str] = {}
    for path, role, text in zip(listed, roles_of_texts(columns["split"], columns.row), texts):
        if path in role_of:
            raise DataError(f"Split file {csv_path} lists {text} twice.")
        role_of[path] = role
    if len({*paths}) < len(paths):
        raise DataError(f"Split file {csv_path}: some paths differ only in spelling.")
    text_of = dict(zip((*listed, *paths), (*texts, *table.paths)))
    for wrong, what in (
        (role_of.keys() - {*map(spelt, known)}, "lists {} images that are not in the data"),
        ({*paths} - role_of.keys(), "does not list {} images of the data"),
    ):
        if wrong:
            names = first_names([text_of[path] for path in sorted(wrong)], 3)
            raise DataError(
                f"Split file {csv_path} {what.format(len(wrong))}: {names}. Paths must read as in "
                f"the data, for example {table.paths[0]}."
            )
    # An image of a training domain tests no unseen domain, whatever the file calls it.
    given, domains = [role_of[path] for path in paths], table.domains.tolist()
    roles = roles_of_domains(given, domains)
    changed = [domain for domain, old, new in zip(domains, given, roles) if old != new]
    if changed:
        names = first_names([table.domain_names[domain] for domain in sorted(set(changed))])
        text = (
            f"{csv_path} has {counted(len(changed), 'row')} of val and test in domains that train "
            f"({names}): they count as in-domain validation and test."
        )
        emit(note("tests-of-training-domains", text))
    return from_roles(np.array(roles))


def official_roles(table: ImageTable, definition: DataSet) -> ImageTable:
    """Gives a table the split that the data set's own lists of files state (``DataSet.lists``).

    A list has a line ``path label`` for each image and lies beside the domains' folders, above
    them, or in ``splits`` there. An image's role is the first of train, id_val and id_test whose
    list has it: PACS' test lists repeat all images of their domain. Listed images that are not
    there get a warning, since copies of PACS lack some.

    Raises:
        DataError: there are none, one is missing or damaged, an image is in none, or in those of
            training and of validation, or a class has two labels.
    """
    if not definition.lists:
        raise DataError(f"{definition.title} has no official lists: leave out official_lists.")
    root, role_in, role_of = Path(table.root or "."), dict[Path, str](), dict[str, str]()
    for role, domain in product(definition.lists, table.domain_names):
        name = definition.lists[role].format(domain=domain)
        places = [folder / name for folder in (root, root.parent, root.parent / "splits")]
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            raise DataError(
                f"There is no {name} in {root}, above it or in splits there: put the official "
                "lists there, or have the split drawn: --set data.options.official_lists=false"
            )
        role_in[file] = role
    for file, path, _ in read_lists([*role_in])[0]:
        before = role_of.setdefault(_plain_path(path), role_in[file])
        if (before, role_in[file]) == ("train", "id_val"):
            raise DataError(f"{file} lists {path}, which is for training, too.")
    roles = [role_of.pop(_plain_path(path), "") for path in table.paths]
    if "" in roles:
        path = table.paths[roles.index("")]
        raise DataError(f"The official lists lack {roles.count('')} images of {root}, as {path}.")
    if role_of:
        text = f"{root} lacks {len(role_of)} images of the official lists, as {min(role_of)}."
        warn("listed-missing", text)
    return replace(table, split=np.array(roles))


def _plain_path(path: str) -> str:
    *folders, name = path.split("/")
    return "/".join((*map(plain_name, folders), name))


def known_domains(*data_sets: str) -> tuple[str, ...]:
    """Returns the domains of the first of these data sets that defines them.

    So a benchmark can be planned without its images.
    """
    domains = (DATA_SETS[name].domains for name in data_sets if name in DATA_SETS)
    return next(filter(None, domains), ())


def scenarios(protocol: str, domains: Sequence[str], *data_sets: str) -> list[Scenario]:
    """Returns the scenarios of a protocol.

    Args:
        protocol: one of ``PROTOCOLS``.
        domains: the data set's domains.
        data_sets: the first whose ``validated_by`` is of these domains gives the validation domain
            for each test domain; without one, the next in the list validates.

    Raises:
        ExperimentError: unknown protocol, or too few domains for it.
    """
    if protocol not in PROTOCOLS:
        protocols = "; ".join(f"{name}: {text}" for name, text in PROTOCOLS.items())
        raise ExperimentError(
            f"unknown protocol {protocol!r}{nearest(protocol, PROTOCOLS)}; there are: {protocols}"
        )
    needed = 2 if protocol == "lodo" else 3
    if len(domains) < needed:
        raise ExperimentError(f"{protocol} needs {needed} domains or more, got {list(domains)}")
    if protocol == "lodo":
        return [{"test": (name,), "val": ()} for name in domains]
    if protocol == "ltdo-all":
        return [{"test": (test,), "val": (val,)} for val, test in permutations(domains, 2)]
    pairs = (DATA_SETS[name].validated_by for name in data_sets if name in DATA_SETS)
    next_ones = dict(zip(domains, (*domains[1:], domains[0])))
    validates = next((named for named in pairs if set(named) == set(domains)), next_ones)
    return [{"test": (name,), "val": (validates[name],)} for name in domains]
