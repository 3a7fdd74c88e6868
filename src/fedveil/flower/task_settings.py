"""The settings of a task that is run over Flower by name: they travel with the run, as one text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from fedveil.auditing.experiment import TaskSettings
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.settings import FederationSettings
from fedveil.fields import Count, Positive, problems
from fedveil.flower.settings import Aggregation, LocalSteps, ServerSettings
from fedveil.intake import LONGEST
from fedveil.tasks.task import Task, task

KEY = "fedveil"  # of the run's settings
# A client draws its noise from a seed only where its own environment allows it: no server may ask for that.
SEEDED_NOISE = "FEDVEIL_SEEDED_NOISE"
TRUTHS = "FEDVEIL_TRUTHS"  # the folder in which clients of a simulation leave what was behind captured updates


class FlowerSettings(BaseModel):
    """What only a run over Flower has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    minimum: Count = 2
    wait: Positive = 300.0
    limit: Positive = 600.0
    aggregation: Aggregation = "mean"
    trim: float = 0.2
    malicious: int = 0
    longest: Positive = LONGEST
    batches_per_message: Count = 1  # FedSGD: the batches whose gradients one message is the mean of
    track: tuple[Literal["tensorboard", "mlflow"], ...] = ()


class TaskRun(BaseModel):
    """A task by name, how it is learned and under which defense."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: TaskSettings = TaskSettings()
    federation: FederationSettings = FederationSettings(protocol="fedavg", rounds=3)
    flower: FlowerSettings = FlowerSettings()
    defense: str = "none"
    noise: Literal["secure", "seeded"] = "secure"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    out: Path = Path("fedveil-out/flower")

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except pydantic.ValidationError as error:
            raise FedveilError(problems(error)) from None

    @classmethod
    def of_run(cls, run_config: Any) -> Self:
        """The settings that came with a run."""
        told = run_config.get(KEY)
        if not isinstance(told, str):
            raise FedveilError(f"the run has no setting {KEY}: start it with `fedveil federate`")
        try:
            return cls.model_validate_json(told)
        except pydantic.ValidationError as error:
            raise FedveilError(f"the run's setting {KEY} cannot be read: {problems(error)}") from None

    def told(self) -> str:
        """The settings as they go with a run."""
        return self.model_dump_json(exclude_none=True)

    @property
    def chain(self) -> Chain:
        """The defenses."""
        return Chain.of(self.defense)

    @property
    def sends_gradients(self) -> bool:
        """Whether it is FedSGD."""
        return self.federation.protocol == "fedsgd"

    def check(self) -> None:
        """Refuse what cannot work over Flower, before anything is started."""
        settings = self.federation
        if settings.warmup_rounds or settings.patience is not None or settings.local_utility:
            raise FedveilError(
                "warm-up rounds, patience and local utility are for `fedveil train`: leave them out here"
            )
        if len({settings.lr_at(number) for number in range(1, settings.rounds + 1)}) > 1:
            raise FedveilError("lr_steps are for `fedveil train`: give one learning rate here")
        if self.task.buffers == "local":
            raise FedveilError(
                "buffers that stay with the clients leave the server's model without any: use shared or recalibrated"
            )
        if self.chain.aggregates:
            raise FedveilError(
                f"{self.chain} acts on a trusted server, which is not built for Flower yet: use "
                "`fedveil train`, or a defense of the clients"
            )
        if self.federation.protocol == "fedavg" and self.flower.batches_per_message > 1:
            raise FedveilError("several batches per message are for the protocol fedsgd")
        self.chain.check_message(settings.message)
        self.server()

    def build(self, *, clients: int | None = None, data: str | None = None) -> Task:
        """The task: all of it, or that of a site with data of its own."""
        given = self.task
        return task(
            data or given.data,
            model=given.model,
            clients=clients or given.clients,
            split=given.split,
            partition=given.partition,
            seed=self.seed,
            data_root=given.data_root,
            limit=given.limit,
            buffers=given.buffers,
        )

    def server(self) -> ServerSettings:
        """What the server does."""
        settings, extra = self.federation, self.flower
        return ServerSettings(
            rounds=settings.rounds,
            seed=self.seed,
            sampling_rate=settings.sampling_rate,
            clients=self.task.clients,
            minimum=min(extra.minimum, max(1, math.ceil(settings.sampling_rate * self.task.clients))),
            wait=extra.wait,
            limit=extra.limit,
            kind=settings.message,
            aggregation=extra.aggregation,
            weighting=settings.weighting,
            trim=extra.trim,
            malicious=extra.malicious,
            longest=extra.longest,
            lr=settings.lr,
            momentum=settings.momentum if self.sends_gradients else 0.0,
            weight_decay=settings.weight_decay if self.sends_gradients else 0.0,
            evaluate_every=settings.evaluate_every,
            record_rounds=settings.record_rounds,
            record_clients=settings.record_clients,
            track=extra.track,
        )

    def local(self) -> LocalSteps:
        """What is public of the clients' training."""
        settings = self.federation
        return LocalSteps(
            batch_size=settings.batch_size,
            lr=settings.lr,
            local_epochs=settings.local_epochs,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            batches_per_message=self.flower.batches_per_message,
        )
