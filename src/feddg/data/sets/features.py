"""The user's own table of features: one row an image, extracted by any network beforehand."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from feddg.data.columns import check_cells
from feddg.data.data_set import checked_options, define
from feddg.data.images import ImageTable, is_printable
from feddg.data.published import needs_root
from feddg.data.sets.table_of_images import ColumnOptions, images_of_columns
from feddg.diagnostics import warn
from feddg.errors import DataError, first_names, nearest, need
from feddg.settings import DataSettings
from feddg.storage import file_faults, is_file

if TYPE_CHECKING:
    from pandas import DataFrame

SOURCE = "features"
PARQUET = (".parquet", ".pq")
ENDINGS = (".csv", *PARQUET, ".safetensors")
MISSING = ["", "NaN", "nan", "-nan", "NA", "N/A", "#N/A", "NULL", "null", "None"]
"""How a CSV file may write a feature that is missing."""


def list_features(root: Path | None, options: ColumnOptions) -> ImageTable:
    """Lists the rows of a table of features, each with class and domain.

    Args:
        root: a CSV, Parquet or safetensors file. Columns other than those of the options are
            numbers, one feature each, or a single column holds lists of them. In safetensors,
            every column is a tensor of ``n`` rows; ``(n, d)`` is d features, called ``NAME 0`` to
            ``NAME d-1`` where there are others.
        options: names of its columns.

    Raises:
        DataError: a column is missing, or a row is wrong; the message names it.
    """
    file = needs_root(SOURCE, root)
    frame = _frame(file, options)
    _require(frame, file, options)
    texts = _texts(frame, file, options)
    names, features = _features(frame, file, options)
    rows = range(1, len(frame) + 1)
    return images_of_columns(
        texts,
        lambda place: f"row {place + 1} of {file.name}",
        root=None,
        paths=texts.get("path") or [f"{file.name}#{row}" for row in rows],
        listed_in=file.name,
        listed_rows=rows if "path" in texts else None,
        images=features,
        feature_names=names,
    )


def count_features(data: DataSettings) -> int:
    """Returns the number of features in the file that an experiment names.

    Raises:
        DataError: it cannot be read.
    """
    file = needs_root(SOURCE, data.root)
    options = checked_options(SOURCE, ColumnOptions, data.all_options)
    frame = _frame(file, options)
    _require(frame, file, options)
    return int(_features(frame, file, options, warns=False)[1].shape[1])


def read_rows(
    file: Path, options: Mapping[str, object], features: Sequence[str] = ()
) -> list[tuple[str, np.ndarray]]:
    """Returns name and features ``(d,)`` float32 of every row of a table without labels.

    Args:
        file: a table as :func:`list_features` reads it; class and domain may be missing.
        options: the options of the run's own table.
        features: the columns that the model was trained on; empty if unknown.

    Raises:
        DataError: it cannot be read, or has other columns; the message names the row or column.
    """
    checked = checked_options(SOURCE, ColumnOptions, options)
    frame = _frame(file, checked)
    rows = _texts(frame, file, checked, ["path"]).get("path")
    names, vectors = _features(frame, file, checked)
    if features and (fault := columns_fault(names, features)):
        raise DataError(f"{file} {fault} that the model was trained on; rename or take them out.")
    return list(zip(rows or [f"{file}#{row}" for row in range(1, len(frame) + 1)], vectors))


def columns_fault(names: Sequence[str], expected: Sequence[str]) -> str | None:
    """Returns how columns of features differ from others, to be followed by which; or None.

    They are compared by name, as every table's are put in the order of their names.
    """
    missing, more = (
        [repr(name) for name in some if name not in others]
        for some, others in ((expected, {*names}), (names, {*expected}))
    )
    parts = [f"lacks {first_names(missing, 3)}"] * bool(missing)
    parts += [f"has {first_names(more, 3)}"] * bool(more)
    return f"{' and '.join(parts)}: its columns are not those" if parts else None


def _frame(file: Path, options: ColumnOptions) -> "DataFrame":
    import pandas

    ending = file.suffix.lower()
    if ending not in ENDINGS or not is_file(file):
        raise DataError(
            f"{file} is no table of features: a file that ends in {', '.join(ENDINGS)}."
        )
    if ending in PARQUET:
        need("parquet", str(file), otherwise="write it as CSV")
    headings: list[str] = []
    with file_faults(DataError, f"Cannot read {file}", ValueError, SafetensorError):
        if ending == ".csv":
            first = pandas.read_csv(file, nrows=1, header=None, dtype=str, keep_default_na=False)
            headings = first.iloc[0].tolist()  # pandas calls a second f1 f1.1
            texts = set(options.columns.values()) & set(headings)
            frame = pandas.read_csv(  # names stay as they are written: 007, 1.10, None
                file,
                dtype=dict.fromkeys(texts, str),
                keep_default_na=False,
                na_values={name: [""] if name in texts else MISSING for name in headings},
            )
        elif ending in PARQUET:
            frame = pandas.read_parquet(file)
        else:
            known = (torch.float16, torch.float32, torch.float64)  # NumPy knows no others
            tensors = {
                name: (t.float() if t.is_floating_point() and t.dtype not in known else t).numpy()
                for name, t in load_file(file).items()
            }
            alone = len(tensors.keys() - set(options.columns.values())) == 1
            columns: dict[str, object] = {}
            for name, tensor in tensors.items():
                one = name in options.columns.values()
                if not 1 <= tensor.ndim <= 2 or (one and tensor[:1].size > 1):
                    expected = "(n,)" if one else "(n,) or (n, d)"
                    raise DataError(
                        f"{file}: the column {name!r} is {tensor.shape}: expected {expected}."
                    )
                if one or tensor.ndim == 1:
                    columns[name] = tensor.ravel()
                elif alone:  # a column of lists, as in Parquet
                    columns[name] = list(tensor)
                else:
                    columns |= {f"{name} {place}": part for place, part in enumerate(tensor.T)}
            frame = pandas.DataFrame(columns)
    if not len(frame):
        raise DataError(f"{file} has no rows.")
    frame.columns = pandas.Index(map(str, frame))
    headings = headings or frame.columns.tolist()
    if twice := next((name for name, count in Counter(headings).items() if count > 1), None):
        raise DataError(f"{file} has two columns called {twice!r}; rename one.")
    if odd := next((name for name in headings if not is_printable(name)), None):
        raise DataError(f"{file} has a column {odd!r}, which cannot be printed; rename it.")
    return frame


def _require(frame: "DataFrame", file: Path, options: ColumnOptions) -> None:
    for name in options.required(("label", "domain")):
        if name not in frame:
            raise DataError(
                f"{file} has no column {name!r}{nearest(name, [*frame])}; it has: "
                f"{first_names([*frame])}. Say what it is called: --set data.options.label=NAME, "
                "and domain, client, group, split, path so; --subgroups NAME,NAME."
            )


def _texts(
    frame: "DataFrame", file: Path, options: ColumnOptions, wanted: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Returns the cells of all columns that are no features, or of those wanted, by option."""
    result: dict[str, list[str]] = {}
    for option, column in options.columns.items():
        if column in frame and (not wanted or option in wanted):
            cells = zip(frame[column], frame[column].isna())
            result[option] = ["" if missing else str(value).strip() for value, missing in cells]
            check_cells(column, result[option], lambda place: f"row {place + 1} of {file.name}")
    return result


def _features(
    frame: "DataFrame", file: Path, options: ColumnOptions, *, warns: bool = True
) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the names of the features' columns, in their order, and ``(n, d)`` float32.

    A single column may hold a list of them in every row.
    """
    named = set(options.columns.values())
    rest = sorted({*map(str, frame)} - named, key=lambda name: (_natural(name), name))
    nameless = next((name for name in rest if name.startswith("Unnamed: ")), None)
    if nameless:  # pandas' number of the row, which tells the class where rows are sorted by it
        raise DataError(
            f"{file} has a column without a name, which pandas calls {nameless!r}: write the file "
            "with index=False, or give the column a name."
        )
    if not rest:
        raise DataError(f"{file} has no column of features besides {', '.join(map(str, frame))}.")
    if len(rest) == 1 and frame[rest[0]].dtype == object:
        lists = [np.asarray(vector) for vector in frame[rest[0]]]
        odd = [row for row, one in enumerate(lists) if one.shape != lists[0].shape or one.ndim != 1]
        if odd or not np.issubdtype(np.result_type(*lists), np.number):
            row = odd[0] if odd else 0
            if lists[row].shape == lists[0].shape:
                raise DataError(f"{file} has the column {rest[0]!r}, which holds no numbers.")
            raise DataError(
                f"row {row + 1} of {file.name} has {lists[row].size} features as {rest[0]}, the "
                f"first row {lists[0].size}; every row needs a list of as many numbers."
            )
        features = np.stack(lists)
    else:
        text = [name for name in rest if frame[name].dtype.kind not in "biuf"]
        if text:
            raise DataError(
                f"{file} has the column {text[0]!r}, which holds no numbers. Take it out, or say "
                "what it is: --set data.options.path=NAME, and label, domain, client, split so."
            )
        features = frame[rest].to_numpy(na_value=np.nan)
    with np.errstate(over="ignore"):  # it is infinite then
        exact, features = features.astype(np.float64), features.astype(np.float32)
    rounded = (abs(features) >= 2**24) & (exact != features) & (exact == np.rint(exact))
    if warns and len(places := np.flatnonzero(rounded.any(0))):
        large = [rest[place] for place in places] if len(rest) > 1 else rest
        warn(
            "features-rounded",
            f"{file.name} has whole numbers above {2**24:,} in {first_names(large)}: features are "
            "float32, which rounds them.",
            "Subtract what all have in common, or take numbers out that only name something.",
        )
    bad = np.flatnonzero(~np.isfinite(features).all(1))
    if len(bad):
        raise DataError(f"row {bad[0] + 1} of {file.name} has a feature that is NaN or infinite.")
    return tuple(rest), np.ascontiguousarray(features)


def _natural(name: str) -> list[str]:
    """Sorts names by the numbers in them: f2 before f10."""
    return [part.zfill(12) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


define(SOURCE, list_features, ColumnOptions)
