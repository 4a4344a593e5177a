"""What one training run is: the values a step depends on. Imports no torch, so parents and planners can hold it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from workbench.errors import refusal

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MAX_STEPS = 100_000_000
"""Beyond any training; a number above it is a slip of the hand."""


class LossScaling(BaseModel):
    """Constants of fp16 loss scaling; the defaults are ``torch.amp.GradScaler``'s.

    ``dynamic`` multiplies the scale by ``growth`` after ``interval`` steps without overflow and by ``backoff`` after an
    overflow; ``static`` keeps ``init``; ``none`` does not scale. The step of an overflow is skipped in either case.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["dynamic", "static", "none"] = "dynamic"
    init: PositiveFloat = 2.0**16
    growth: Annotated[float, Field(gt=1)] = 2.0
    backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    interval: PositiveInt = 2000
    floor: PositiveFloat = 1.0
    """The scale is not lowered beyond; a run that overflows here is stopped. Below 1 the loss is scaled *down*."""
    hysteresis: PositiveInt = 1
    """Which overflow since the last growth is the first to lower the scale, as in Megatron-LM (Narayanan et al. 2021)."""

    @model_validator(mode="after")
    def _floor_lies_below(self) -> "LossScaling":
        if self.mode == "dynamic" and self.floor > self.init:
            raise ValueError(f"floor {self.floor:g} exceeds init {self.init:g}")
        return self


class TrainConfig(BaseModel):
    """One training run, whole: model, data, numerics, optimizer and length.

    Two runs of equal configuration on one device see the same samples in the same order from the same initial weights.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "vit-nano"
    """Registered name, ``package.module:factory``, ``timm:NAME`` or ``hf:NAME``."""
    model_args: dict[str, Any] = {}
    """Keyword overrides for the model: fields of ``VitConfig``, or arguments of the factory."""
    data: str = "digits"
    """Name of a manifest, a path to an image folder, or ``synthetic``."""
    device: str = "auto"
    global_batch: PositiveInt = 64
    """Samples per optimizer step."""
    micro_batch: PositiveInt | None = None
    """Samples per forward; ``None`` means the whole global batch at once. The last micro-batch may be smaller."""
    precision: Precision = "fp32"
    precision_rules: dict[str, str] = {}
    """Dtypes of single modules inside the autocast region; see ``module_precision.apply_precision``."""
    loss_scaling: LossScaling = LossScaling()
    """Used with ``fp16`` only."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    fused_optimizer: bool = False
    learning_rate: PositiveFloat = 1e-3
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.05
    clip_norm: PositiveFloat | None = 1.0
    schedule: Literal["constant", "cosine"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Optimizer steps of linear learning-rate warm-up (not the protocol's timing warm-up)."""
    steps: Annotated[int, Field(gt=0, le=MAX_STEPS)] = 400
    """Optimizer steps of the whole run; the schedule ends here."""
    seed: int = 0
    compile: bool = False
    num_workers: Annotated[int, Field(ge=0)] = 0
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    parallel: dict[str, Any] = {}
    """Fields of a ``ParallelPlan``, for tasks that launch ranks; a trainer, which is one process, refuses any."""

    def __init__(self, **fields: Any) -> None:
        """Raises ``Refused`` for a field that is unknown or out of range."""
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise refusal("TrainConfig", error, type(self).model_fields) from None

    @model_validator(mode="after")
    def _data_decides_its_own_shape(self) -> "TrainConfig":
        if taken := {"num_classes", "image_size", "in_channels"} & self.model_args.keys():
            raise ValueError(f"model_args cannot set {sorted(taken)[0]}, which is the data's to say")
        return self

    @model_validator(mode="after")
    def _micro_batch_fits(self) -> "TrainConfig":
        if self.micro_batch is not None and self.micro_batch > self.global_batch:
            raise ValueError(f"micro_batch {self.micro_batch} exceeds global_batch {self.global_batch}")
        return self

    @property
    def samples_per_forward(self) -> int:
        return self.micro_batch or self.global_batch
