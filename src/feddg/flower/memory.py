"""What a site keeps on its own disk between messages, since each one meets a fresh process."""

import re
import zlib
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save

from feddg.data.fingerprint import ImagesFile
from feddg.errors import ClientError, RunError
from feddg.messages import Message, Weights
from feddg.privacy.secure_aggregation import KNOWN
from feddg.storage import entries, open_file, replace_bytes, replace_text, why

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
IMAGES = "images.json"
_MEMORY = re.compile(r"memory-(\d{1,9})-([0-9a-f]{8})\.safetensors")
_AGREEMENT = re.compile(r"agreed-([A-Za-z0-9._-]+)-([0-9a-f]{8})\.safetensors")


class SiteMemory:
    """One site's part of one run, in ``cache/deployments/run/site``.

    A memory is filed under the round that wrote it, and a round reads only what earlier rounds
    wrote. So a round that failed, at the site or at the server, is repeated from the same memory.
    Every file's name ends in the CRC-32 of its content, with which it is compared.

    Args:
        cache: the site's cache folder.
        run: the run's key, made up by the server.
        site: the site's name.
        experiment: the experiment's id, under which the site keeps which sums it helped to open: in
            whatever run, since one that begins again trains the same updates again. None for each
            run by itself.

    Raises:
        ClientError: a name that cannot be a folder's.
    """

    def __init__(self, cache: Path, run: str, site: str, experiment: str | None = None) -> None:
        for name in (run, site, experiment or run):
            if not _SAFE.fullmatch(name):
                raise ClientError(f"{name!r} cannot name a folder; use letters, digits, - and _")
        self.folder = cache / "deployments" / run / site
        place = self.folder if experiment is None else cache / "opened_sums" / experiment / site
        self._known = place / "opened_sums.safetensors"

    def before(self, round: int) -> Weights:
        """Returns what rounds before ``round`` left behind; nothing if there were none.

        Raises:
            RunError: it is damaged; names the file.
        """
        earlier = [number for number in self._memories() if number < round]
        if not earlier:
            return {}
        file = self._memories()[max(earlier)]
        try:
            return load(_whole(file))
        except (SafetensorError, ValueError, KeyError) as error:
            raise RunError(_damaged(file, why(error))) from None

    def keep(self, round: int, memory: Weights) -> None:
        """Files ``memory`` under ``round``; of the older ones only the newest stays."""
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in memory.items()}
        content = save(own)
        kept = self.folder / _sealed(f"memory-{round}", content)
        replace_bytes(kept, content)
        files = [path for path in self.folder.iterdir() if _MEMORY.fullmatch(path.name)]
        earlier = sorted({n for n in map(_round_of, files) if n < round})
        for file in files:
            number = _round_of(file)
            if file != kept and (number == round or number in earlier[:-1]):
                file.unlink(missing_ok=True)

    def secrets(self, round: int) -> Weights:
        """Returns what guards keep at the site: within a round, nothing of another one; and beyond.

        Raises:
            RunError: it is damaged; names the file.
        """
        found = _loaded(self._secrets, "delete it")
        known = _loaded(
            self._known,
            "it says which sums of updates this site helped to open. Put a copy in its place, or "
            "ask for a run with another seed and delete it",
        )
        return known | (found if "round" in found and int(found["round"]) == round else {})

    def keep_secrets(self, round: int, secrets: Weights) -> None:
        """Files what guards keep: beyond a round first, so that it is there when it is needed."""
        own = {name: tensor.cpu().contiguous() for name, tensor in secrets.items()}
        for file, content in (
            (self._known, {n: t for n, t in own.items() if n.startswith(KNOWN)}),
            (self._secrets, {n: t for n, t in own.items() if not n.startswith(KNOWN)}),
        ):
            if content:
                replace_bytes(file, save(content))
            elif file == self._secrets:
                file.unlink(missing_ok=True)

    @property
    def _secrets(self) -> Path:
        return self.folder / "secrets.safetensors"

    def agreed(self, digest: str) -> Message | None:
        """Returns what was agreed, or None if this site was not told, or its copy is damaged."""
        file = self._files(_AGREEMENT).get(_safe(digest))
        if file is None:
            return None
        try:
            return Message.from_bytes(_whole(file))
        except (RunError, SafetensorError, ValueError, KeyError):
            return None  # it is asked for again

    def keep_agreed(self, digest: str, agreed: Message) -> None:
        """Files what was agreed."""
        content = agreed.to_bytes()
        before = self._files(_AGREEMENT).get(_safe(digest))
        kept = self.folder / _sealed(f"agreed-{digest}", content)
        replace_bytes(kept, content)
        if before not in (None, kept):
            before.unlink(missing_ok=True)

    def images(self) -> ImagesFile | None:
        """Returns the images that the site joined the run with, or None if it joins it now.

        Raises:
            RunError: what is kept of them is damaged.
        """
        return ImagesFile.read(self.folder / IMAGES)

    def keep_images(self, images: ImagesFile) -> None:
        """Keeps which images the site joins the run with."""
        replace_text(self.folder / IMAGES, images.to_text())

    def _memories(self) -> dict[int, Path]:
        return {int(number): file for number, file in self._files(_MEMORY).items()}

    def _files(self, name: re.Pattern[str]) -> dict[str, Path]:
        """Returns files by the first part of their name that tells them apart."""
        if not self.folder.is_dir():
            return {}
        found = [(name.fullmatch(entry.name), entry) for entry in entries(self.folder, RunError)]
        return {match[1]: Path(entry.path) for match, entry in found if match}


def _loaded(file: Path, then: str) -> Weights:
    try:
        return load(file.read_bytes()) if file.is_file() else {}
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise RunError(f"{file} is damaged: {why(error)}; {then}.") from None


def _safe(digest: str) -> str:
    if not _SAFE.fullmatch(digest):
        raise ClientError(f"{digest!r} is no digest")
    return digest


def _round_of(file: Path) -> int:
    found = _MEMORY.fullmatch(file.name)
    assert found is not None
    return int(found[1])


def _sealed(name: str, content: bytes) -> str:
    return f"{name}-{zlib.crc32(content):08x}.safetensors"


def _whole(file: Path) -> bytes:
    """Returns a file's content.

    Raises:
        RunError: it cannot be read, or is not what its name says.
    """
    try:
        with open_file(file) as opened:
            content = opened.read()
    except OSError as error:
        raise RunError(f"Cannot read {file}: {why(error)}.") from None
    if not file.name.endswith(f"-{zlib.crc32(content):08x}.safetensors"):
        raise RunError(_damaged(file, "its checksum is another one"))
    return content


def _damaged(file: Path, reason: str) -> str:
    return (
        f"{file} is damaged: {reason}. Put a copy in its place, or delete it: the site then goes "
        "on from what it remembered before."
    )
