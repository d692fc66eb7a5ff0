"""What a site keeps on its own disk between messages, since each one meets a fresh process."""

import re
from pathlib import Path

from safetensors.torch import load_file, save_file

from feddg.errors import ClientError
from feddg.files import replace_bytes, replace_file
from feddg.messages import Message, Weights

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class SiteMemory:
    """One site's part of one run, in ``cache/deployments/run/site``.

    A memory is filed under the round that wrote it, and a round reads only what earlier rounds
    wrote. So a round that failed, at the site or at the server, is repeated from the same memory.

    Args:
        cache: the site's cache folder.
        run: the run's key, made up by the server.
        site: the site's name.

    Raises:
        ClientError: a name that cannot be a folder's.
    """

    def __init__(self, cache: Path, run: str, site: str) -> None:
        for name in (run, site):
            if not _SAFE.fullmatch(name):
                raise ClientError(f"{name!r} cannot name a folder; use letters, digits, - and _")
        self.folder = cache / "deployments" / run / site

    def before(self, round: int) -> Weights:
        """Returns what rounds before ``round`` left behind; nothing if there were none."""
        earlier = [number for number in self._rounds() if number < round]
        return load_file(self._file(max(earlier))) if earlier else {}

    def keep(self, round: int, memory: Weights) -> None:
        """Files ``memory`` under ``round``; of the older ones only the newest stays."""
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in memory.items()}
        replace_file(self._file(round), lambda aside: save_file(own, aside))
        earlier = [number for number in self._rounds() if number < round]
        for number in earlier[:-1]:
            self._file(number).unlink(missing_ok=True)

    def secrets(self, round: int) -> Weights:
        """Returns what guards keep at the site within a round; nothing of another one."""
        found = load_file(self._secrets) if self._secrets.is_file() else {}
        return found if "round" in found and int(found["round"]) == round else {}

    def keep_secrets(self, round: int, secrets: Weights) -> None:
        """Files what guards keep within a round, or removes it when there is nothing any more."""
        if secrets:
            own = {name: tensor.cpu().contiguous() for name, tensor in secrets.items()}
            replace_file(self._secrets, lambda aside: save_file(own, aside))
        else:
            self._secrets.unlink(missing_ok=True)

    @property
    def _secrets(self) -> Path:
        return self.folder / "secrets.safetensors"

    def agreed(self, digest: str) -> Message | None:
        """Returns what was agreed, or None if this site was not told yet."""
        file = self._agreement(digest)
        return Message.from_bytes(file.read_bytes()) if file.is_file() else None

    def keep_agreed(self, digest: str, agreed: Message) -> None:
        """Files what was agreed."""
        content = agreed.to_bytes()
        replace_bytes(self._agreement(digest), content)

    def _rounds(self) -> list[int]:
        files = self.folder.glob("memory-*.safetensors")
        return sorted(int(file.stem.removeprefix("memory-")) for file in files)

    def _file(self, round: int) -> Path:
        return self.folder / f"memory-{round}.safetensors"

    def _agreement(self, digest: str) -> Path:
        if not _SAFE.fullmatch(digest):
            raise ClientError(f"{digest!r} is no digest")
        return self.folder / f"agreed-{digest}.safetensors"
