"""Writes the tables of docs/data_sets.md from the definitions of data sets.

python docs/generate_data_sets.py
"""

from pathlib import Path

from feddg.data.data_set import DATA_SETS, DataSet

PAGE = Path(__file__).parent / "data_sets.md"
MARK = "<!-- data sets -->\n"
LARGEST_LIST = 12


def data_sets() -> list[DataSet]:
    """Returns our data sets that are published, in the order of their names."""
    ours = (one for _, one in sorted(DATA_SETS.items()) if one.load is not None)
    return [one for one in ours if one.publication and one.load.__module__.startswith("feddg.")]


def page(text: str) -> str:
    """Returns the page with fresh tables."""
    head, mark, _ = text.partition(MARK)
    return head + mark + _overview() + "".join(map(_section, data_sets()))


def _overview() -> str:
    lines = ["\n| `--data` | domains | classes | images | natural clients | how to get it |\n"]
    lines.append("|---|---|---|---|---|---|\n")
    for one in data_sets():
        images = sum(one.counts.values()) or sum(one.split_counts.values())
        cells = (
            f"[`{one.name}`](#{one.name})",
            str(len(one.domains) or "as in its files"),
            str(one.class_count or len(one.classes) or "as in its files"),
            f"{images:,}" if images else "as in its files",
            one.clients or "-",
            _had(one),
        )
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def _had(one: DataSet) -> str:
    about = one.publication
    assert about is not None
    if one.summary.endswith("built in"):
        return "built in"
    if about.down and not about.mirror:
        return f"host down since {about.down}"
    return f"`feddg data get {one.name}`" if about.files or about.mirror else "by hand"


def _section(one: DataSet) -> str:
    assert one.publication is not None
    about = one.publication
    lines = [f"\n### {one.name}\n\n{one.summary[0].upper()}{one.summary[1:]}.\n\n"]
    lines += [f"- Layout: {layout}\n" for layout in one.layouts]
    if one.domains:
        counted = [f"{name} {one.counts[name]:,}" for name in one.domains if name in one.counts]
        lines.append(f"- Domains in order: {', '.join(counted or one.domains)}\n")
    if one.split_counts:
        counts = ", ".join(f"{role} {count:,}" for role, count in one.split_counts.items())
        lines.append(f"- Official split: {counts}\n")
    if one.classes and len(one.classes) <= LARGEST_LIST and one.classes[0] != "0":
        lines.append(f"- Classes in order: {', '.join(one.classes)}\n")
    if one.protocol:
        lines.append(f"- Protocol: {one.protocol}\n")
    if one.options is not None:
        for name, field in one.options.model_fields.items():
            lines.append(f"- `data.options.{name}`: {field.description}\n")
    if _had(one) == "built in":  # `feddg data get` prints those of the others
        lines.append(f"- Cite: {about.citation}\n")
    if about.licence:
        lines.append(f"- Licence: {about.licence}\n")
    if about.mirror:
        place = f"<https://huggingface.co/datasets/{about.mirror.name}>"
        lines.append(f"- Mirror: {place} (`feddg[parquet]`)\n")
    return "".join(lines)


def main() -> None:
    """Rewrites the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
