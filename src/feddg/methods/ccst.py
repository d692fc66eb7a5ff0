"""CCST: clients share their styles, and stylize their images in each other's.

Every client sends the style of its images, the moments of their feature maps; the server collects
them in a bank that it sends to all. Before round 1 each client builds an augmented set: its images
in the styles of K clients drawn for each image. Local training then sees every client's style, and
any other method can train on the augmented set (``ccst+jigen``).

Chen et al., "Federated Domain Generalization for Image Recognition via Cross-Client Style Transfer"
(WACV 2023), Algorithm 1.

Equations:
    S = (mean, sqrt(variance + 1e-5)) of feature maps, over all places of
        all images of the client (``overall``), or of one image (``single``, ceil(n / 32) of them)
    For each image I of client c draw K distinct clients s of all N:
        s = c: I itself;    s other: D(sigma(S_s) (E(I) - mu(E(I))) / sigma(E(I)) + mu(S_s))
    variant ``pardon``: one other client's overall style for all images, drawn once;
        L = CE(g(f(x)), y) + CE(g(f(x~)), y)

    E and D are the codec. The augmented set of a client with d images holds d K; with K = N each
    original is in it exactly once, otherwise with probability K / N.

Leaves the client:
    Before round 1 its style(s), ``2 x C`` numbers each: one, or one for every 32 images. Then the
    network, as in FedAvg.

Decisions:
    As the authors': AdaIN at full strength on RGB in [0, 1], K = 3. ``pardon`` is what PARDON was
    compared with: strength 0.5; it is the preset for its benchmarks. One local epoch runs over all
    d K images, so it takes K times FedAvg's steps (as the paper's epochs). Weights in the average
    count originals. K is at most the number of clients that sent a style. A client that is alone
    has no other style: ``pardon`` is FedAvg then. On digits of 32 pixels the codec ``colors`` did
    better than the two networks tried (``docs/benchmarks.md``).
"""

from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from feddg.clients.client import Batch, Client
from feddg.data.pixels import Pixels
from feddg.errors import ClientError, ExperimentError
from feddg.messages import EntrySchema, Message, SchemaContext, joined
from feddg.methods.base import Method, Presets, Statistics, bank, register
from feddg.methods.style_exchange import StyleExchange, StyleSettings
from feddg.settings import ExperimentSettings, Fraction

IMAGES_PER_STYLE = 32
_PARDON = {"method": {"variant": "pardon"}}


class CcstSettings(StyleSettings):
    """Hyper-parameters of CCST."""

    variant: Literal["paper", "pardon"] = Field("paper", description="Algorithm 1, or PARDON's")
    share: Literal["overall", "single"] = Field(
        "overall", description="style of all images, or one"
    )
    styles_per_image: int = Field(3, ge=1, description="K (paper: 3 gave the best mean on PACS)")
    strength: Fraction = Field(1.0, description="AdaIN blend: 1 (code), variant pardon 0.5")

    @model_validator(mode="before")
    @classmethod
    def _pardons_strength(cls, values: Any) -> Any:
        pardon = isinstance(values, dict) and values.get("variant") == "pardon"
        return {"strength": 0.5, **values} if pardon else values

    @model_validator(mode="after")
    def _offline(self) -> "CcstSettings":
        if self.variant == "paper" and self.stylized == "on_the_fly":
            raise ValueError(
                "stylized: on_the_fly needs variant: pardon, and so does stylization: released; "
                "the paper's set is built once"
            )
        if self.variant == "pardon" and self.styles_per_image != 3:
            raise ValueError(
                "styles_per_image needs variant: paper; pardon draws one style per image"
            )
        return self


class Versions(Pixels):
    """Images in several versions: row ``v n + i`` is version v of image i, for n images.

    Args:
        views: K tensors, uint8 ``(n, H, W, 3)``.
    """

    def __init__(self, views: list[Tensor]) -> None:
        self.views, self.size = views, views[0].shape[1]

    def gather(self, rows: Tensor, device: torch.device | None = None) -> Tensor:
        """Returns the images of ``rows``, ``(B, 3, H, W)``, on a device."""
        count = len(self.views[0])
        images = [self.views[row // count][row % count] for row in rows.tolist()]
        return torch.stack(images).permute(0, 3, 1, 2).to(device)


@register
class Ccst(StyleExchange):
    """Clients share styles and train on their images stylized in each other's."""

    name = "ccst"
    title = "CCST"
    summary = "images stylized in other clients' styles (Chen et al. 2023)"
    needs_images = True
    settings: CcstSettings
    presets: ClassVar[Presets] = {name: _PARDON for name in ("pacs", "office_home", "iwildcam")}
    sends: ClassVar[dict[str, EntrySchema]] = Method.sends | {
        "statistics/styles": EntrySchema(
            "once, the moments of its images' feature maps, 2 x C numbers per style",
            lambda method, context: (method.styles_of(context), 2, method.codec().channels),
            within=lambda method, context, name: method.style_range(context),
        )
    }
    excludes: ClassVar[dict[str, str]] = {
        "pardon": "ccst and pardon each exchange styles and stylize images; choose one"
    }

    noises: ClassVar[frozenset[str]] = frozenset({"statistics/styles"})

    def check(self, experiment: ExperimentSettings) -> None:
        """Refuses style noise for single images' styles, because each depends on one image."""
        super().check(experiment)
        if self.settings.share == "single" and experiment.privacy.style_epsilon is not None:
            raise ExperimentError(
                "privacy.style_epsilon and share: single exclude each other: noise that hides an "
                "image in its own style leaves nothing of it; set method.share to overall"
            )

    def styles_of(self, context: SchemaContext) -> int | str:
        """Returns how many styles a client sends; a name if its number of images is unknown."""
        if self.settings.share == "overall":
            return 1
        return "styles" if context.images is None else -(-context.images // IMAGES_PER_STYLE)

    def client_statistics(self, client: Client) -> Message:
        """Returns the client's styles: one of all its images, or those of a few single images."""
        moments = self.moments(client)
        noised = self.noised_style(client, moments)
        styles = moments.pooled().styles() if noised is None else noised[None]
        if self.settings.share == "single" and noised is None:
            number = -(-len(moments) // IMAGES_PER_STYLE)
            order = torch.randperm(len(moments), generator=client.stream("ccst"))
            styles = moments.styles()[order[:number]]
        return joined(super().client_statistics(client), Message({"styles": styles.float()}))

    def aggregate_statistics(self, client_statistics: Statistics) -> Message:
        """Returns the bank: all styles, and the client of each."""
        styles = bank(client_statistics, "styles", "owners")
        return joined(super().aggregate_statistics(client_statistics), styles)

    def images_of_pass(self, images: int, clients: int) -> int:
        """Returns the size of the augmented set, d K."""
        paper = self.settings.variant == "paper"
        versions = min(self.settings.styles_per_image, clients) if paper else 1
        return versions * super().images_of_pass(images, clients)

    def begin(self, client: Client) -> None:
        """Builds the augmented set, or loads it from disk, for the parts after it to train on."""
        assert client.context is not None, "the server broadcasts the bank before round 1"
        styles, owners = (client.context.tensors[name].cpu() for name in ("styles", "owners"))
        if self.settings.variant == "pardon":
            self._draw_one_style(client, styles, owners)
        else:
            self._build_set(client, styles, owners)
        super().begin(client)

    def _build_set(self, client: Client, styles: Tensor, owners: Tensor) -> None:
        examples, number = client.examples, self.settings.styles_per_image

        @cache
        def rows_of(client: Client) -> Tensor:
            rng = client.lasting_stream("ccst")
            return draw_styles(owners, len(client.examples), number, rng)

        def chosen(version: int, client: Client) -> tuple[Tensor, Tensor]:
            rows = rows_of(client)[version]
            return styles[rows], owners[rows] == client.id

        versions = range(len(rows_of(client)))  # fewer of few clients
        views = [self.stylize_all(client, partial(chosen, version)) for version in versions]
        rows = torch.arange(len(views) * len(examples))
        client.training = replace(
            examples,
            pixels=Versions(views),
            rows=rows,
            labels=torch.cat([examples.labels] * len(views)),
            domains=examples.domains.repeat(len(views)),
            cache_key=f"{examples.cache_key}-ccst",
        )

    def _draw_one_style(self, client: Client, styles: Tensor, owners: Tensor) -> None:
        if bool((owners == client.id).all()):
            return

        def chosen(client: Client) -> tuple[Tensor, None]:
            foreign = (owners != client.id).nonzero().squeeze(1)
            if not len(foreign):
                raise ClientError("there is no style of another client")
            drawn = torch.randint(len(foreign), (), generator=client.lasting_stream("ccst"))
            return styles[foreign[drawn]], None

        self.prepare_copies(client, "ccst", chosen)

    def loss(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        """Returns the loss of the batch; variant ``pardon`` adds that of its stylized copies."""
        terms = super().loss(client, batch)
        stylized = self.copies(client, batch, "ccst")
        if stylized is None:
            return terms
        on_stylized = super().loss(client, replace(batch, images=stylized))
        return terms | {f"transferred_{name}": term for name, term in on_stylized.items()}

    def preview(self, images: Tensor, context: Message | None) -> Tensor | None:
        """Returns images stylized in the bank's styles in turn, for the report."""
        if not context:
            return None
        styles = context.tensors["styles"]
        turns = torch.arange(len(images)) % len(styles)
        return self.transferred(images, styles[turns])


def draw_styles(owners: Tensor, images: int, number: int, rng: torch.Generator) -> Tensor:
    """Draws ``number`` distinct clients for each image and one style of each (Algorithm 1).

    Args:
        owners: ``(M,)`` ascending, the client of each style in the bank.
        images: n.
        number: K; at most the number of clients.
        rng: CPU generator.

    Returns:
        ``(K, n)`` rows of the bank.
    """
    _, counts = torch.unique(owners, return_counts=True)
    sources = torch.rand(images, len(counts), generator=rng).argsort(1)[:, :number].T
    within = (torch.rand(sources.shape, generator=rng) * counts[sources]).long()
    return (counts.cumsum(0) - counts)[sources] + within
