"""The parts of an experiment: plain, validated settings."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

K = TypeVar("K")
V = TypeVar("V")
Fields = dict[str, Any]
"""Fields of an experiment by name, nested as in its file."""
IMAGENET: Final = "imagenet"
"""Value of ``model.weights`` for ImageNet weights from a package, timm or torchvision."""
OF_DECISION: Final = ("decision", "specificity", "sensitivity", "prevalence")
"""Fields of ``evaluate`` about one class."""
_SHORT = {
    "data": "root split_file group_by subgroups image_size",
    "clients": "heterogeneity alpha partition shards quantity_alpha",
    "train": "rounds local_epochs local_steps batch_size optimizer lr schedule augmentation",
    "model": "backbone weights embedding normalization",
    "server": "averaging",
    "evaluate": " ".join(OF_DECISION),
}
SHORTHANDS = {
    "method": "method.name",
    "data": "data.source",
    "clients": "clients.number",
    "clients_per_round": "clients.per_round",
    "eval_every": "evaluate.every",
} | {name: f"{part}.{name}" for part, names in _SHORT.items() for name in names.split()}
"""Short names of fields, by dotted path: used in Python and files, and as command-line flags. The
first three are also parts of an experiment, which may be given in full instead.
"""


def _absolute(path: Path) -> Path:
    """Returns an absolute path, independent of the working directory; links are not resolved."""
    return path if path.is_absolute() else Path(os.path.abspath(os.path.expanduser(path)))


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line, without control characters")
    return text


def _listed(value: object) -> object:
    return [value] if isinstance(value, str | int | float) else () if value is None else value


OneLine = Annotated[str, AfterValidator(_one_line)]
Name = Annotated[str, Field(coerce_numbers_to_str=True)]
"""A name, which may be a number, such as a year."""
Names = Annotated[
    tuple[Name, ...],
    BeforeValidator(_listed),
    AfterValidator(lambda names: (*dict.fromkeys(names),)),
]
"""Names of domains or columns, each once; one alone may be said as it is, and none as nothing."""
FixedPath = Annotated[Path, AfterValidator(_absolute)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Trainable = Literal["all", "head", "norm+head", "lora"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """Base class of all settings: immutable, and an unknown field is an error.

    An empty value may be written as ``none``, as in descriptions and pages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _as_meant(cls, value: object, field: ValidationInfo) -> Any:
        annotation = cls.model_fields[field.field_name or ""].annotation
        kinds = [getattr(kind, "__origin__", kind) for kind in (annotation, *get_args(annotation))]
        if value == "none" and type(None) in kinds and str not in kinds and Path not in kinds:
            return None
        # YAML reads yes, on and true alike, and pydantic would make 1 of them.
        if isinstance(value, bool) and bool not in kinds and Any not in kinds:
            raise ValueError("must not be true or false")
        return value


class Described(Settings):
    """Settings whose fields are described by the texts below them.

    Pydantic takes those from the source, which takes a while: 3 ms a class.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)


class DataSettings(Described):
    """The images and their size."""

    source: str = "folder"
    """digits, emoji, folder (your images), a benchmark such as pacs, or a registered data set"""
    root: FixedPath | None = None
    """folder of the images: root/domain/class/*.jpg"""
    options: Fields = Field(default_factory=dict)
    """options of the data set itself, such as a table's column names; see docs/data_sets.md"""
    leave_out: Names = ()
    """domains to ignore, as if they were not there"""
    left_out_late: Names = ()
    """those of leave_out that count when in-domain images are drawn: a tuning trial draws as the
    run that holds them out does, and opens none of their images"""
    own_split: bool = True
    """take in-domain validation and test images from the data set's own split, where it has one; if
    false, they are drawn at random (id_val, id_test)"""
    image_size: int = Field(128, ge=8, le=1024)
    """side of the square training images, in pixels"""
    features: int | None = Field(None, ge=1)
    """length of a feature vector in a table of features; by default as in the file"""
    resize: Literal["squash", "crop", "pad"] = "squash"
    """how images of other shapes become square"""
    on_bad_image: Literal["skip", "fail"] = "skip"
    """skip: leave out files that cannot be used; fail: end the run"""
    range: Literal["auto", "full", "percentile"] = "auto"
    """which pixel values become black and white: auto (by the bit depth a domain uses), full (the
    file's whole range), percentile (1st to 99th of each image and band)"""
    bands: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """the bands that are red, green and blue, counted from 1, or the one to show in grey: 4,3,2"""
    tile: int | None = Field(None, ge=16)
    """cut larger images into tiles of this side, in pixels"""
    duplicates: Literal["auto", "refuse", "warn", "ignore"] = "auto"
    """what to do about copies of training images among validation or test images: refuse (end the
    run), warn, ignore; auto refuses, but only warns for published data sets and splits"""
    split_file: FixedPath | None = None
    """a benchmark's CSV file of training and test images, in place of a random split"""
    group_by: str | None = None
    """which images belong together and are never split: a regular expression for their paths with a
    part (?P<group>...), or folder, or none; by default a table's column group, and the patients of
    DICOM files"""
    subgroups: Names = ()
    """columns of a table by whose values results are broken down: scanner,sex"""
    id_val: Fraction = 0.05
    """share of the images of each training domain and class kept for in-domain validation"""
    id_test: Fraction = 0.05
    """share of the images of each training domain and class kept for the in-domain test"""
    pixel_budget_gb: Positive = 20.0
    """largest cache of decoded images, in GB; if they need more, they are decoded anew each time"""

    @field_validator("bands", mode="before")
    @classmethod
    def _three_or_one(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = value.split(",")
        listed = (value,) if isinstance(value, int) else tuple(value or ())
        if len(listed) not in (0, 1, 3):
            raise ValueError("name three bands, for red, green and blue, or one for grey")
        return listed

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what the network sees: ``(3, size, size)``, or ``(features,)``."""
        return (self.features,) if self.features else (3, self.image_size, self.image_size)

    @property
    def all_options(self) -> Fields:
        """The options of the data set's own function, with subgroups if there are any."""
        return self.options | ({"subgroups": self.subgroups} if self.subgroups else {})


class HoldOut(Described):
    """Domains that are not trained on. Test domains never select anything."""

    test: Names = ()
    """domains that the model is tested on"""
    val: Names = ()
    """domains whose accuracy may choose a round"""


class ClientSettings(Described):
    """The partition of images over clients, and the number of clients in a round."""

    number: int = Field(10, ge=1)
    """number of clients, N; with the partition client, the data decide"""
    per_round: int | None = Field(None, ge=1)
    """clients sampled in each round, K; none for all"""
    partition: str = "heterogeneous"
    """how images are divided among clients, rules joined by +: heterogeneous (by lambda), domain,
    iid; dirichlet, class_dirichlet, shards; quantity; or client: whoever really holds the data; see
    docs/data_sets.md"""
    heterogeneity: Fraction = 0.1
    """lambda: from 0 (one domain per client) to 1 (the same mix of domains at all clients)"""
    alpha: Positive | None = None
    """concentration of the Dirichlet distribution of labels; none for no label skew"""
    shards: int | None = Field(None, ge=1)
    """label shards per client (McMahan et al. 2017: 2); none for no label skew"""
    quantity_alpha: Positive | None = None
    """concentration of the Dirichlet distribution of client sizes; none for about equal sizes"""


class ModelSettings(Described):
    """The network that all clients share."""

    backbone: str = "resnet18"
    """cnn or cnn_gn (small, the latter with group normalisation), or a classification network of
    torchvision or timm (timm:NAME where both have it)"""
    weights: str | None = None
    """pretrained weights: none, imagenet, or a .safetensors or .pth file"""
    embedding: Literal["none", "linear", "bottleneck"] = "none"
    """layer before the classifier (PARDON: linear; CSAC, FedIG: bottleneck)"""
    normalization: Literal["auto", "train", "frozen"] = "auto"
    """statistics of batch normalisation: train, frozen (as in PARDON's released code), or auto
    (frozen if the backbone is pretrained)"""

    @field_validator("weights")
    @classmethod
    def _fixed(cls, weights: str | None) -> str | None:
        named = weights in (None, "none", IMAGENET)
        return weights if named else str(_absolute(Path(str(weights))))


class TrainSettings(Described):
    """Local training of a client in one round."""

    rounds: int = Field(20, ge=1)
    """number of rounds, R"""
    local_epochs: int = Field(1, ge=1)
    """passes over a client's images per round"""
    local_steps: int | None = Field(None, ge=1)
    """optimizer steps per round, in place of epochs"""
    select_every: int | None = Field(None, ge=1)
    """a client sends its best model instead of its last, measured every so many steps on its own
    validation images (FedIG: 20); none for the last"""
    batch_size: int = Field(32, ge=1)
    """images per batch"""
    drop_last: bool = False
    """leave out an epoch's last batch if it is not full, unless it is the only one"""
    optimizer: Literal["adam", "sgd"] = "adam"
    """the clients' optimizer"""
    keep_optimizer: bool = False
    """clients keep the state of their optimizer (momentum, Adam's moments) from round to round"""
    lr: Positive = 1e-3
    """the clients' learning rate"""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """momentum of SGD"""
    weight_decay: NotNegative = 0.0
    """weight decay of the clients' optimizer"""
    decay: Literal["all", "weights"] = "all"
    """what weight decay applies to: all, or weights (no biases, no normalisation layers)"""
    gradient_clipping: Positive | None = None
    """largest norm of a step's whole gradient; none for no clipping"""
    augmentation: str | Fields = "none"
    """augmentation of training images: none, aerial, microscope, the name of a data set for its
    own, a registered one, or fields: {crop_scale: [0.8, 1], flip: 0.5}"""
    hue: Literal["rotation", "hsv"] = "rotation"
    """how augmentation changes the hue: by a rotation at constant luma (faster), or by a shift in
    HSV, as torchvision and the methods' published code do"""
    graphs: bool = False
    """on a GPU, record a training step as a CUDA graph and replay it, if the replay does what the
    step does; not yet tried on a GPU"""
    schedule: Literal["constant", "cosine", "linear", "step"] = "constant"
    """how the learning rate falls from round to round"""
    schedule_by: Literal["round", "epoch", "step"] = "round"
    """when the learning rate changes: after each round, or also within rounds, by epoch or step"""
    warmup_rounds: int = Field(0, ge=0)
    """number of first rounds in which the learning rate rises to its full value"""
    schedule_final: Fraction = 0.0
    """cosine, linear: the share of the learning rate that the schedule reaches at the end of the
    last round"""
    schedule_steps: tuple[Fraction, ...] = (0.5, 0.75)
    """step: shares of the rounds after which the learning rate falls"""
    schedule_gamma: Positive = 0.1
    """step: factor of the learning rate at each of schedule_steps"""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """share of the target that is spread over all classes"""
    class_weights: Literal["none", "balanced"] = "none"
    """weights of classes in the loss: none, or balanced: at each client every class counts as much
    as any other, so that images of rare classes count more"""
    trainable: Trainable = "all"
    """which part of the network is trained, and sent in each round: all; head, what follows the
    featurizer; norm+head, normalisation layers as well; lora, low-rank adapters and the head (needs
    peft). The rest is sent once"""
    lora_rank: int = Field(8, ge=1)
    """rank of LoRA's adapters"""
    head: Literal["random", "ridge"] = "random"
    """what the classifier starts from: random weights, or the closed-form solution (ridge) from
    sums that all clients send before round 1"""
    head_rounds: int = Field(0, ge=0)
    """number of first rounds in which the featurizer is frozen and only the rest is trained"""

    @model_validator(mode="after")
    def _trains_in_full(self) -> "TrainSettings":
        for name in ("warmup_rounds", "head_rounds"):
            if getattr(self, name) and getattr(self, name) >= self.rounds:
                raise ValueError(f"{name} must be fewer than all {self.rounds} rounds")
        if self.schedule_by == "epoch" and self.local_steps:
            raise ValueError(
                "schedule_by: epoch needs rounds of epochs, and local_steps is "
                f"{self.local_steps}: set that to none, or use schedule_by: step"
            )
        return self


class ServerSettings(Described):
    """Aggregation at the server, and the checks on updates."""

    min_updates: int = Field(1, ge=1)
    """fewest valid updates from which a round may be aggregated"""
    largest_change: Positive | None = 100.0
    """longest change of an update, as a multiple of the median over earlier rounds (in the first:
    over this round); none for no limit, as with a defence that replaces the mean"""
    attempts: int = Field(2, ge=1)
    """attempts at a round, each with newly sampled clients, before the run fails"""
    weighting: Literal["examples", "uniform"] = "examples"
    """how clients are weighted in the mean: by their number of images (examples), or equally
    (uniform); a method with weights of its own keeps them"""
    optimizer: Literal["none", "fedavgm", "fedadam", "fedyogi", "fedadagrad"] = "none"
    """the server's optimizer, whose gradient is the mean of the updates; none takes the mean"""
    lr: Positive | None = None
    """learning rate of the server's optimizer; none for 1 with fedavgm (Hsu et al. 2019) and 0.01
    otherwise (Reddi et al. 2021 tune it; try 0.001 to 0.1)"""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """momentum (both papers; Reddi et al. run fedadagrad with 0)"""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """decay of the mean of squared changes, fedadam and fedyogi (Reddi et al. 2021)"""
    tau: Positive = 1e-3
    """adaptivity: added to the root of the squares (Reddi et al. 2021)"""
    averaging: Literal["none", "swa", "ema"] = "none"
    """which weights are the result: the last round's (none), their mean over the last rounds (swa),
    or an exponential moving average over all rounds (ema)"""
    swa_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """swa: share of the rounds, counted from the end, that are averaged"""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """ema: decay of the moving average in each round"""
    wise_ft: Literal["none", "auto"] | Fraction = "none"
    """after the last round, mix the averaged weights with those that training of the whole network
    started from (WiSE-FT): the share of the former, or auto, chosen on in-domain validation"""


class EvaluateSettings(Described):
    """When and how the global model is evaluated."""

    every: int = Field(1, ge=1)
    """rounds between evaluations; the last round is always evaluated"""
    every_of_last: int = Field(0, ge=0)
    """number of final rounds that are evaluated whatever every says"""
    budgets: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """evaluate when training has seen these numbers of images, all clients together, in place of
    every; the last round is always evaluated"""
    batch_size: int = Field(256, ge=1)
    """images per batch in evaluation"""
    pictures: bool = True
    """show images in the report: stylized training images, some of the unseen domain, and the most
    confident mistakes; never images of a deployment's sites"""
    averages: Literal["last_round", "every", "never"] = "last_round"
    """when averaged weights (EMA, SWA) are evaluated beside the last ones; those that are the
    result always are, and with never no others are kept"""
    decision: Name | None = None
    """a class to decide about, against the rest: adds AUROC, average precision, sensitivity,
    specificity and predictive values, at a threshold chosen on in-domain validation"""
    specificity: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """specificity that the decision's threshold must reach on in-domain validation"""
    sensitivity: Annotated[float, Field(gt=0, lt=1)] | None = None
    """sensitivity that it must reach, in place of specificity"""
    prevalence: Annotated[float, Field(gt=0, lt=1)] | None = None
    """share of the class where the model will be used, for predictive values; by default its share
    of the images"""
    select_by: str = "accuracy"
    """the validation metric by which a round is chosen: accuracy, balanced_accuracy, auroc,
    calibration_error, macro_f1 (iWildCam's), ...; see docs/compare.md"""
    select_over: Literal["domain_mean", "pooled", "worst_domain"] = "domain_mean"
    """how select_by is aggregated over validation domains; pooled (each image counts once) goes
    with accuracy only"""

    @model_validator(mode="after")
    def _asks_for_one_decision(self) -> "EvaluateSettings":
        fields, said = type(self).model_fields, self.model_fields_set
        changed = [name for name in OF_DECISION if getattr(self, name) != fields[name].default]
        if changed and self.decision is None:
            raise ValueError(
                f"{changed[0]} belongs to a decision about a class: name the class (decision), or "
                f"leave {changed[0]} out"
            )
        # A run's file names every field; there the default was not asked for.
        asked = "specificity" in said and len(said) < len(fields)
        if self.sensitivity is not None and (asked or "specificity" in changed):
            raise ValueError(
                "a threshold reaches a specificity or a sensitivity: leave one of them out"
            )
        return self

    def after(self, round: int, rounds: int) -> bool:
        """Whether the model is evaluated after ``round``, from 1, of ``rounds``."""
        return round % self.every == 0 or round > rounds - max(1, self.every_of_last)


class MethodChoice(Described):
    """A method by name, with its hyper-parameters."""

    name: str = "fedavg"
    """the method; `feddg methods` lists them"""
    settings: Fields = Field(default_factory=dict)
    """the method's own hyper-parameters"""


class PrivacySettings(Described):
    """Clipping of updates, and noise."""

    clipping: Literal["none", "fixed", "adaptive"] = "none"
    """whether clients clip their updates: not, to a fixed norm, or to one that adapts"""
    clipping_norm: Positive = 0.1
    """longest change of the weights; with adaptive clipping, at the start"""
    noise_multiplier: NotNegative = 0.0
    """noise multiplier z; with 0 updates are only clipped"""
    clipping_quantile: Fraction = 0.5
    """adaptive: share of updates that should stay unclipped"""
    clipping_rate: Positive = 0.2
    """adaptive: learning rate of the norm"""
    epsilon: Positive | None = None
    """largest epsilon of a client over all rounds' updates; sets the noise for the planned rounds
    unless noise_multiplier does, and ends the run before it is exceeded"""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """delta of every epsilon; should be well below 1 / number of clients"""
    noised_at: Literal["server", "client"] = "server"
    """who adds the noise: the server, which must be trusted, once to the mean; or every client to
    its own update (local differential privacy)"""
    sampling: Literal["public", "secret"] = "public"
    """how a round's clients are drawn: from the seed, so that anybody may know them; or each client
    by a secret draw of its own, which costs less privacy"""
    style_epsilon: Positive | None = None
    """largest epsilon of a style that leaves a client, whose moments are then clipped and noised;
    none for styles as they are"""
    style_unit: Literal["image", "client"] = "image"
    """what a noised style protects: a single image, or all images of a client"""
    style_norm: Positive = 1.0
    """largest moments of an image's style, as a multiple of those of most textures"""
    record_epsilon: Positive | None = None
    """largest epsilon of an image over all rounds: in every step gradients are clipped image by
    image and noised at the client (DP-SGD)"""
    record_norm: Positive = 1.0
    """norm to which an image's gradient is clipped"""
    open_styles: bool = False
    """let styles leave clients without noise although updates are protected"""

    @model_validator(mode="before")
    @classmethod
    def _an_epsilon_asks_for_clipping(cls, values: Any) -> Any:
        asked = isinstance(values, Mapping) and values.get("epsilon") not in (None, "none")
        return {"clipping": "fixed", **values} if asked else values

    @property
    def noised(self) -> bool:
        """Whether updates get noise."""
        return bool(self.noise_multiplier or self.epsilon)

    @property
    def hides_images(self) -> str:
        """The field whose epsilon protects a single image, such as ``privacy.record_epsilon``."""
        if self.record_epsilon is not None:
            return "privacy.record_epsilon"
        styles = self.style_epsilon is not None and self.style_unit == "image"
        return "privacy.style_epsilon" if styles else ""

    @model_validator(mode="after")
    def _clips_what_it_noises(self) -> "PrivacySettings":
        if self.noised and self.clipping == "none":
            raise ValueError("noise without clipping protects nothing: set clipping, too")
        if self.open_styles and self.style_epsilon is not None:
            raise ValueError("open_styles and style_epsilon exclude each other: choose one")
        if self.noised_at == "client" and not self.noised:
            raise ValueError("noised_at: client needs noise: set epsilon, or noise_multiplier")
        if self.noised_at == "client" and self.clipping == "adaptive":
            raise ValueError(
                "adaptive clipping and noised_at: client exclude each other: whether an update was "
                "clipped would leave its client without noise; set clipping to fixed",
            )
        if self.noised_at == "client" and self.sampling == "secret":
            raise ValueError(
                "sampling: secret and noised_at: client exclude each other: the server sees whose "
                "update it is, so that the draw hides nothing from it; set sampling to public",
            )
        return self


class DefenceChoice(Described):
    """A defence by name, with its settings."""

    name: str
    settings: Fields = Field(default_factory=dict)


class ExperimentSettings(Described):
    """All settings of an experiment; :class:`feddg.experiment.Experiment` completes them."""

    name: str | None = None
    """readable start of the run folder's name"""
    preset: str | None = None
    """whose protocol fills in what you leave out; none for the data set's own"""
    data: DataSettings = DataSettings()
    hold_out: HoldOut = HoldOut()
    """domains that nobody trains on: sketch, or val=art_painting,test=photo"""
    clients: ClientSettings = ClientSettings()
    method: MethodChoice = MethodChoice()
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    server: ServerSettings = ServerSettings()
    privacy: PrivacySettings = PrivacySettings()
    """differential privacy: epsilon=8,delta=1e-5, and any other field of privacy"""
    defences: tuple[DefenceChoice, ...] = ()
    """defences that updates pass through, in order; see docs/security.md"""
    evaluate: EvaluateSettings = EvaluateSettings()
    seed: int = 0
    """seed of all randomness in the experiment"""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """numbers used in training; auto: bfloat16 where the device is fast at it"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ...; all: every GPU"""


ACTS_WITH: dict[str, tuple[str, ...]] = {
    "clients.heterogeneity": ("clients.partition: heterogeneous",),
    "train.local_epochs": ("train.local_steps: none",),
    "train.decay": ("train.weight_decay",),
    "train.keep_optimizer": ("train.optimizer: adam", "train.momentum"),
    "train.schedule_by": (
        *(f"train.schedule: {name}" for name in ("cosine", "linear", "step")),
        "train.warmup_rounds",
    ),
    "train.momentum": ("train.optimizer: sgd",),
    "train.schedule_final": ("train.schedule: cosine", "train.schedule: linear"),
    **dict.fromkeys(("train.schedule_steps", "train.schedule_gamma"), ("train.schedule: step",)),
    "train.lora_rank": ("train.trainable: lora",),
    **dict.fromkeys(("server.lr", "server.beta1"), ("server.optimizer",)),
    "server.beta2": ("server.optimizer: fedadam", "server.optimizer: fedyogi"),
    "server.tau": tuple(f"server.optimizer: fed{kind}" for kind in ("adam", "yogi", "adagrad")),
    "server.swa_fraction": ("server.averaging: swa",),
    "server.ema_decay": ("server.averaging: ema",),
    "privacy.clipping_norm": ("privacy.clipping",),
    **dict.fromkeys(
        ("privacy.clipping_quantile", "privacy.clipping_rate"), ("privacy.clipping: adaptive",)
    ),
    "privacy.delta": (
        *("privacy.epsilon", "privacy.record_epsilon", "privacy.style_epsilon"),
        "privacy.noise_multiplier",
    ),
    "privacy.sampling": ("privacy.epsilon", "privacy.noise_multiplier"),
    **dict.fromkeys(("privacy.style_norm", "privacy.style_unit"), ("privacy.style_epsilon",)),
    "privacy.record_norm": ("privacy.record_epsilon",),
    **dict.fromkeys(
        ("data.image_size", "data.resize", "data.range", "data.bands", "data.tile"),
        ("data.features: none",),
    ),
    **dict.fromkeys(("train.augmentation", "train.hue"), ("data.features: none",)),
}
"""Fields that do nothing unless one of others is set, or has a value."""


def without_effect(settings: ExperimentSettings, given: Mapping[str, object]) -> list[str]:
    """Returns a sentence for each given field that does nothing without another one.

    Args:
        settings: of the whole experiment.
        given: the fields that were given, nested.
    """
    values = leaves(settings.model_dump(mode="json"))
    usual, said = leaves(ExperimentSettings().model_dump(mode="json")), leaves(given)

    def holds(need: str) -> bool:
        field, _, value = need.partition(": ")
        if not value:
            return values[field] not in (None, "none", 0.0)
        parts = str(values[field] or "none").split("+")  # a partition may have several
        return value in map(str.strip, parts)

    return [
        f"{field} is {values[field]} and does nothing: it goes with {' or '.join(needs)}."
        for field, needs in ACTS_WITH.items()
        if field in said and values[field] != usual[field] and not any(map(holds, needs))
    ]


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Returns the values of each key, both in the order of the pairs."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


ONE_VALUE = "augmentation"
"""The field that is one value, by its name or by its fields, and takes another's place whole."""


def merge(base: Fields, over: Mapping[str, object]) -> Fields:
    """Returns ``base`` overridden by ``over``, with mappings merged at every depth."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, Mapping) and key != ONE_VALUE:
            value = merge(below, value)
        merged[key] = value
    return merged


def nested(path: str, value: object) -> Fields:
    """Returns ``value`` under a dotted path: ``train.lr`` gives ``{"train": {"lr": value}}``."""
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


def leaves(fields: Mapping[str, object], prefix: str = "") -> Fields:
    """Returns nested fields by dotted path; an empty mapping is a value, and an augmentation is."""
    values: Fields = {}
    for key, value in fields.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and key != ONE_VALUE:
            values |= leaves(value, f"{path}.")
        else:
            values[path] = value
    return values
