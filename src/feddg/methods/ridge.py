"""Ridge: the classifier in closed form, in one round (Fed3R; Fani et al., ICML 2024).

The featurizer is not trained. Every client sends two sums over its images' features; the server
adds them up and solves for the linear classifier of penalised least squares on all images together.
With one message per client the result is exactly that of all images in one place, however they are
spread. By subtracting its own sums from the total, a site learns how well a model would do that has
never seen it; the penalty that does best at sites left out is used.

Fani, Camoriano, Caputo and Ciccone, "Accelerating Heterogeneous Federated Learning with Closed-form
Classifiers" (ICML 2024), section 3. Class means alone (`class_means`): Goswami et al., "Covariances
for Free: Exploiting Mean Distributions for Training-free Federated Learning" (arXiv 2412.14326).

Equations:
    z = [f(x), 1],   A_k = mean of z z^T,   B_k = mean of z y^T over client k's n_k images,
        y one-hot;   A = sum_k n_k A_k / n,   B likewise
    with A = [S, m; m^T, 1] and B = [C; p^T]:   S_c = S - m m^T,   C_c = C - m p^T
    W = (S_c + lambda tr(S_c) / d I)^-1 C_c,   bias = p - W^T m
    logits = s (W^T f(x) + bias)
    Leaving client k out: A_-k = (n A - n_k A_k) / (n - n_k), B_-k likewise; its accuracy is that
        of W_-k on its own images, less its mean over lambdas. lambda = the best median of these
        over the clients (over means of 25 groups, if there are more); of 10 clients or more the
        largest whose median is behind that by at most a standard error of the differences (Breiman
        et al. 1984). s = the least median cross-entropy there, likewise.
    An image's privacy (`privacy.record_epsilon`): z = [g, 1] / sqrt 2, g = f min(1, R / |f|) / R,
        so that |z z^T| and |z y^T| are at most 1, and n_k A_k and n_k B_k together move by at most
        sqrt 2 when an image is left out (1.41 times that when one is replaced by another); they get
        noise of sqrt 2 times the multiplier, R is `clip`. Negative eigenvalues that the noise gives
        S_c are set to 0, before its trace is taken.
    Class means alone (FedCOF): with m_kc the mean of client k's n_kc images of class c, as B_k has
        it, K_c the number of clients that have any, N_c = sum_k n_kc,
        m_c = sum_k n_kc m_kc / N_c
        V_c = sum_k n_kc (m_kc - m_c) (m_kc - m_c)^T / (K_c - 1)
        n S = sum_c (N_c - 1) V_c + N_c m_c m_c^T
        V_c is the covariance of class c on average, if its images are drawn alike at all clients.
    As published (`solution: published`), without a bias, rows of W divided by their length, s = 1:
        Fed3R:    W = (n S + lambda I)^-1 n C
        FedCOF:   n S = sum_c (N_c - 1) (V_c + I) + n m m^T,   W = (n S)^-1 n C

Leaves the client:
    A_k and B_k once, (d + 1)(d + 2) / 2 + (d + 1) C numbers in double precision; and, asked after
    the round, how many of its own images the classifiers without it recognise, their mean loss and
    their mean largest probability, for each lambda and s. Under `class_means` B_k alone: with C =
    7, 29 kB in place of 1.08 MB where d = 512 (ResNet-18), 72 kB in place of 6.64 MB where d = 1280
    (EfficientNet-Lite0).

Decisions:
    A is symmetric: its upper half travels, what is off the diagonal times sqrt 2, so that lengths
    are those of the matrix. The sums are entries of the network, so that secure aggregation,
    clipping and noise treat them as any update; the server takes their plain mean, and wipes them
    once it has solved, but for their total, without which no site could be taken out of the model
    again. Whatever makes images joins in: with `ridge+ccst` the features of stylized copies are in
    the sums, too, with `ridge+randconv` those of randomly filtered images instead. All clients are
    asked by default. Where images are private nobody is asked: lambda is `when_unknown`, s is 16;
    so it is with a single client, and under `class_means`, where a client cannot take its part off
    what was estimated. These means are every client's own, so no defence goes with them, nor does
    `clip`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear

from feddg.clients.client import Batch, Client
from feddg.diagnostics import Diagnostic, warning
from feddg.errors import ClientError, ExperimentError, RunError
from feddg.messages import EntrySchema, Message, Refusal, Update, Weights, on_device
from feddg.methods.base import (
    Ask,
    FoundOut,
    Method,
    MethodSettings,
    Presets,
    State,
    noting,
    register,
    require,
)
from feddg.models.closed_form import (
    EXAMPLES,
    PENALTIES,
    QUESTION,
    USUAL_SCALE,
    Choice,
    chosen_by,
    clipped,
    extended,
    gram_of_means,
    left_out_answer,
    left_out_schemas,
    outliers,
    packed,
    solved,
    solved_as_published,
    sums_faults,
    unpacked,
)
from feddg.models.network import Network
from feddg.rng import add_noise
from feddg.settings import ExperimentSettings, NotNegative, Positive, leaves

GRAM, CROSS = "classifier.gram", "classifier.cross"
WEIGHT, BIAS = "classifier.weight", "classifier.bias"
IMAGES, LEFT_OUT, CONFIDENCE, PENALTY, SCALE, ESTIMATE = (
    f"ridge/{name}" for name in ("images", "left_out", "confidence", "penalty", "scale", "estimate")
)
TOTAL_GRAM, TOTAL_CROSS, TOTAL_IMAGES = (f"ridge/total/{n}" for n in ("gram", "cross", "images"))
"""What the server keeps of all sums together, so that a site can be taken out of them."""
AT_ONCE = 2**25
"""Bytes of clients' sums that a device judges at once."""
SENSITIVITY = math.sqrt(2)
"""How far leaving an image out moves both sums together, where features are clipped; replacing one
by another moves them by up to 1.41 times as much."""


class RidgeSettings(MethodSettings):
    """Hyper-parameters of ridge."""

    penalties: tuple[NotNegative, ...] = Field(
        PENALTIES,
        min_length=1,
        description="lambdas to choose from, by accuracy at clients that are left out, each at "
        "least 0; one is taken as it is",
    )
    when_unknown: NotNegative = Field(1.0, description="lambda where nobody may be left out")
    clip: Positive | None = Field(
        None,
        description="R, longest feature vector, where images or clients are to be private; none "
        "for features as they are",
    )
    class_means: bool = Field(
        False,
        description="send class means alone, from which the server estimates the rest (FedCOF): "
        "for wide features and many clients",
    )
    solution: Literal["ours", "published"] = Field(
        "ours",
        description="how the server solves: centred, with a bias; or as Fed3R and, under "
        "class_means, FedCOF (which drops the scatter between classes) do it, with lambda = "
        "when_unknown and 0",
    )


class RidgeClassifier(nn.Module):
    """A linear classifier beside the sums that it is solved from.

    Attributes:
        gram: ``((d + 1)(d + 2) / 2,)`` float64, the packed mean of z z^T; None if it is not sent.
        cross: ``(d + 1, classes)`` float64, the mean of z y^T.
        weight: ``(classes, d)``.
        bias: ``(classes,)``.
    """

    gram: nn.Parameter | None

    def __init__(
        self, dimension: int, classes: int, clip: float | None = None, *, class_means: bool = False
    ) -> None:
        super().__init__()
        self.clip = clip
        rows = dimension + 1
        gram = nn.Parameter(torch.zeros(rows * (rows + 1) // 2, dtype=torch.float64))
        self.register_parameter("gram", None if class_means else gram)
        self.cross = nn.Parameter(torch.zeros(rows, classes, dtype=torch.float64))
        self.weight = nn.Parameter(torch.zeros(classes, dimension))
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, embeddings: Tensor) -> Tensor:
        """Maps ``(B, d)`` to logits ``(B, classes)``."""
        if self.clip is not None:
            embeddings = clipped(embeddings, self.clip)
        return linear(embeddings, self.weight, self.bias)


def of_no_sum(settings: ExperimentSettings) -> list[str]:
    """Returns the given settings that weigh images or clients, which sums do not know."""
    train, given = settings.train, leaves(getattr(settings, "given", settings.model_dump()))
    weighs = {
        "train.class_weights": train.class_weights != "none",
        "train.label_smoothing": train.label_smoothing > 0,
        "server.weighting": settings.server.weighting != "examples",
    }
    return [field for field, chosen in weighs.items() if chosen and field in given]


@register
class Ridge(Method):
    """The classifier in closed form, from one message of sums a client."""

    name = "ridge"
    aliases = ("fed3r",)
    summary = "the classifier in closed form, in one round (Fani et al. 2024)"
    settings: RidgeSettings
    presets: ClassVar[Presets] = {
        "*": {
            "clients": {"per_round": None},
            "model": {"embedding": "none"},
            "train": {
                "trainable": "head",
                "head": "random",
                "augmentation": "none",
                "batch_size": 64,
            },
            "server": {"averaging": "none"},
        }
    }
    sends: ClassVar[dict[str, EntrySchema]] = {
        **{name: schema for name, schema in Method.sends.items() if name != "update/terms/*"},
        **left_out_schemas(
            lambda method: len(method.settings.penalties), lambda method: method.asks
        ),
    }
    excludes: ClassVar[dict[str, str]] = dict.fromkeys(
        (
            *("copa", "csac", "fedig", "fedig-a", "fedsr", "l2d", "local"),
            *("fpl", "mixstyle", "rsc", "scaffold", "selfreg", "sfa", "vista"),
            *("afl", "coral", "elcfs", "fish", "group_dro", "irm", "mixup", "mmd", "vrex"),
        ),
        "ridge adds up what a fixed network gives for images and trains nothing, and the other "
        "method changes the network or how it is trained; choose one",
    ) | dict.fromkeys(
        ("feddg-ga", "fedgma"),
        "ridge's sums count by their images, and the other method weighs or masks them; choose one",
    )
    one_round = True

    def network(self, network: Network) -> Network:
        """Puts the closed-form classifier in the place of the trained one."""
        network = super().network(network)
        dimension, classes = network.features_dimension, network.classes
        network.classifier = RidgeClassifier(
            dimension, classes, self.settings.clip, class_means=self.settings.class_means
        )
        return network

    @property
    def asks(self) -> bool:
        """Whether clients are asked how classifiers do that they have no part in."""
        chosen = self.settings
        return chosen.clip is None and not chosen.class_means and chosen.solution == "ours"

    @property
    def sums(self) -> tuple[str, ...]:  # type: ignore[override]
        """Clipped features are short; others may be of any scale, which changes no answer."""
        return (GRAM, CROSS) if self.settings.clip is None else ()

    def check(self, experiment: ExperimentSettings) -> None:
        """Refuses what is no single round over a featurizer that stays."""
        super().check(experiment)
        none = dict.fromkeys(("model.embedding", "server.optimizer", "server.wise_ft"), "none")
        require(
            experiment,
            "ridge solves for its classifier from one pass over frozen features",
            {"train.trainable": "head"} | none,
        )
        privacy = experiment.privacy
        if not getattr(self.settings, "stylized_cross_entropy", True):
            raise ExperimentError(
                "method.stylized_cross_entropy: ridge adds up what is classified, and without it "
                "pardon's copies are not; set it to true"
            )
        private = privacy.record_epsilon is not None or privacy.clipping != "none"
        if private and self.settings.clip is None:
            raise ExperimentError(
                "method.clip: noise hides only vectors of limited length; set it to about the "
                "usual length of a feature vector"
            )
        if privacy.record_epsilon is not None and type(self).loss is not Method.loss:
            raise ExperimentError(
                f"privacy.record_epsilon and {self.name}: an image would be in the sums more than "
                "once, and noise is made for once; choose ridge alone"
            )
        if self.settings.solution == "published" and self.settings.clip is not None:
            raise ExperimentError("method.solution: published has no method.clip; leave one out")
        if self.settings.class_means and (private or self.settings.clip or experiment.defences):
            raise ExperimentError(
                "method.class_means: the server needs every client's own means as they are; leave "
                "out defences, method.clip, and privacy of images and clients"
            )

    def diagnostics(self, experiment: ExperimentSettings) -> Iterable[Diagnostic]:
        """Warns of what weighs images or clients."""
        yield from super().diagnostics(experiment)
        for name in of_no_sum(experiment):
            text = f"{name} does nothing: in the sums of ridge every image counts alike."
            yield warning("without-effect", text)

    # At a client

    def trains_on_features(self, client: Client) -> bool:
        """Features that do not change can be kept from round to round, and run to run."""
        return type(self).loss is Method.loss and client.has_fixed_features

    def step(self, client: Client, batch: Batch) -> None:
        """Adds a batch to the sums; nothing is trained."""
        with torch.no_grad():
            client.note(self.loss(client, batch))
            client.steps += 1

    def head_loss(self, client: Client, batch: Batch, embeddings: Tensor) -> dict[str, Tensor]:
        """Adds features to the client's sums; there is no loss."""
        rows = self.extended(embeddings)
        if "sums" not in client.scratch:
            sizes = rows.shape[1], client.examples.classes
            client.scratch["sums"] = [rows.new_zeros(rows.shape[1], size) for size in sizes]
        gram, cross = client.scratch["sums"]
        if not self.settings.class_means:
            gram.addmm_(rows.T, rows)
        cross.index_add_(1, batch.labels, rows.T)
        return {}

    def extended(self, features: Tensor) -> Tensor:
        """Returns z of features ``(B, d)``: ``(B, d + 1)`` float64; no longer than 1 if clipped."""
        clip = self.settings.clip
        if clip is None:
            return extended(features)
        return extended(clipped(features.double(), clip)) / math.sqrt(2)

    def report(self, client: Client) -> Message:
        """Puts the client's means, noised if asked for, where the update takes them from."""
        gram, cross, count = self._sums(client)
        noise = client.worker.record_noise
        if noise is not None:
            gram, cross = (add_noise(s, noise.multiplier * SENSITIVITY) for s in (gram, cross))
        with torch.no_grad():
            classifier = cast(RidgeClassifier, client.network.classifier)
            if classifier.gram is not None:
                classifier.gram.copy_(gram / count)
            classifier.cross.copy_(cross / count)
        return super().report(client)

    def _sums(self, client: Client) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the packed sum of z z^T, that of z y^T, and of how many images they are.

        These are more than the client's where copies of them joined in.
        """
        gram, cross = client.scratch.pop("sums")
        if self.settings.class_means:
            return gram, cross, cross[-1].sum()
        gram = packed(gram)
        return gram, cross, gram[-1] * (1 if self.settings.clip is None else 2)

    def answer(self, client: Client, name: str, question: Message) -> Message:
        """How many of the client's images are recognised without it, by penalty."""
        if name != QUESTION:
            return super().answer(client, name, question)
        if not self.asks:
            raise ClientError("was asked what its images give away, which are to stay private")
        if {GRAM, CROSS} - client.received.keys():
            raise ClientError("was asked about sums that it was not sent")
        total = tuple(client.received[name].to(client.device) for name in (GRAM, CROSS))
        return left_out_answer(question, total, *self._own(client), self.settings.penalties)

    def _own(self, client: Client) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Returns the client's means as it sent them, and features and labels of its images."""
        self.begin(client)
        if self.trains_on_features(client):
            client.features = client.frozen_features()
        for batch in client.batches():  # its sums again, as it sent them
            self.step(client, batch)
        gram, cross, count = self._sums(client)
        features = client.frozen_features() if client.features is None else client.features
        features, labels = on_device(
            {"features": features, "labels": client.examples.labels}, client.device
        ).values()
        return (gram / count, cross / count), client.network.embedding(features).double(), labels

    # At the server

    def initial_extras(self, network: Network, clients: int) -> Weights:
        """Nobody was left out yet."""
        nothing = torch.full((clients,), -1.0, dtype=torch.float64)
        extras = {LEFT_OUT: nothing, CONFIDENCE: nothing.clone()}
        return super().initial_extras(network, clients) | extras

    def aggregate(self, state: State, updates: Iterable[Update]) -> State:
        """Takes the mean of the sums, and notes of how many images it is."""
        examples = 0
        means: list[Tensor] = []

        def note(update: Update) -> None:
            nonlocal examples
            if self.settings.class_means:
                means.append(update.weights[CROSS].detach() * update.examples)
            examples += update.examples

        state = super().aggregate(state, noting(self._plausible(updates), note))
        state.extras[IMAGES] = torch.tensor(examples)
        if means:
            published = self.settings.solution == "published"
            state.extras[ESTIMATE] = packed(gram_of_means(means, published=published) / examples)
        return state

    def _plausible(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Yields updates, and refuses those whose sums cannot come from images.

        A device judges several at once, after they were yielded.
        """
        squares: dict[int, Tensor] = {}
        waiting: dict[int, tuple[Tensor, Tensor, int | None]] = {}

        def judge(several: bool = False) -> None:
            halves, crosses, images = zip(*waiting.values())
            grams = unpacked(torch.stack(halves))
            faults = sums_faults(grams, torch.stack(crosses), images, several=several)
            _refuse({id: fault for id, fault in zip(waiting, faults) if fault is not None})
            squares.update(zip(waiting, grams.diagonal(dim1=1, dim2=2)[:, :-1].sum(1)))
            waiting.clear()

        for update in updates:
            if self.settings.clip is None:  # noised sums may be of no features
                cross, several = update.weights[CROSS].detach(), bool(update.members)
                means = self.settings.class_means
                half = packed(gram_of_means([cross])) if means else update.weights[GRAM].detach()
                once = type(self).loss is Method.loss and not several
                images = update.examples if once else None
                waiting[update.client] = half, cross, images
                if several or half.device.type == "cpu" or len(waiting) * half.nbytes >= AT_ONCE:
                    judge(several)
                else:  # what it sent may be overwritten before it is judged
                    waiting[update.client] = half.clone(), cross.clone(), images
            yield update
        if waiting:
            judge()
        _refuse(outliers(squares))

    def after_round(self, state: State, ask: Ask) -> State:
        """Chooses lambda at clients left out, solves, and wipes the sums."""
        state = super().after_round(state, ask)
        sums = {name: state.weights[name] for name in (GRAM, CROSS) if name in state.weights}
        chosen, images = self.settings, int(state.extras[IMAGES])
        gram = unpacked(state.extras.pop(ESTIMATE) if chosen.class_means else sums[GRAM])
        if self.asks:
            kept = {TOTAL_GRAM: sums[GRAM], TOTAL_CROSS: sums[CROSS]}
            state.extras |= kept | {TOTAL_IMAGES: torch.tensor(images)}
        choice = self._choice(state, ask)
        if chosen.solution == "published":
            choice = Choice(0.0 if chosen.class_means else chosen.when_unknown, 1.0, [], [])
            both = images * gram, images * sums[CROSS]
            weight, bias = solved_as_published(*both, choice.penalty)
        else:
            weight, bias = next(solved(gram, sums[CROSS], [choice.penalty]))
        state.weights = state.weights | {
            **{name: each * 0 for name, each in sums.items()},
            WEIGHT: (choice.scale * weight).float(),
            BIAS: (choice.scale * bias).float(),
        }
        state.extras[PENALTY] = torch.tensor(choice.penalty, dtype=torch.float64)
        state.extras[SCALE] = torch.tensor(choice.scale, dtype=torch.float64)
        return state

    def without(self, state: State, update: Update) -> State:
        """Takes a client's sums out of the total; :meth:`after_round` solves for what is left.

        Args:
            state: after the round.
            update: the client's, made again.

        Raises:
            RunError: the total was not kept, nothing would be left, or the update is not what went
                into the total.
        """
        if TOTAL_GRAM not in state.extras:
            raise RunError(
                "the sums of this run were not kept (they were noised, estimated, or another "
                "version's), so that no client can be taken out of them"
            )
        total, count = int(state.extras[TOTAL_IMAGES]), update.examples
        rest = total - count
        gram, cross = (
            (total * state.extras[kept] - count * update.weights[name].to(state.extras[kept]))
            / max(rest, 1)
            for kept, name in ((TOTAL_GRAM, GRAM), (TOTAL_CROSS, CROSS))
        )
        if rest < 1:
            raise RunError(f"client {update.client} held all images of the model: nothing is left")
        (fault,) = sums_faults(unpacked(gram)[None], cross[None], [rest], several=True)
        if fault:
            raise RunError(
                f"client {update.client} sent other sums than in training (without them the rest "
                f"would be impossible: {fault}); its images must be as they were then"
            )
        unknown = torch.full_like(state.extras[LEFT_OUT], -1.0)  # these were of models with it
        state.weights = state.weights | {GRAM: gram, CROSS: cross}
        state.extras |= {LEFT_OUT: unknown, CONFIDENCE: unknown.clone(), IMAGES: torch.tensor(rest)}
        return state

    def left_out(self, state: State) -> dict[int, tuple[float, float]]:
        """Of the classifier that all clients but one make, at that one."""
        both = zip(state.extras[LEFT_OUT].tolist(), state.extras[CONFIDENCE].tolist())
        return {id: measured for id, measured in enumerate(both) if measured[0] >= 0}

    def _choice(self, state: State, ask: Ask) -> Choice:
        """Returns lambda and the scale, and notes each client's accuracy when it is left out."""
        penalties, images = self.settings.penalties, int(state.extras.pop(IMAGES))
        left_out = state.extras[LEFT_OUT].clone()
        replies = []
        if self.asks and len(left_out) > 1:
            replies = list(ask(QUESTION, Message({}, {EXAMPLES: images})))
        if not replies:
            penalty = self.settings.when_unknown if len(penalties) > 1 else penalties[0]
            return Choice(penalty, USUAL_SCALE, [], [])
        choice = chosen_by([reply for _, reply in replies], penalties)
        ids, confidence = torch.tensor([id for id, _ in replies]), state.extras[CONFIDENCE].clone()
        left_out[ids] = left_out.new_tensor(choice.accuracies)
        confidence[ids] = confidence.new_tensor(choice.confidences)
        state.extras |= {LEFT_OUT: left_out, CONFIDENCE: confidence}
        return choice


def _refuse(reasons: Mapping[int, str]) -> None:
    if reasons:
        raise FoundOut([Refusal(c, f"update refused: {why}") for c, why in reasons.items()])
