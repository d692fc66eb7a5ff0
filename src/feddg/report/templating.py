"""Templates of pages: found in a package, every text escaped."""

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


def template_named(name: str, package: str = "feddg.report", folder: str = "templates") -> Template:
    """Returns a template; it escapes every text, and a name it does not know raises.

    Args:
        name: the file's name.
        package: whose templates.
        folder: where in the package they are.
    """
    templates = Environment(
        loader=PackageLoader(package, folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template(name)
