"""Common parts of methods that stylize images: settings, codec, cached copies."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import cache, cached_property, lru_cache
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from feddg.clients.client import Batch, Client
from feddg.clients.together import Parts, whole
from feddg.data.augment import apply, draw
from feddg.diagnostics import Diagnostic, warning
from feddg.errors import WeightsError
from feddg.messages import EntrySchema, Message, SchemaContext, Weights, joined, on_device
from feddg.methods.base import Method, MethodSettings, Statistics
from feddg.records import Groups
from feddg.settings import ExperimentSettings, FixedPath, Fraction
from feddg.styles.codec import CODECS, Codec, NormalizedCodec, load_codec, restyled, transfer
from feddg.styles.ranges import noised_range, style_range
from feddg.styles.statistics import FeatureMoments, client_style, finch, measure, private_style

ENOUGH_PLACES = 8
"""Smallest side of a feature map with which stylized images are recognised nearly as well as the
originals: 80 instead of 84 % at 8 x 8 (``docs/codec.md``). With 4 x 4 CCST showed no gain.
"""

Chosen = Callable[[Client], tuple[Tensor, Tensor | None]]
"""Maps a client to a style, and to which of its images keep theirs."""


class StyleSettings(MethodSettings):
    """The codec, and how strongly it stylizes."""

    codec: str = Field(
        "compact",
        description="what measures styles and stylizes: compact, modulated, colors, or the "
        "papers' vgg19",
    )
    encoder: FixedPath | None = Field(
        None, description="encoder weights of the codec (vgg19 needs them)"
    )
    decoder: FixedPath | None = Field(
        None, description="decoder weights of the codec (vgg19 needs them)"
    )
    style_layer: Literal["output", "conv4_1_pre"] = Field(
        "output",
        description="map that styles are measured on; conv4_1_pre is PARDON's released code",
    )
    strength: Fraction = Field(
        0.5, description="AdaIN blend: 0.5 in PARDON's released code, 1 in the papers' equations"
    )
    stylized: Literal["cached", "on_the_fly"] = Field(
        "cached", description="stylize all images once, or each augmented batch anew"
    )
    content_variance: Literal["n", "n-1"] = Field(
        "n", description="what a content map's variance divides by (papers' AdaIN code: n-1)"
    )
    stylization: Literal["images", "released"] = Field(
        "images",
        description="what the codec gets and draws: images; or, as in PARDON's released code, "
        "the classifier's normalised inputs, not clamped (style_layer, stylized and "
        "content_variance then follow it, too)",
    )

    @model_validator(mode="before")
    @classmethod
    def _as_released(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("stylization") != "released":
            return values
        codec = CODECS.get(values.get("codec", cls.model_fields["codec"].default))
        layer = "conv4_1_pre" if codec and "conv4_1_pre" in codec.style_layers else "output"
        code = {"style_layer": layer, "stylized": "on_the_fly", "content_variance": "n-1"}
        return code | values

    @model_validator(mode="after")
    def _not_bytes(self) -> Self:
        if self.stylization == "released" and self.stylized == "cached":
            raise ValueError(
                "stylization: released needs stylized: on_the_fly; a cache of bytes would clamp "
                "the copies"
            )
        return self

    @cached_property
    def loaded_codec(self) -> Codec:
        """The named codec, loaded at first use."""
        codec = load_codec(
            self.codec, encoder=self.encoder, decoder=self.decoder, style_layer=self.style_layer
        )
        return NormalizedCodec(codec).frozen() if self.stylization == "released" else codec

    @property
    def correction(self) -> int:
        """The number subtracted from the number of places in the content's variance."""
        return int(self.content_variance == "n-1")

    @field_validator("codec")
    @classmethod
    def _known(cls, codec: str) -> str:
        try:
            CODECS.find(codec)
        except WeightsError as error:
            raise ValueError(str(error)) from None
        return codec


class StyleExchange(Method):
    """Codec and stylized copies for a method whose settings extend :class:`StyleSettings`."""

    settings: StyleSettings

    def codec(self, device: torch.device | None = None) -> Codec:
        """Returns the settings' codec; it does not change during a run even if its files do.

        Args:
            device: the target device; the CPU by default.
        """
        loaded = self.settings.loaded_codec
        return loaded if device in (None, loaded.unit.device) else _copied_to(loaded, device)

    def read_files(self) -> None:
        """Reads the codec's weights."""
        self.codec()

    def diagnostics(self, experiment: ExperimentSettings) -> Iterable[Diagnostic]:
        """Warns if the feature map is too small to redraw an image well."""
        yield from super().diagnostics(experiment)
        chosen, size = self.settings, experiment.data.image_size
        places = -(-size // self.codec().stride)
        if places < ENOUGH_PLACES and chosen.strength:
            yield warning(
                "codec-too-coarse",
                f"The codec {chosen.codec} sees an image of {size} pixels as {places} x {places} "
                "places: a stylized copy keeps little of what is in it.",
                "Try --set method.codec=colors, which loses nothing, or a larger --image-size.",
            )

    def style_images(self, client: Client) -> Tensor:
        """Returns the images whose style a client measures: all of its own, as they are.

        Returns:
            ``(n, 3, H, W)`` uint8; augmented once, and in [0, 1], if so they are in the code that
            the settings follow.
        """
        images = client.examples.images()
        if self.settings.stylization != "released":
            return images
        rng = client.stream("augmented style")
        return apply(images, draw(client.augmentation, len(images), images.shape[-1], rng))

    def moments(self, client: Client) -> FeatureMoments:
        """Returns the per-image feature moments of a client's images."""
        codec = self.codec(client.device)

        def sums(images: Tensor) -> tuple[Tensor, Tensor]:
            moments = measure(codec, images)
            return moments.counts, moments.sums

        return FeatureMoments(*self.of_style_images(client, "moments", sums))

    def of_style_images(
        self, client: Client, name: str, function: Callable[[Tensor], Parts]
    ) -> Parts:
        """Returns a function of a client's :meth:`style_images`, on the CPU.

        Args:
            client: the client; others' images may share a batch with its own.
            name: of the function.
            function: maps images to tensors with a row for each, which depends on this image alone.
        """

        def compute(clients: Sequence[Client]) -> Parts:
            return function(whole([self.style_images(each) for each in clients]))

        return client.together.by_image(client, lambda _: name, compute)

    def noised_style(self, client: Client, moments: FeatureMoments) -> Tensor | None:
        """Returns the client's pooled style with noise, or None if no noise is asked for."""
        noise = client.worker.style_noise
        return None if noise is None else private_style(moments, self.codec(), noise)

    def style_range(self, context: SchemaContext) -> tuple[Tensor, Tensor]:
        """Returns the smallest and the largest style that a client can send, ``(2, C)`` each.

        Args:
            context: of the federation and the sender.
        """
        if context.noise is None:
            return style_range(self.codec())
        # A single image's share is the largest there is, where nobody said how many there are.
        return noised_range(self.codec(), context.noise, context.images or 1)

    def stylize_all(self, client: Client, chosen: Chosen) -> Tensor:
        """Returns all a client's images stylized, uint8 ``(n, H, W, 3)``, cached on disk.

        Args:
            client: the client.
            chosen: returns a client's style, ``(2, C)`` for all its images, or ``(n, 2, C)``, one
                each; and ``(n,)`` bool, images that are not stylized, or None if all are. Clients
                whose turn comes later are asked, too, so that their images can share a batch.
        """
        chosen = cache(chosen)

        def key(client: Client) -> str:
            style, keep = chosen(client)
            digest = hashlib.blake2b(style.cpu().contiguous().numpy().tobytes(), digest_size=8)
            digest.update(f"{self.codec().fingerprint()} {self.settings.strength}".encode())
            digest.update(b"" if keep is None else keep.cpu().numpy().tobytes())
            digest.update(b"n-1" if self.settings.correction else b"")
            return f"stylized-{digest.hexdigest()}"

        def drawn(clients: Sequence[Client]) -> Parts:
            styles, rows, images = [], [], whole([each.examples.images() for each in clients])
            for (style, keep), count in ((chosen(each), len(each.examples)) for each in clients):
                styles.append(style.expand(count, *style.shape[-2:]).cpu())
                rows.append(torch.ones(count, dtype=torch.bool) if keep is None else ~keep.cpu())
            changed = whole(rows)
            given = images[changed], whole(styles)[changed], client.device
            images[changed] = self.transferred(*given)
            return (images,)

        def draw() -> Tensor:
            (stylized,) = client.together.by_image(
                client, key, drawn, lambda other: other.has_cached(key(other))
            )
            return stylized.permute(0, 2, 3, 1).contiguous()

        return client.cached(key(client), draw)

    def prepare_copies(self, client: Client, name: str, chosen: Chosen) -> None:
        """Makes :meth:`copies` for a client's round, or keeps its style: :meth:`stylize_all`."""
        client.scratch |= on_device({name: chosen(client)[0]}, client.device)
        if self.settings.stylized == "cached":
            client.views[name] = self.stylize_all(client, chosen)

    def copies(self, client: Client, batch: Batch, name: str) -> Tensor | None:
        """Returns stylized copies of a batch's images, without gradients; None without a style."""
        if name in batch.views or name not in client.scratch:
            return batch.views.get(name)
        codec, style = self.codec(batch.images.device), client.scratch[name]
        strength, correction = self.settings.strength, self.settings.correction
        return restyled(codec, batch.images, style, strength, correction=correction).detach()

    def transferred(
        self, images: Tensor, style: Tensor, device: torch.device | None = None
    ) -> Tensor:
        """Returns uint8 images stylized by the settings, on the device of ``images``.

        Args:
            images: ``(N, 3, H, W)`` uint8.
            style: ``(2, C)`` for all images, or ``(N, 2, C)``, one each.
            device: the device that stylizes; the CPU by default.
        """
        chosen, codec = self.settings, self.codec(device)
        return transfer(codec, images, style, chosen.strength, correction=chosen.correction)


class OneStyleEach(StyleExchange):
    """Before round 1 every client sends one style, noised if the experiment asks for it."""

    sends: ClassVar[dict[str, EntrySchema]] = Method.sends | {
        "statistics/style": EntrySchema(
            "one style vector, the mean over the clusters of its images",
            lambda method, context: (2, method.codec().channels),
            within=lambda method, context, name: method.style_range(context),
            when=lambda method: method.exchanges,
        )
    }
    noises: ClassVar[frozenset[str]] = frozenset({"statistics/style"})

    @property
    def exchanges(self) -> bool:
        """Whether these settings use styles at all."""
        return True

    def client_statistics(self, client: Client) -> Message:
        """Returns the client's style, added to the statistics of other parts of a composition."""
        others = super().client_statistics(client)
        if not self.exchanges:
            return joined(others)
        moments = self.moments(client)
        style = self.noised_style(client, moments)
        if style is None:
            style = self.style(client, moments)
        return joined(others, Message({"style": self.released(client, style).float()}))

    def aggregate_statistics(self, client_statistics: Statistics) -> Message:
        """Adds what all clients are told of the styles."""
        others = super().aggregate_statistics(client_statistics)
        if not self.exchanges:
            return joined(others)
        return joined(others, Message(self.common(_styles(client_statistics))[0]))

    def groups(self, client_statistics: Statistics) -> Groups:
        """Adds the groups of clients with similar styles, if the method made any."""
        others = super().groups(client_statistics)
        group = self.common(_styles(client_statistics))[1] if self.exchanges else None
        if group is None:
            return others
        members: list[list[int]] = [[] for _ in range(int(group.max()) + 1)]
        for (id, _), number in zip(client_statistics, group.tolist(), strict=True):
            members[number].append(id)
        return others | {"style": tuple(map(tuple, members))}

    def common(self, styles: Tensor) -> tuple[Weights, Tensor | None]:
        """At the server: returns what all clients are sent, and the group of each, from 0.

        Args:
            styles: ``(N, 2, C)``, one of each client.
        """
        raise NotImplementedError

    def style(self, client: Client, moments: FeatureMoments) -> Tensor:
        """Returns ``(2, C)``, a client's style: the mean over the FINCH clusters of its images."""
        clusters = finch(moments.styles().flatten(1).numpy())[-1]
        return client_style(moments, clusters)

    def released(self, client: Client, style: Tensor) -> Tensor:
        """Returns ``(2, C)``, the style as the client sends it: unchanged here."""
        return style


@lru_cache(maxsize=8)
def _copied_to(codec: Codec, device: torch.device) -> Codec:
    return deepcopy(codec).to(device)


def _styles(client_statistics: Statistics) -> Tensor:
    return torch.stack([message.tensors["style"] for _, message in client_statistics])
