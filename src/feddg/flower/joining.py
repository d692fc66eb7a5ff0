"""What a site is told before it joins: ``join.json`` in the folder that its coordinator sends."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from feddg.data.data_set import DATA_SETS, load_source
from feddg.errors import ExperimentError, FeddgError
from feddg.experiment import Experiment
from feddg.records import JsonFile
from feddg.storage import parse_fields

JOIN = "join.json"


class JoinFile(JsonFile):
    """What a deployment expects of a site.

    Attributes:
        site: the site's name.
        address: HOST:PORT of the coordinator's proxy.
        feddg: the version that all must have.
        flwr: the version of Flower.
        classes: names of the classes; empty where the coordinator did not know them.
        experiment: as YAML.
        trains: whether the site trains, or only evaluates.
    """

    site: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    address: str
    feddg: str
    flwr: str
    classes: tuple[str, ...] = ()
    experiment: str
    trains: bool = True

    def settings(self) -> Experiment:
        """Returns the experiment.

        Raises:
            ExperimentError: it is none that this version knows.
        """
        try:
            return Experiment(**parse_fields(self.experiment))
        except (ValueError, ValidationError) as error:
            text = " ".join(str(error).split())[:200]
            raise ExperimentError(f"{JOIN} holds no experiment of this version: {text}") from None


def read_join(folder: Path) -> JoinFile:
    """Returns what the coordinator sent.

    Raises:
        FeddgError: there is none, or it is damaged.
    """
    found = JoinFile.read(folder / JOIN)
    if found is None:
        raise FeddgError(
            f"{folder} holds no {JOIN}: name the folder sites/NAME that the coordinator sent"
        )
    return found


def known_classes(experiment: Experiment, test: str) -> Sequence[str]:
    """Returns the classes that a coordinator knows of: of its test folder, or of the data set."""
    if test and not test.startswith("digits:"):
        try:
            return load_source("folder", Path(test).expanduser()).class_names
        except FeddgError:
            return ()  # the run says what is wrong with it
    source = "digits" if test else experiment.data.source
    if source == "digits":
        return load_source("digits").class_names
    return DATA_SETS.find(source).classes


def held_out_among(domains: Iterable[str], held_out: Collection[str]) -> list[str]:
    """Returns those of a site's domains that an experiment holds out, however they are spelt."""
    held = {_spelt_alike(name) for name in held_out}
    return [name for name in domains if _spelt_alike(name) in held]


def _spelt_alike(name: str) -> str:
    """Returns what two spellings of a domain's name have in common."""
    return " ".join(name.replace("_", " ").split()).casefold()
